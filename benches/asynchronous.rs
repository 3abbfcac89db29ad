//! Measures asynchronous data parallelism on two ranks beside the synchronous step: with ranks that are equally fast, with
//! ranks that now and then take longer, each in other steps, and with one rank that always does.
//!
//! A delay is a wait for samples, which takes no processor: `cargo bench --bench asynchronous [-- STEPS]`.

use ferrotron::models::bench::{BenchConfig, median, trainer};
use ferrotron::models::data::{Batch, Samples};
use ferrotron::models::gpt::GptConfig;
use ferrotron::models::trainer::ParallelConfig;
use ferrotron::parallel::collective::{WorldConfig, run_threads};
use ferrotron::parallel::data_parallel::{AsyncUpdates, DataParallelConfig};
use ferrotron::parallel::mesh::{Mesh, ParallelDims};
use ferrotron::parallel::tensor_parallel::SequenceParallel;
use ferrotron::{Device, Result};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Rounds of all settings in turn; the medians count.
const ROUNDS: usize = 5;
const BATCH: usize = 8;
const DRAIN: usize = 50;
const STALENESS: [usize; 4] = [0, 1, 2, 4];

/// About two steps without a delay.
const DELAY: Duration = Duration::from_millis(25);

/// The steps in which a rank waits.
#[derive(Clone, Copy)]
enum Delays {
    None,
    /// One step in eight, and no two ranks in the same.
    Sometimes,
    /// Every step of rank 1.
    OneRank,
}

struct Delayed<'a> {
    samples: &'a dyn Samples,
    rank: u64,
    delays: Delays,
}

impl Samples for Delayed<'_> {
    fn batch(&self, first_sample: u64, micro_batch: usize) -> Result<Batch> {
        let step = first_sample / BATCH as u64;
        let waits = match self.delays {
            Delays::None => false,
            Delays::Sometimes => step % 8 == 4 * self.rank,
            Delays::OneRank => self.rank == 1,
        };
        if waits {
            sleep(DELAY);
        }
        self.samples.batch(first_sample, micro_batch)
    }

    fn seq_length(&self) -> usize {
        self.samples.seq_length()
    }
}

fn main() -> Result<()> {
    let steps = std::env::args().skip(1).find_map(|arg| arg.parse().ok()).unwrap_or(100);
    let settings = [
        ("no delays", Delays::None),
        ("a delay in one step of eight, on either rank", Delays::Sometimes),
        ("a delay in every step of rank 1", Delays::OneRank),
    ];
    for (name, delays) in settings {
        let mut found = [const { Vec::new() }; STALENESS.len()];
        for _ in 0..ROUNDS {
            for (max_staleness, found) in STALENESS.into_iter().zip(&mut found) {
                found.push(milliseconds(steps, max_staleness, delays)?);
            }
        }
        println!("{name}, {} ms:", DELAY.as_millis());
        for (max_staleness, found) in STALENESS.into_iter().zip(found) {
            println!("  --max-staleness {max_staleness}: {:6.2} ms a step", median(found));
        }
    }
    Ok(())
}

/// A step of two ranks, each a thread with one thread for its products.
fn milliseconds(steps: usize, max_staleness: usize, delays: Delays) -> Result<f64> {
    let updates = AsyncUpdates { max_staleness, drain_interval: DRAIN };
    let data_parallel =
        DataParallelConfig { async_updates: Some(updates), ..DataParallelConfig::default() };
    let config = BenchConfig {
        micro_batch_size: BATCH,
        parallel: ParallelConfig { data_parallel, ..ParallelConfig::default() },
        ..BenchConfig::new(GptConfig::gpt2(65, 4, 128, 4, 64))
    };
    let found = run_threads(2, &WorldConfig::default(), |world| {
        let mesh = Mesh::new(&world, ParallelDims::new(2, 1, 1, 1)?, SequenceParallel::Off)?;
        let (mut trainer, sampler) = trainer(&config, &Device::cpu(1)?, &mesh)?;
        let samples = Delayed { samples: &sampler, rank: mesh.rank() as u64, delays };
        trainer.step(&sampler)?;
        let started = Instant::now();
        (0..steps).try_for_each(|_| trainer.step_async(&samples))?;
        trainer.drain_updates(&samples)?;
        Ok(started.elapsed().as_secs_f64() * 1e3 / steps as f64)
    });
    found.into_iter().next().expect("there is a first rank")
}
