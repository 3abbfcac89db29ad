//! Whether this process trains alone, is one rank of a job, or starts the ranks of one.

use ferrotron::cuda::cublaslt::AlgorithmChoice;
use ferrotron::cuda::library::{Kind, Search};
use ferrotron::cuda::nccl::Nccl;
use ferrotron::models::batch_size::{BatchSize, BatchSizeConfig};
use ferrotron::nn::Axis;
use ferrotron::parallel::agreement::{Facts, agree};
use ferrotron::parallel::collective::{NcclConfig, RankConfig, World, run_rank_process};
use ferrotron::parallel::launch::{JOB_SECRET, LaunchConfig, RankEnvironment, launch};
use ferrotron::parallel::mesh::Mesh;
use ferrotron::parallel::tensor_parallel::SequenceParallel;
use ferrotron::{Device, Error, Result};
use std::io::{IsTerminal, Stdout, Write};
use std::ops::Range;
use std::process::ExitCode;
use std::time::Duration;

use super::args::device::DeviceArgs;
#[cfg(feature = "mpi")]
use super::args::ranks::BackendArg;
use super::args::ranks::RankArgs;
use super::exit_signals::ExitSignals;
use super::log_writer;
use super::output;
use super::rank_environment::rank_environment;

/// The role of this process.
#[derive(Debug, Clone)]
pub enum ProcessRole {
    /// The only rank.
    Alone,
    /// One rank of several.
    Rank(RankEnvironment),
    /// Starts as many ranks.
    Launcher(usize),
}

impl ProcessRole {
    /// The role that `args` and the environment ask for.
    pub fn new(args: &RankArgs, rank: Option<RankEnvironment>) -> Result<ProcessRole> {
        args.check_backend()?;
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
    args: &RankArgs,
    rank: &RankEnvironment,
    f: impl FnOnce(World) -> Result<T>,
) -> Result<T> {
    let config = RankConfig {
        secret: std::env::var(JOB_SECRET).ok().filter(|secret| !secret.is_empty()),
        transport: args.transport(),
        encryption: args.encryption(),
        ..rank.rank_config(args.rendezvous_port, args.timeout())?
    };
    run_rank_process(&config, f)
}

/// The same mesh with the backend that `args` ask for: MPI, or NCCL between GPUs, where every rank has one of its own and all
/// find the library.
pub fn with_backend(
    args: &RankArgs,
    place: &DeviceArgs,
    mesh: &Mesh,
    device: &Device,
) -> Result<Mesh> {
    #[cfg(feature = "mpi")]
    if args.distributed_backend == BackendArg::Mpi {
        let mesh = ferrotron::mpi::with_mpi(mesh, args.timeout())?;
        if mesh.rank() == 0 && mesh.layout().world() > 1 {
            let library = ferrotron::mpi::library_version();
            output::note(&format!("collectives go through {library}"));
        }
        return Ok(mesh);
    }
    let ranks = mesh.layout().world();
    let own = args.have_own_gpus(place.place()?);
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
    mesh.with_nccl(device, &NcclConfig { search, timeout: args.timeout() })
}

/// The place of a process that uses a trained model.
pub struct ModelRank {
    pub mesh: Mesh,
    pub device: Device,
}

impl ModelRank {
    /// Prints a warning that all ranks have, once.
    pub fn warn(&self, warning: &str) {
        if self.mesh.rank() == 0 {
            output::note(warning);
        }
    }

    /// Global batches that fill the pipeline and all replicas with micro-batches of `micro_batch_size` samples.
    pub fn batch_size(&self, micro_batch_size: usize) -> Result<BatchSize> {
        let data_parallel_size = self.mesh.axis(Axis::Data).size();
        let at_once = data_parallel_size * self.mesh.axis(Axis::Pipeline).size();
        BatchSize::new(BatchSizeConfig {
            micro_batch_size,
            data_parallel_size,
            global_batch_size: micro_batch_size.checked_mul(at_once),
            ..BatchSizeConfig::default()
        })
    }
}

/// Runs `work` in this process, alone or as a rank of a job, or starts ranks that do.
pub fn run_on_ranks(
    ranks: &RankArgs,
    device: &DeviceArgs,
    work: impl FnOnce(&ModelRank) -> Result<ExitCode>,
) -> Result<ExitCode> {
    let job = ProcessRole::new(ranks, rank_environment()?)?;
    let layout = ranks.layout(job.world_size())?;
    device.place()?;
    let open = || {
        let (ranks, rank) = (job.local_size(), job.local_rank());
        device.open_shared(ranks, rank, std::env::temp_dir(), AlgorithmChoice::Heuristic)
    };
    match &job {
        ProcessRole::Launcher(count) => {
            let signals = ExitSignals::register(None)?;
            start_ranks(*count, ranks.timeout(), &signals, Unlabelled(std::io::stdout()))
        }
        ProcessRole::Alone => work(&ModelRank { mesh: Mesh::single(), device: open()? }),
        ProcessRole::Rank(rank) => {
            let ended = connect(ranks, rank, |world| {
                let mesh = Mesh::new(&world, layout, SequenceParallel::Off)?;
                let opened = open();
                let facts = Facts::new();
                agree(mesh.world(), opened.as_ref().map(|_| &facts))?;
                let device_handle = opened?;
                let mesh = with_backend(ranks, device, &mesh, &device_handle)?;
                work(&ModelRank { mesh, device: device_handle })
            });
            Ok(ended
                .unwrap_or_else(|error| output::failed(&format!("rank {}: ", rank.rank), &error)))
        }
    }
}

/// Ends all ranks with the first error of one that is not ready.
pub fn all_ready<T>(place: &ModelRank, ready: Result<T>) -> Result<T> {
    all_ready_with(place, ready, |_| Facts::new())
}

/// Ends all ranks with the first error of one that is not ready, or with those `facts` that are not the same on all.
pub fn all_ready_with<T>(
    place: &ModelRank,
    ready: Result<T>,
    facts: impl FnOnce(&T) -> Facts,
) -> Result<T> {
    let facts = ready.as_ref().map(facts);
    let agreed = agree(place.mesh.world(), facts.as_ref().map_err(|error| *error));
    let ready = ready?;
    agreed?;
    Ok(ready)
}

/// Starts `ranks` processes of this program with the same arguments, and ends as they do. After a signal they have
/// `stop_timeout` to finish their step and save.
pub fn start_ranks(
    ranks: usize,
    stop_timeout: Duration,
    signals: &ExitSignals,
    results: impl Write + Send + 'static,
) -> Result<ExitCode> {
    let unknown = |error| Error::io("--nproc", format!("this program cannot find itself: {error}"));
    let config = LaunchConfig {
        program: std::env::current_exe().map_err(unknown)?,
        arguments: std::env::args_os().skip(1).collect(),
        ranks,
        stop_timeout,
    };
    let end = launch(&config, &signals.flags()?, results, AboveBar)?;
    if let Some(failure) = end.failure {
        output::note(&format!("ferrotron: {failure}; the job has ended"));
    }
    Ok(ExitCode::from(end.code))
}

/// Standard output of ranks of which only the first writes results: without its number in front, so that programs can read
/// them.
struct Unlabelled(Stdout);

impl Write for Unlabelled {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        self.0.write_all(line.strip_prefix(b"[rank 0] ").unwrap_or(line))?;
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.0.flush()
    }
}

/// Standard error, where rank 0 may be drawing its progress bar: each write first clears the line.
struct AboveBar;

impl Write for AboveBar {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        let clear: &[u8] = if std::io::stderr().is_terminal() { b"\r\x1b[K" } else { b"" };
        log_writer::write([clear, line].concat());
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
