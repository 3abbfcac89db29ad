//! The slowest rank of each phase of a step.

use ferrotron_parallel::collective::Reduction;
use ferrotron_tensor::{Result, Tensor};
use serde::{Deserialize, Serialize};
use std::time::Duration;

use crate::training::trainer::{Model, RankTimes, Trainer};

/// Ranks beyond this number are not told from one another.
const MOST_RANKS: f64 = (1_u64 << 20) as f64;

/// Times of a step are told up to this, in microseconds: over an hour. With a rank's number they are exact in f64.
const MOST_MICROSECONDS: f64 = (1_u64 << 32) as f64;

/// A rank is slow from this on, as a multiple of the mean over ranks.
const SLOW: f64 = 1.2;

/// The share of a step that a rank must take longer than the mean to be worth a warning.
const WORTH_TELLING: f64 = 0.05;

/// The rank that has spent most time on something, in milliseconds a step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SlowestRank {
    /// Its number.
    pub rank: usize,
    /// Its time.
    pub ms: f64,
    /// The mean over all ranks.
    pub mean_ms: f64,
}

/// The slowest ranks of some steps, by what they did: see [`RankTimes`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Stragglers {
    /// Computing. The other ranks wait for this one.
    pub compute: SlowestRank,
    /// Waiting for other ranks: this one waits for the others.
    pub communication: SlowestRank,
    /// Waiting for samples.
    pub data: SlowestRank,
}

impl Stragglers {
    /// Finds the slowest ranks in `trainer`'s steps since the last call, with two calls of 24 bytes. All ranks call this.
    pub(super) fn measure<M: Model>(trainer: &mut Trainer<M>) -> Result<Stragglers> {
        let RankTimes { steps, compute, communication, data } = trainer.take_times();
        let microseconds = |time: Duration| {
            (time.as_secs_f64() * 1e6 / steps.max(1) as f64).floor().min(MOST_MICROSECONDS - 1.0)
        };
        let own = [compute, communication, data].map(microseconds);
        let (world, host) = (trainer.mesh().world(), trainer.host());
        let ranked = own.map(|time| time * MOST_RANKS + world.rank() as f64);
        let most = match world.size() {
            1 => ranked.to_vec(),
            _ => {
                let ranked = Tensor::from_slice(host, &ranked, &[ranked.len()])?;
                world.all_reduce(ranked, Reduction::Max)?.wait()?.to_vec::<f64>()?
            }
        };
        let sums = world.sums(host, &own)?;
        let slowest = |phase: usize| {
            let time = (most[phase] / MOST_RANKS).floor();
            SlowestRank {
                rank: (most[phase] - time * MOST_RANKS) as usize,
                ms: time / 1e3,
                mean_ms: sums[phase] / 1e3 / world.size() as f64,
            }
        };
        let [compute, communication, data] = [0, 1, 2].map(slowest);
        Ok(Stragglers { compute, communication, data })
    }

    /// A line for each rank for which the others wait noticeably, if `told` does not name it as the last one; it does
    /// afterwards.
    pub(super) fn warnings(&self, step: u64, told: &mut [Option<usize>; 2]) -> Vec<String> {
        let Stragglers { compute, communication, data } = self;
        let mean = compute.mean_ms + communication.mean_ms + data.mean_ms;
        let is_slow = |slowest: &SlowestRank| {
            slowest.ms > SLOW * slowest.mean_ms
                && slowest.ms - slowest.mean_ms > WORTH_TELLING * mean
        };
        let phases = [(compute, "computes"), (data, "waits for samples")];
        let mut lines = Vec::new();
        for ((slowest, does), told) in phases.into_iter().zip(told) {
            let now = is_slow(slowest).then_some(slowest.rank);
            if now.is_some() && now != *told {
                let SlowestRank { rank, ms, mean_ms } = slowest;
                lines.push(format!(
                    "step {step}: rank {rank} {does} {ms:.1} ms a step, {:.2} x the mean of all ranks, which wait for it",
                    ms / mean_ms
                ));
            }
            *told = now;
        }
        lines
    }
}
