//! Measures the overhead of two ranks on one machine, on GPT-2 124M (4 sequences of 256 tokens, f32). Two ranks of one
//! thread, data parallel and tensor parallel, are compared with one rank of two threads.
//!
//! `cargo bench --bench overhead [-- STEPS]` prints tokens per second, medians of the steps of rounds taken in turn, in each
//! state of the core, and their ratio to the one rank's.

#[path = "common/states.rs"]
mod states;

use ferrotron::models::bench::{BenchConfig, median, trainer};
use ferrotron::models::presets::Preset;
use ferrotron::parallel::collective::{WorldConfig, run_threads};
use ferrotron::parallel::mesh::{Mesh, ParallelDims};
use ferrotron::parallel::tensor_parallel::SequenceParallel;
use ferrotron::{Device, Result};
use states::{STATES, Sample, Watch, by_state, fast, probe};

const ROUNDS: usize = 3;
const THREADS: usize = 2;

/// Ranks and tensor-parallel size of what is compared.
const ROWS: [(&str, usize, usize); 3] =
    [("1 rank x 2 threads", 1, 1), ("dp 2 x 1 thread", 2, 1), ("tp 2 x 1 thread", 2, 2)];

fn main() -> Result<()> {
    let steps = std::env::args().filter_map(|arg| arg.parse().ok()).next().unwrap_or(5);
    let preset = Preset::find("gpt2-124m")?.config();
    let config = BenchConfig { seq_length: 256, steps, ..BenchConfig::new(preset) };
    let mut samples = [const { Vec::new() }; ROWS.len()];
    for round in 1..=ROUNDS {
        for (samples, (name, ranks, tp)) in samples.iter_mut().zip(ROWS) {
            samples.extend(steps_of_first_rank(&config, ranks, tp)?);
            eprintln!("round {round} of {ROUNDS}: {name}");
        }
    }
    let tokens = (config.micro_batch_size * config.seq_length) as f64;
    let fast = fast(samples.iter().flatten());
    let states = samples.map(|samples| by_state(&samples, fast));
    // A state may lack samples of one rank.
    let shown = |x: f64| if x.is_nan() { "-".to_string() } else { format!("{x:.3}") };
    for (i, state) in STATES.iter().enumerate() {
        let rate = |of: &[Vec<f64>; 2]| tokens / median(of[i].clone());
        for ((name, ..), row) in ROWS.iter().zip(&states).filter(|(_, row)| !row[i].is_empty()) {
            let (rate, share) = (rate(row), rate(row) / rate(&states[0]));
            println!(
                "{state:8}{name:20} {rate:8.1} tokens/s  {} of one rank ({} steps)",
                shown(share),
                row[i].len()
            );
        }
    }
    Ok(())
}

/// The steps of rank 0.
fn steps_of_first_rank(config: &BenchConfig, ranks: usize, tp: usize) -> Result<Vec<Sample>> {
    let found = run_threads(ranks, &WorldConfig::default(), |world| {
        let mesh = Mesh::new(&world, ParallelDims::new(ranks, tp, 1, 1)?, SequenceParallel::Off)?;
        let device = Device::cpu(THREADS / ranks)?;
        let (mut trainer, sampler) = trainer(config, &device, &mesh)?;
        let mut step = || {
            let watch = Watch::start(probe);
            trainer.step(&sampler)?;
            Ok(watch.stop())
        };
        (0..config.warmup).try_for_each(|_| step().map(drop))?;
        (0..config.steps).map(|_| step()).collect()
    });
    found.into_iter().next().expect("there is a first rank")
}
