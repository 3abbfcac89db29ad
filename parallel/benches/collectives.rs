//! Times collectives between processes of this machine: one JSON line for each operation and size, from
//! rank 0.
//!
//! ```text
//! cargo bench -p ferrotron-parallel --bench collectives -- RANKS tcp|auto MAX_BYTES
//! ```
//!
//! A sample is the time of some calls one after another, divided by their number; the median of the samples
//! counts. Sizes are bytes of the whole buffer, in f32. `benches/peers/collectives.sh` runs Gloo and Open MPI
//! beside it, which are timed in the same way.

use ferrotron_autograd::SharedFlatBuffer;
use ferrotron_parallel::collective::{
    Encryption, Group, RankConfig, Reduction, Transport, World, WorldConfig, run_rank_process,
};
use ferrotron_tensor::{Category, DType, Device, Error, FlatBuffer, Result};
use std::process::{Command, Stdio};

use std::time::Instant;

const SAMPLES: usize = 7;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let number = |i: usize, default: usize| {
        args.get(i).map_or(Ok(default), |arg| {
            arg.parse().map_err(|_| Error::config("bench", format!("'{arg}' is no number")))
        })
    };
    let (ranks, max_bytes) = (number(0, 2)?, number(2, 256 << 20)?);
    let name = args.get(1).map_or("auto", String::as_str);
    let transport = match name {
        "tcp" | "sealed" => Transport::Tcp,
        "auto" => Transport::Auto,
        other => {
            let what = format!("'{other}' is none of tcp, sealed and auto");
            return Err(Error::config("bench", what));
        }
    };
    let (rank, port) = (number(3, 0)?, number(4, free_port()?)?);
    let io = |error: std::io::Error| Error::io("bench", error.to_string());
    let mut others = Vec::new();
    if args.len() < 4 {
        let program = std::env::current_exe().map_err(io)?;
        for rank in 1..ranks {
            let numbers = [max_bytes, rank, port].map(|n| n.to_string());
            let mut command = Command::new(&program);
            command.arg(ranks.to_string()).arg(name).args(numbers).stdin(Stdio::null());
            others.push(command.spawn().map_err(io)?);
        }
    }
    let config = RankConfig {
        rank,
        size: ranks,
        master: "127.0.0.1".to_string(),
        port: port as u16,
        secret: None,
        job_id: None,
        transport,
        encryption: if name == "sealed" { Encryption::Always } else { Encryption::default() },
        world: WorldConfig::default(),
    };
    run_rank_process(&config, |world| time_all(&world, max_bytes))?;
    others.into_iter().try_for_each(|mut other| other.wait().map(drop)).map_err(io)
}

fn free_port() -> Result<usize> {
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0));
    let address = listener.and_then(|listener| listener.local_addr());
    Ok(address.map_err(|error| Error::io("bench", error.to_string()))?.port().into())
}

fn time_all(world: &World, max_bytes: usize) -> Result<()> {
    let ranks: Vec<usize> = (0..world.size()).collect();
    // On this thread where ranks share memory, as calls of tensor parallelism are: each call is waited for at once.
    let group = world.group("all", &ranks)?.blocking();
    for op in ["all_reduce", "all_gather", "reduce_scatter"] {
        let mut bytes = 4096;
        while bytes <= max_bytes {
            let seconds = time(&group, op, bytes)?;
            if world.rank() == 0 {
                let ranks = world.size();
                println!(
                    r#"{{"op": "{op}", "ranks": {ranks}, "bytes": {bytes}, "seconds": {seconds:.9}}}"#
                );
            }
            bytes *= 4;
        }
    }
    Ok(())
}

fn time(group: &Group, op: &str, bytes: usize) -> Result<f64> {
    let ranges = [("buffer".to_string(), vec![bytes / 4])];
    let flat = FlatBuffer::new(&Device::cpu(1)?, DType::F32, Category::Communication, &ranges)?;
    let flat = SharedFlatBuffer::new(flat);
    let call = || match op {
        "all_reduce" => group.all_reduce_flat(&flat, Reduction::Sum).wait(),
        "all_gather" => group.all_gather_flat(&flat).wait(),
        _ => group.reduce_scatter_flat(&flat, Reduction::Sum).wait(),
    };
    let calls = match bytes {
        0..65537 => 200,
        65537..4194305 => 20,
        4194305..16777217 => 5,
        _ => 1,
    };
    let mut samples = Vec::new();
    for sample in 0..=SAMPLES {
        group.barrier().wait()?;
        let start = Instant::now();
        for _ in 0..calls {
            call()?;
        }
        if sample > 0 {
            samples.push(start.elapsed().as_secs_f64() / calls as f64); // the first is for warming up
        }
    }
    samples.sort_by(f64::total_cmp);
    Ok(samples[SAMPLES / 2])
}
