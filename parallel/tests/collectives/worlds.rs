//! Worlds of some ranks, over every backend.

use ferrotron_parallel::collective::{
    Encryption, RankConfig, Transport, World, WorldConfig, run_rank_process, run_threads,
};
use ferrotron_tensor::Result;
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use crate::common::free_port;
use crate::values::on_gpu;

/// The carrier of the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    /// Threads of this process.
    Threads,
    /// TCP over the loopback interface.
    Tcp,
    /// TCP over the loopback interface, sealed as between machines.
    SealedTcp,
    /// Memory that processes of a machine share.
    SharedMemory,
    /// Threads of this process, on one GPU.
    OneGpu,
    /// TCP over the loopback interface, each rank on a GPU of its own.
    Gpus,
}

/// Much longer than any call here takes, much shorter than a person waits.
pub const TIMEOUT: Duration = Duration::from_secs(60);

impl Backend {
    /// Whether this machine has what the backend needs; if not, says so for `test`.
    pub fn available(self, test: &str) -> bool {
        !self.has_gpus() || ferrotron_cuda_sim::available(test)
    }

    fn has_gpus(self) -> bool {
        matches!(self, Backend::OneGpu | Backend::Gpus)
    }

    /// Numbers of ranks with which every operation is tried. Stand-ins for GPUs are slow.
    pub fn sizes(self) -> RangeInclusive<usize> {
        if self.has_gpus() { 2..=3 } else { 1..=8 }
    }

    /// Runs `f` on each of `size` ranks.
    pub fn try_run<T: Send>(
        self,
        size: usize,
        timeout: Duration,
        f: impl Fn(World) -> Result<T> + Sync,
    ) -> Vec<Result<T>> {
        match self {
            Backend::Threads => run_threads(size, &WorldConfig { timeout }, f),
            Backend::Tcp => run_ranks(size, timeout, Transport::Tcp, f),
            Backend::SealedTcp => {
                let first = rank_config(0, size, timeout, Transport::Tcp);
                run_ranks_as(RankConfig { encryption: Encryption::Always, ..first }, f)
            }
            Backend::SharedMemory => run_ranks(size, timeout, Transport::Auto, f),
            Backend::OneGpu => {
                run_threads(size, &WorldConfig { timeout }, |world| on_gpu(0, || f(world)))
            }
            Backend::Gpus => {
                run_ranks(size, timeout, Transport::Tcp, |world| on_gpu(world.rank(), || f(world)))
            }
        }
    }

    /// Runs `f` like [`Backend::try_run`], and panics on errors.
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
        assert!(took < timeout + Duration::from_secs(60), "{self:?} took {took:?}");
        let results = results.into_iter().enumerate();
        results
            .map(|(rank, result)| match result {
                Ok(()) => panic!("rank {rank} of {self:?} did not notice"),
                Err(error) => error.to_string(),
            })
            .collect()
    }
}

/// Ranks that connect as processes would, from threads of this one.
fn run_ranks<T: Send>(
    size: usize,
    timeout: Duration,
    transport: Transport,
    f: impl Fn(World) -> Result<T> + Sync,
) -> Vec<Result<T>> {
    run_ranks_as(rank_config(0, size, timeout, transport), f)
}

/// Runs `f` on all ranks of the job of rank 0 whose configuration is `first`.
fn run_ranks_as<T: Send>(
    first: RankConfig,
    f: impl Fn(World) -> Result<T> + Sync,
) -> Vec<Result<T>> {
    let size = first.size;
    std::thread::scope(|scope| {
        let (first, f) = (&first, &f);
        let run = |rank| move || run_rank_process(&RankConfig { rank, ..first.clone() }, f);
        let threads: Vec<_> = (0..size).map(|rank| scope.spawn(run(rank))).collect();
        threads.into_iter().map(|thread| thread.join().expect("panics are errors")).collect()
    })
}

/// Rank `rank` of a job on this machine, at a port of its own.
pub fn rank_config(
    rank: usize,
    size: usize,
    timeout: Duration,
    transport: Transport,
) -> RankConfig {
    RankConfig {
        rank,
        size,
        master: "127.0.0.1".to_string(),
        port: free_port(),
        secret: Some("open sesame".to_string()),
        job_id: None,
        transport,
        encryption: Encryption::BetweenHosts,
        world: WorldConfig { timeout },
    }
}

#[test]
fn shared_memory_is_shared() {
    Backend::SharedMemory.run(2, |world| {
        let group = world.group("all", &all(&world))?; // its pipes live as long
        group.barrier().wait()?;
        let maps = std::fs::read_to_string("/proc/self/maps").expect("this is Linux");
        assert!(maps.contains("ferrotron-ring"), "the ranks use TCP: {maps}");
        Ok(())
    });
}

/// All ranks of a world.
pub fn all(world: &World) -> Vec<usize> {
    (0..world.size()).collect()
}
