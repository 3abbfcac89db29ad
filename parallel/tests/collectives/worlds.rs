//! Worlds of some ranks, over every backend.

use ferrotron_parallel::collective::{World, WorldConfig, run_threads};
use ferrotron_tensor::Result;
use std::time::{Duration, Instant};

/// What carries the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    /// Threads of this process.
    Threads,
}

/// Much longer than any call here takes, much shorter than a person waits.
pub const TIMEOUT: Duration = Duration::from_secs(60);

impl Backend {
    /// Runs `f` on each of `size` ranks.
    pub fn try_run<T: Send>(
        self,
        size: usize,
        timeout: Duration,
        f: impl Fn(World) -> Result<T> + Sync,
    ) -> Vec<Result<T>> {
        match self {
            Backend::Threads => run_threads(size, &WorldConfig { timeout }, f),
        }
    }

    /// As [`Backend::try_run`], where nothing is expected to fail.
    pub fn run<T: Send>(self, size: usize, f: impl Fn(World) -> Result<T> + Sync) -> Vec<T> {
        let ranks = self.try_run(size, TIMEOUT, f).into_iter().enumerate();
        ranks.map(|(rank, result)| result.unwrap_or_else(|e| panic!("rank {rank}: {e}"))).collect()
    }

    /// Runs what must fail on every rank, soon after `timeout` at the latest, and returns the errors.
    pub fn errors(
        self,
        size: usize,
        timeout: Duration,
        f: impl Fn(World) -> Result<()> + Sync,
    ) -> Vec<String> {
        let start = Instant::now();
        let results = self.try_run(size, timeout, f);
        let took = start.elapsed();
        assert!(took < timeout + Duration::from_secs(10), "{self:?} took {took:?}");
        let results = results.into_iter().enumerate();
        results
            .map(|(rank, result)| match result {
                Ok(()) => panic!("rank {rank} of {self:?} did not notice"),
                Err(error) => error.to_string(),
            })
            .collect()
    }
}

/// All ranks of a world.
pub fn all(world: &World) -> Vec<usize> {
    (0..world.size()).collect()
}
