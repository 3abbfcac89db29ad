//! The options that say what waits outside of the device's memory, with the names of Megatron-LM where it has the
//! option.

use clap::Args;
use ferrotron::models::trainer::ParallelConfig;
use ferrotron::{Error, MemoryKind, Result};
use std::path::{Path, PathBuf};

use super::train_args::RunArgs;

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Offloading")]
pub struct OffloadArgs {
    /// Keep the optimizer's moments and master weights in host memory: on a CPU, in a mapped file
    #[arg(long)]
    pub offload_optimizer_states: bool,
    /// Where the files of host memory are, which have no names [default: the run's place: --save, --load or runs]
    #[arg(long, value_name = "DIR")]
    pub offload_folder: Option<PathBuf>,
}

impl OffloadArgs {
    /// `parallel` with these options.
    pub fn config(&self, parallel: ParallelConfig) -> Result<ParallelConfig> {
        if self.offload_folder.is_some() && !self.offload_optimizer_states {
            return Err(Error::config("--offload-folder", "needs --offload-optimizer-states"));
        }
        Ok(ParallelConfig {
            optimizer_states: match self.offload_optimizer_states {
                true => MemoryKind::Host,
                false => MemoryKind::Device,
            },
            ..parallel
        })
    }

    /// Where the files of host memory are: on the disk of the run, unless something else is asked for. The system's
    /// folder for temporary files is memory on many machines.
    pub fn folder(&self, run: &RunArgs) -> PathBuf {
        let loaded = run.load.as_deref().filter(|path| path.is_dir());
        let folder = self.offload_folder.as_deref().or(run.save.as_deref()).or(loaded);
        folder.unwrap_or(Path::new("runs")).to_path_buf()
    }
}
