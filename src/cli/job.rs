//! Whether this process trains alone, is one rank of a job, or starts the ranks of one.

use ferrotron::cuda::library::{Kind, Search};
use ferrotron::cuda::nccl::Nccl;
use ferrotron::parallel::collective::{
    NcclConfig, RankConfig, Transport, World, WorldConfig, run_rank_process,
};
use ferrotron::parallel::launch::{JOB_SECRET, LaunchConfig, RankEnvironment, launch};
use ferrotron::parallel::mesh::Mesh;
use ferrotron::{Device, Error, Result};
use std::io::{IsTerminal, Stderr, Write};
use std::ops::Range;
use std::process::ExitCode;
use std::time::Duration;

use super::args::device::DeviceChoice;
use super::args::parallel::ParallelArgs;
use super::args::train::TrainArgs;
use super::exit_signals::ExitSignals;
use super::output;

/// The role of this process.
#[derive(Debug, Clone)]
pub enum ProcessRole {
    /// The only rank.
    Alone,
    /// One rank of several.
    Rank(RankEnvironment),
    /// It starts as many ranks.
    Launcher(usize),
}

impl ProcessRole {
    /// The role that `args` and the environment ask for.
    pub fn new(args: &ParallelArgs, rank: Option<RankEnvironment>) -> Result<ProcessRole> {
        match (args.nproc, rank) {
            (Some(0), _) => Err(Error::config("--nproc", "must be positive, got 0")),
            // Those that `launch` has started have the same arguments.
            (Some(nproc), Some(rank)) if nproc != rank.world_size => Err(Error::config(
                "--nproc",
                format!(
                    "{nproc} would start more ranks, but this is rank {} of {} already: leave it out",
                    rank.rank, rank.world_size
                ),
            )),
            (_, Some(rank)) => Ok(ProcessRole::Rank(rank)),
            (None | Some(1), None) => Ok(ProcessRole::Alone),
            (Some(nproc), None) => Ok(ProcessRole::Launcher(nproc)),
        }
    }

    /// The number of ranks that train together.
    pub fn world_size(&self) -> usize {
        match self {
            ProcessRole::Alone => 1,
            ProcessRole::Rank(rank) => rank.world_size,
            ProcessRole::Launcher(nproc) => *nproc,
        }
    }

    /// The number of ranks on this machine, as far as is known.
    pub fn local_size(&self) -> usize {
        match self {
            ProcessRole::Rank(rank) => rank.local_size.unwrap_or(1),
            ProcessRole::Alone => 1,
            ProcessRole::Launcher(nproc) => *nproc,
        }
    }

    /// This rank's number on this machine.
    pub fn local_rank(&self) -> usize {
        match self {
            ProcessRole::Rank(rank) => rank.local_rank,
            ProcessRole::Alone | ProcessRole::Launcher(_) => 0,
        }
    }

    /// The numbers on this machine of the ranks on it, as far as is known.
    pub fn local_numbers(&self) -> Range<usize> {
        match self {
            ProcessRole::Rank(rank) if rank.local_size.is_none() => {
                rank.local_rank..rank.local_rank + 1
            }
            _ => 0..self.local_size(),
        }
    }

    /// The ranks on this machine, as far as is known.
    pub fn local_ranks(&self) -> Range<usize> {
        let first = match self {
            ProcessRole::Rank(rank) if rank.local_size.is_some() => {
                rank.rank.saturating_sub(rank.local_rank)
            }
            ProcessRole::Rank(rank) => rank.rank,
            ProcessRole::Alone | ProcessRole::Launcher(_) => 0,
        };
        first..(first + self.local_size()).min(self.world_size())
    }
}

/// Meets the other ranks and runs `f`.
pub fn connect<T>(
    args: &ParallelArgs,
    rank: &RankEnvironment,
    f: impl FnOnce(World) -> Result<T>,
) -> Result<T> {
    let config = RankConfig {
        rank: rank.rank,
        size: rank.world_size,
        master: rank.master_addr.clone(),
        port: rank.rendezvous_port(args.rendezvous_port)?,
        secret: std::env::var(JOB_SECRET).ok().filter(|secret| !secret.is_empty()),
        job_id: rank.job_id.clone(),
        transport: args.transport(),
        world: WorldConfig { timeout: args.timeout() },
    };
    run_rank_process(&config, f)
}

/// The same mesh with NCCL between GPUs, where every rank has one of its own and all find the library.
pub fn between_gpus(args: &TrainArgs, mesh: &Mesh, device: &Device) -> Result<Mesh> {
    let parallel = &args.parallel;
    let ranks = mesh.layout().world();
    let own = args.device.place()? == DeviceChoice::Gpus && parallel.transport() == Transport::Auto;
    if ranks == 1 {
        return Ok(mesh.clone());
    }
    // Ranks may have devices of different kinds, so all of them count together.
    let search = Search::from_environment();
    let found = f64::from(u8::from(own && Nccl::load(&search).is_ok()));
    if mesh.world().sum(&Device::cpu(1)?, found)? < ranks as f64 {
        if own && mesh.rank() == 0 {
            let remedy = Kind::Nccl.remedy();
            output::note(&format!(
                "tensors go through memory of the hosts: not all ranks find NCCL ({remedy})"
            ));
        }
        return Ok(mesh.clone());
    }
    mesh.with_nccl(device, &NcclConfig { search, timeout: parallel.timeout() })
}

/// Starts `ranks` processes of this program with the same arguments, and ends as they do. After a signal they have
/// `stop_timeout` to finish their step and save.
pub fn start_ranks(
    ranks: usize,
    stop_timeout: Duration,
    signals: &ExitSignals,
) -> Result<ExitCode> {
    let unknown = |error| Error::io("--nproc", format!("this program cannot find itself: {error}"));
    let config = LaunchConfig {
        program: std::env::current_exe().map_err(unknown)?,
        arguments: std::env::args_os().skip(1).collect(),
        ranks,
        stop_timeout,
    };
    let end = launch(&config, &signals.flags()?, std::io::stdout(), AboveBar(std::io::stderr()))?;
    if let Some(failure) = end.failure {
        output::note(&format!("ferrotron: {failure}; the job has ended"));
    }
    Ok(ExitCode::from(end.code))
}

/// Standard error, where rank 0 may be drawing its progress bar: each write first clears the line.
struct AboveBar(Stderr);

impl Write for AboveBar {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        if self.0.is_terminal() {
            self.0.write_all(b"\r\x1b[K")?;
        }
        self.0.write_all(line)?;
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.0.flush()
    }
}
