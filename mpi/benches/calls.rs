//! Times collectives by MPI beside those of the host's own transports, in turns in the same processes of one machine.
//!
//! ```text
//! cargo bench -p ferrotron-mpi --features mpi -- RANKS
//! ```
//!
//! Prints medians in microseconds of f32 buffers, as `cargo bench -p ferrotron-parallel --bench collectives` does: calls of
//! a flat buffer, which go to a progress thread and back.

use ferrotron_autograd::SharedFlatBuffer;
use ferrotron_parallel::collective::{Group, Reduction, run_rank_process};
use ferrotron_parallel::launch::RankEnvironment;
use ferrotron_parallel::mesh::{Mesh, ParallelDims};
use ferrotron_parallel::tensor_parallel::SequenceParallel;
use ferrotron_tensor::{Category, DType, Device, Error, FlatBuffer, Result};
use std::process::Command;
use std::time::{Duration, Instant};

const ROUNDS: usize = 7;
const TIMEOUT: Duration = Duration::from_secs(600);
const SIZES: [usize; 5] = [4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20];

fn main() -> Result<()> {
    if std::env::var_os("OMPI_COMM_WORLD_SIZE").is_some() {
        return rank();
    }
    let ranks = std::env::args().skip(1).find(|arg| arg != "--bench").unwrap_or("2".into());
    let program = std::env::current_exe().map_err(io)?;
    let mut mpirun = Command::new("mpirun");
    mpirun.args(["--allow-run-as-root", "--oversubscribe", "-n", &ranks]).arg(program);
    match mpirun.status().map_err(io)?.success() {
        true => Ok(()),
        false => Err(Error::io("bench", "mpirun has failed")),
    }
}

fn io(error: std::io::Error) -> Error {
    Error::io("bench", error.to_string())
}

fn rank() -> Result<()> {
    let own = RankEnvironment::from_variables(&std::env::vars().collect())?
        .ok_or_else(|| Error::config("bench", "mpirun gives no rank"))?;
    let config = own.rank_config(None, TIMEOUT)?;
    run_rank_process(&config, |world| {
        let layout = ParallelDims::new(world.size(), 1, 1, 1)?;
        let mesh = Mesh::new(&world, layout, SequenceParallel::Off)?;
        let mpi = ferrotron_mpi::with_mpi(&mesh, TIMEOUT)?;
        if mesh.rank() == 0 {
            println!("| operation | ranks | bytes | own transports | MPI | ratio |");
            println!("|---|---|---|---|---|---|");
        }
        for operation in ["all_reduce", "all_gather", "reduce_scatter"] {
            for bytes in SIZES {
                let mut samples = [Vec::new(), Vec::new()];
                for round in 0..=ROUNDS {
                    for (group, samples) in
                        [mesh.dp_cp(), mpi.dp_cp()].into_iter().zip(&mut samples)
                    {
                        let seconds = time(group, operation, bytes)?;
                        // The first round connects.
                        samples.extend(Some(seconds).filter(|_| round > 0));
                    }
                }
                let [own, mpi] = samples.map(|mut samples| {
                    samples.sort_unstable_by(f64::total_cmp);
                    1e6 * samples[samples.len() / 2]
                });
                if mesh.rank() == 0 {
                    let ranks = mesh.layout().world();
                    println!(
                        "| {operation} | {ranks} | {bytes} | {own:.0} | {mpi:.0} | {:.2} |",
                        own / mpi
                    );
                }
            }
        }
        Ok(())
    })
}

/// Seconds of a call.
fn time(group: &Group, operation: &str, bytes: usize) -> Result<f64> {
    let ranges = [("buffer".to_string(), vec![bytes / 4])];
    let flat = FlatBuffer::new(&Device::cpu(1)?, DType::F32, Category::Communication, &ranges)?;
    let flat = SharedFlatBuffer::new(flat);
    let calls = (4 << 20 >> bytes.ilog2()).clamp(1, 200);
    group.barrier().wait()?;
    let start = Instant::now();
    for _ in 0..calls {
        match operation {
            "all_reduce" => group.all_reduce_flat(&flat, Reduction::Sum).wait()?,
            "all_gather" => group.all_gather_flat(&flat).wait()?,
            _ => group.reduce_scatter_flat(&flat, Reduction::Sum).wait()?,
        }
    }
    Ok(start.elapsed().as_secs_f64() / f64::from(calls))
}
