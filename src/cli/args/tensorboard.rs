//! The options of TensorBoard's event files, with the names and meanings of Megatron-LM.

use clap::Args;
use ferrotron::models::run::TensorboardConfig;
use ferrotron::{Error, Result};
use std::path::PathBuf;

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "TensorBoard")]
pub struct TensorboardArgs {
    /// Write event files for TensorBoard: loss, learning rate, gradient norm, loss scale, validation loss, and as texts
    /// the options and the sample
    #[arg(long, value_name = "DIR")]
    pub tensorboard_dir: Option<PathBuf>,
    /// Steps between events
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub tensorboard_log_interval: u64,
    /// Write the floating-point operations of a rank and the tokens per second
    #[arg(long, requires = "tensorboard_dir")]
    pub log_throughput: bool,
    /// Write the duration of a step, and the part in which it waits for samples
    #[arg(long, requires = "tensorboard_dir")]
    pub log_timers_to_tensorboard: bool,
    /// Write the peak of memory
    #[arg(long, requires = "tensorboard_dir")]
    pub log_memory_to_tensorboard: bool,
    /// Write the samples of the global batch
    #[arg(long, requires = "tensorboard_dir")]
    pub log_batch_size_to_tensorboard: bool,
    /// Write the number of ranks
    #[arg(long, requires = "tensorboard_dir")]
    pub log_world_size_to_tensorboard: bool,
    /// Write the perplexity beside the validation loss
    #[arg(long, requires = "tensorboard_dir")]
    pub log_validation_ppl_to_tensorboard: bool,
    /// Write a sample of text of --sample-length tokens every --eval-tasks-interval steps, too, if a rank has the whole GPT
    #[arg(long, requires = "tensorboard_dir")]
    pub log_samples_to_tensorboard: bool,
    /// Leave out the loss scale
    #[arg(long, requires = "tensorboard_dir")]
    pub no_log_loss_scale_to_tensorboard: bool,
}

impl TensorboardArgs {
    /// The event files of a run of `world_size` ranks, if any are written.
    pub fn config(&self, world_size: usize) -> Option<TensorboardConfig> {
        Some(TensorboardConfig {
            folder: self.tensorboard_dir.clone()?,
            log_interval: self.tensorboard_log_interval,
            world_size,
            loss_scale: !self.no_log_loss_scale_to_tensorboard,
            batch_size: self.log_batch_size_to_tensorboard,
            throughput: self.log_throughput,
            timers: self.log_timers_to_tensorboard,
            memory: self.log_memory_to_tensorboard,
            log_world_size: self.log_world_size_to_tensorboard,
            validation_ppl: self.log_validation_ppl_to_tensorboard,
        })
    }

    /// Errors for an interval of 0, and for a folder that is something else.
    pub fn validate(&self) -> Result<()> {
        if self.tensorboard_log_interval == 0 {
            return Err(Error::config("--tensorboard-log-interval", "must be positive, got 0"));
        }
        match &self.tensorboard_dir {
            Some(path) if path.exists() && !path.is_dir() => {
                let message =
                    format!("{} is not a folder: name another one, or a new one", path.display());
                Err(Error::config("--tensorboard-dir", message))
            }
            _ => Ok(()),
        }
    }
}
