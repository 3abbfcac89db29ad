//! Measures a step of a small GPT on one rank, and on 2, 4 and 8 that share the processor: data parallel and tensor
//! parallel, as threads and as processes. The global batch is the same for all.
//!
//! `taskset -c 0 cargo bench --bench ranks [-- STEPS] [threads|processes] [dp8 ...]` measures them on one core. The floor
//! of N data-parallel ranks is their work without any communication: one thread takes the steps of N trainers with a share
//! of the batch each. `switches` are context switches in a step of all ranks together. Steps of rank 0 are sorted by the state of
//! the core: `x` and the floor are those of the state in which the row is.

#[path = "common/states.rs"]
mod states;

use ferrotron::models::bench::{BenchConfig, median, trainer};
use ferrotron::models::gpt::GptConfig;
use ferrotron::parallel::collective::{
    Encryption, RankConfig, Transport, World, WorldConfig, run_rank_process, run_threads,
};
use ferrotron::parallel::mesh::{Mesh, ParallelDims};
use ferrotron::parallel::tensor_parallel::SequenceParallel;
use ferrotron::{Device, Error, Result};
use states::{STATES, Sample, Watch, by_state, fast, probe};
use std::net::TcpListener;
use std::process::{Command, Stdio};

/// Rounds of all layouts in turn; the medians count.
const ROUNDS: usize = 5;
const BATCH: usize = 8;
const WARMUP: usize = 5;

/// Ranks and tensor-parallel size.
const LAYOUTS: [(usize, usize); 7] = [(1, 1), (2, 1), (4, 1), (8, 1), (2, 2), (4, 4), (8, 8)];

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let numbers: Vec<usize> = args.iter().filter_map(|arg| arg.parse().ok()).collect();
    if let [steps, ranks, tp, rank, port] = numbers[..] {
        return rank_process(steps, ranks, tp, rank, port as u16).map(drop);
    }
    let steps = numbers.first().copied().unwrap_or(30);
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let kinds = ["threads", "processes"];
    let wanted = kinds.iter().filter(|kind| words.contains(kind)).collect::<Vec<_>>();
    for kind in kinds.iter().filter(|kind| wanted.is_empty() || wanted.contains(kind)) {
        compare(kind, steps, &words)?;
    }
    Ok(())
}

fn compare(kind: &str, steps: usize, words: &[&str]) -> Result<()> {
    let name = |(ranks, tp): (usize, usize)| match tp {
        1 => format!("dp{ranks}"),
        tp => format!("tp{tp}"),
    };
    let mut layouts: Vec<(usize, usize)> = LAYOUTS.to_vec();
    if words.iter().any(|word| layouts.iter().any(|&layout| name(layout) == *word)) {
        layouts.retain(|&layout| layout.0 == 1 || words.contains(&&*name(layout)));
    }
    let mut found: Vec<Vec<Cost>> = layouts.iter().map(|_| Vec::new()).collect();
    let mut floors = vec![Vec::new(); layouts.len()];
    for _ in 0..ROUNDS {
        for (i, &(ranks, tp)) in layouts.iter().enumerate() {
            found[i].push(match kind {
                "threads" => in_threads(steps, ranks, tp)?,
                _ => in_processes(steps, ranks, tp)?,
            });
            if ranks > tp {
                floors[i].push(in_turn(steps, ranks)?);
            }
        }
    }
    let all = |costs: &[Cost]| costs.iter().flat_map(|cost| cost.steps.clone()).collect::<Vec<_>>();
    let steps: Vec<Vec<Sample>> = found.iter().map(|costs| all(costs)).collect();
    let floors: Vec<Vec<Sample>> = floors.into_iter().map(|floors| floors.concat()).collect();
    let fast = fast(steps.iter().chain(&floors).flatten());
    let [steps, floors] = [steps, floors]
        .map(|rows| rows.iter().map(|samples| by_state(samples, fast)).collect::<Vec<_>>());
    // A state may lack samples of one rank, or of the floor.
    let shown = |x: f64| if x.is_nan() { "-".to_string() } else { format!("{x:.2}") };
    println!("{kind}: {BATCH} sequences of 64 tokens a step");
    for (i, state) in STATES.iter().enumerate() {
        let milliseconds = |states: &[Vec<f64>; 2]| median(states[i].clone()) * 1e3;
        for (row, costs) in found.iter().enumerate() {
            let of = |pick: fn(&Cost) -> f64| median(costs.iter().map(pick).collect());
            let count = steps[row][i].len();
            if count == 0 {
                continue;
            }
            let (ranks, tp) = layouts[row];
            let floor = match ranks > tp {
                true => format!(", floor {} ms", shown(milliseconds(&floors[row]))),
                false => String::new(),
            };
            let step = milliseconds(&steps[row]);
            println!(
                "{}: {step:7.2} ms, {:>5} x one rank, {:6.0} switches, collectives {:.2} ms{floor}, {state} ({count} steps)",
                name(layouts[row]),
                shown(step / milliseconds(&steps[0])),
                of(|cost| cost.switches),
                of(|cost| cost.collectives),
            );
        }
    }
    Ok(())
}

/// The cost of steps.
struct Cost {
    /// Samples of the steps of rank 0.
    steps: Vec<Sample>,
    /// Context switches of all ranks.
    switches: f64,
    /// Milliseconds of processor time of all progress threads.
    collectives: f64,
}

/// A step of `ranks` threads.
fn in_threads(steps: usize, ranks: usize, tp: usize) -> Result<Cost> {
    let found = run_threads(ranks, &WorldConfig::default(), |world| time(&world, steps, tp));
    found.into_iter().next().expect("there is a first rank")
}

/// Steps of `ranks` trainers, which do not communicate, one after another in one thread.
fn in_turn(steps: usize, ranks: usize) -> Result<Vec<Sample>> {
    let device = Device::cpu(1)?;
    let make = |_| trainer(&config(BATCH / ranks), &device, &Mesh::single());
    let mut trainers = (0..ranks).map(make).collect::<Result<Vec<_>>>()?;
    let mut step = || {
        timed(|| {
            trainers.iter_mut().try_for_each(|(trainer, sampler)| trainer.step(sampler).map(drop))
        })
    };
    (0..WARMUP).try_for_each(|_| step().map(drop))?;
    (0..steps).map(|_| step()).collect()
}

/// A sample of `run`.
fn timed(run: impl FnOnce() -> Result<()>) -> Result<Sample> {
    let watch = Watch::start(probe);
    run()?;
    Ok(watch.stop())
}

/// A step of `ranks` processes, each of which is taken to cost what the first does.
fn in_processes(steps: usize, ranks: usize, tp: usize) -> Result<Cost> {
    let io = |error: std::io::Error| Error::io("bench", error.to_string());
    let listener = TcpListener::bind(("127.0.0.1", 0)).map_err(io)?;
    let port = listener.local_addr().map_err(io)?.port();
    drop(listener);
    let program = std::env::current_exe().map_err(io)?;
    let spawn = |rank: usize| {
        let numbers = [steps, ranks, tp, rank, port.into()].map(|n| n.to_string());
        Command::new(&program).args(numbers).stdin(Stdio::null()).spawn()
    };
    let others = (1..ranks).map(spawn).collect::<std::io::Result<Vec<_>>>().map_err(io)?;
    let first = rank_process(steps, ranks, tp, 0, port)?;
    others.into_iter().try_for_each(|mut other| other.wait().map(drop)).map_err(io)?;
    let all = |of_first: f64| of_first * ranks as f64;
    Ok(Cost { switches: all(first.switches), collectives: all(first.collectives), ..first })
}

fn rank_process(steps: usize, ranks: usize, tp: usize, rank: usize, port: u16) -> Result<Cost> {
    let config = RankConfig {
        rank,
        size: ranks,
        master: "127.0.0.1".to_string(),
        port,
        secret: None,
        job_id: None,
        transport: Transport::Auto,
        encryption: Encryption::BetweenHosts,
        world: WorldConfig::default(),
    };
    run_rank_process(&config, |world| time(&world, steps, tp))
}

/// Two blocks of width 64 with 8 heads.
fn config(batch: usize) -> BenchConfig {
    BenchConfig { micro_batch_size: batch, ..BenchConfig::new(GptConfig::gpt2(65, 2, 64, 8, 64)) }
}

fn time(world: &World, steps: usize, tp: usize) -> Result<Cost> {
    let layout = ParallelDims::new(world.size(), tp, 1, 1)?;
    let mesh = Mesh::new(world, layout, SequenceParallel::Off)?;
    let (mut trainer, sampler) = trainer(&config(BATCH), &Device::cpu(1)?, &mesh)?;
    let mut step = || trainer.step(&sampler).map(drop);
    (0..WARMUP).try_for_each(|_| step())?;
    let (before, mut taken) = (usage(), Vec::new());
    for _ in 0..steps {
        // The loops of all others would lie within the first rank's steps.
        match world.rank() {
            0 => taken.push(timed(&mut step)?),
            _ => step()?,
        }
    }
    // Threads that have ended are not counted.
    let after = usage();
    world.everyone()?.barrier().wait()?;
    let each = |pick: fn([f64; 2]) -> f64| (pick(after) - pick(before)) / steps as f64;
    Ok(Cost {
        steps: taken,
        switches: each(|[switches, _]| switches),
        collectives: each(|[_, milliseconds]| milliseconds),
    })
}

/// Context switches of this process so far, and milliseconds of processor time of its progress threads.
fn usage() -> [f64; 2] {
    let of_thread = |entry: std::io::Result<std::fs::DirEntry>| {
        let read =
            |name: &str| std::fs::read_to_string(entry.as_ref().ok()?.path().join(name)).ok();
        let status = read("status")?;
        let number = |line: &str| line.split_whitespace().last()?.parse::<f64>().ok();
        let lines = status.lines().filter(|line| line.contains("ctxt_switches"));
        let switches = lines.filter_map(number).sum::<f64>();
        let nanoseconds = read("schedstat")?.split_whitespace().next()?.parse::<f64>().ok()?;
        let is_progress = read("comm")?.starts_with("collectives");
        Some([switches, if is_progress { nanoseconds / 1e6 } else { 0.0 }])
    };
    let threads = std::fs::read_dir("/proc/self/task").into_iter().flatten();
    threads.filter_map(of_thread).fold([0.0; 2], |sum, of| [sum[0] + of[0], sum[1] + of[1]])
}
