//! Measures the overhead of two ranks on one machine, on GPT-2 124M (4 sequences of 256 tokens, f32). Two ranks of one
//! thread, data parallel and tensor parallel, are compared with one rank of two threads.
//!
//! `cargo bench --bench overhead [-- STEPS]` prints tokens per second, medians of rounds taken in turn, and
//! their ratio to the one rank's.

use ferrotron::models::bench::{BenchConfig, median, trainer};
use ferrotron::models::presets::Preset;
use ferrotron::parallel::collective::{WorldConfig, run_threads};
use ferrotron::parallel::mesh::{Mesh, ParallelDims};
use ferrotron::parallel::tensor_parallel::SequenceParallel;
use ferrotron::{Device, Result};

const ROUNDS: usize = 3;
const THREADS: usize = 2;

/// Ranks and tensor-parallel size of what is compared.
const ROWS: [(&str, usize, usize); 3] =
    [("1 rank x 2 threads", 1, 1), ("dp 2 x 1 thread", 2, 1), ("tp 2 x 1 thread", 2, 2)];

fn main() -> Result<()> {
    let steps = std::env::args().filter_map(|arg| arg.parse().ok()).next().unwrap_or(5);
    let mut rates = [const { Vec::new() }; ROWS.len()];
    for round in 1..=ROUNDS {
        for (rates, (name, ranks, tp)) in rates.iter_mut().zip(ROWS) {
            let rate = tokens_per_second(ranks, tp, steps)?;
            eprintln!("round {round} of {ROUNDS}: {name}: {rate:.1} tokens/s");
            rates.push(rate);
        }
    }
    let medians = rates.map(median);
    for ((name, ..), rate) in ROWS.iter().zip(medians) {
        println!("{name:20} {rate:8.1} tokens/s  {:.3} of one rank", rate / medians[0]);
    }
    Ok(())
}

/// Tokens per second in the median step of rank 0.
fn tokens_per_second(ranks: usize, tp: usize, steps: usize) -> Result<f64> {
    let config = BenchConfig {
        seq_length: 256,
        steps,
        ..BenchConfig::new(Preset::find("gpt2-124m")?.config())
    };
    let found = run_threads(ranks, &WorldConfig::default(), |world| {
        let mesh = Mesh::new(&world, ParallelDims::new(ranks, tp, 1, 1)?, SequenceParallel::Off)?;
        let device = Device::cpu(THREADS / ranks)?;
        let (mut trainer, sampler) = trainer(&config, &device, &mesh)?;
        let mut rates = Vec::new();
        for step in 0..config.warmup + config.steps {
            let report = trainer.step(&sampler)?;
            let rate = report.tokens as f64 / report.seconds;
            rates.extend((step >= config.warmup).then_some(rate));
        }
        Ok(median(rates))
    });
    found.into_iter().next().expect("there is a first rank")
}
