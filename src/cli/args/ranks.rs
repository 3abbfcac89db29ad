//! The options by which ranks are started, meet and share a model, with Megatron's names.

use clap::{Args, ValueEnum};
use ferrotron::parallel::collective::{Encryption, Transport};
use ferrotron::parallel::mesh::ParallelDims;
use ferrotron::{Error, Result};
use std::time::Duration;

use super::device::DeviceChoice;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum TransportArg {
    Auto,
    Tcp,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BackendArg {
    Auto,
    Mpi,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum EncryptionArg {
    BetweenHosts,
    Always,
    Never,
}

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Parallelism")]
pub struct RankArgs {
    /// Processes to start on this machine, one for each rank. Under torchrun, srun and mpirun leave it out
    #[arg(long, alias = "nproc-per-node", value_name = "N")]
    pub nproc: Option<usize>,
    /// Ranks that share each layer. What the three sizes leave of all ranks is data parallel
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub tensor_model_parallel_size: usize,
    /// Ranks that each have some of the layers, one behind another
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub pipeline_model_parallel_size: usize,
    /// Ranks that each have some positions of every sequence
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub context_parallel_size: usize,
    /// Port at which rank 0 listens for the others [default: MASTER_PORT + 1, or one that follows from the id that the
    /// launcher gives the job, if there is no MASTER_PORT or the system may give the port behind it to connections]
    #[arg(long, value_name = "PORT")]
    pub rendezvous_port: Option<u16>,
    /// Minutes that ranks wait for one another, to meet and in each call, and that ranks of --nproc have to save and
    /// end after a signal
    #[arg(long, value_name = "MINUTES", default_value_t = 10.0, value_parser = timeout_minutes)]
    pub distributed_timeout_minutes: f64,
    /// Backend of collectives: auto is NCCL between GPUs if each rank has its own, and this program's transports otherwise;
    /// mpi is the MPI library of mpirun, in a program built with the feature mpi
    #[arg(long, value_name = "WHICH", value_enum, default_value = "auto")]
    pub distributed_backend: BackendArg,
    /// Transport of data: auto is NCCL between GPUs if each rank has its own, shared memory on one machine and TCP
    /// between machines
    #[arg(long, value_name = "WHICH", value_enum, default_value = "auto")]
    pub transport: TransportArg,
    /// Connections between ranks that are encrypted: those between machines, all but shared memory, or none, if no rank
    /// wants otherwise. NCCL's never are
    #[arg(long, value_name = "WHICH", value_enum, default_value = "between-hosts")]
    pub rank_encryption: EncryptionArg,
}

/// Minutes, perhaps with a fraction, up to a year.
fn timeout_minutes(text: &str) -> std::result::Result<f64, String> {
    let minutes = text.parse().ok().filter(|minutes| (0.01..=525_600.0).contains(minutes));
    minutes.ok_or_else(|| "must be a number of minutes from 0.01 to 525600".to_string())
}

impl RankArgs {
    /// Sizes of the axes for `world` ranks.
    pub fn layout(&self, world: usize) -> Result<ParallelDims> {
        let (tensor, context) = (self.tensor_model_parallel_size, self.context_parallel_size);
        let layout = ParallelDims::new(world, tensor, context, self.pipeline_model_parallel_size);
        layout.map_err(|error| match world {
            1 => {
                Error::config("--nproc", format!("is needed, or torchrun, srun or mpirun: {error}"))
            }
            _ => error,
        })
    }

    /// Errors if MPI is asked for, and this program lacks it or starts the ranks itself.
    pub fn check_backend(&self) -> Result<()> {
        let message = match self.distributed_backend {
            BackendArg::Auto => return Ok(()),
            BackendArg::Mpi if !cfg!(feature = "mpi") => {
                "mpi: this program was built without it: cargo build --release --features mpi"
            }
            BackendArg::Mpi if self.nproc.is_some() => {
                "mpi: MPI starts the ranks: leave --nproc out, and put mpirun -n N in front"
            }
            BackendArg::Mpi => return Ok(()),
        };
        Err(Error::config("--distributed-backend", message))
    }

    /// The time that ranks wait for one another.
    pub fn timeout(&self) -> Duration {
        Duration::from_secs_f64(60.0 * self.distributed_timeout_minutes)
    }

    /// Whether each rank has a GPU of its own, between which NCCL may move tensors.
    pub fn have_own_gpus(&self, place: DeviceChoice) -> bool {
        place == DeviceChoice::Gpus && self.transport() == Transport::Auto
    }

    /// The transport of data.
    pub fn transport(&self) -> Transport {
        match self.transport {
            TransportArg::Auto => Transport::Auto,
            TransportArg::Tcp => Transport::Tcp,
        }
    }

    /// The connections that are encrypted.
    pub fn encryption(&self) -> Encryption {
        match self.rank_encryption {
            EncryptionArg::BetweenHosts => Encryption::BetweenHosts,
            EncryptionArg::Always => Encryption::Always,
            EncryptionArg::Never => Encryption::Never,
        }
    }
}
