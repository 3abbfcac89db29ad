//! The constants of `--optimizer adafactor`.

use clap::{Args, ValueEnum};
use ferrotron::nn::{AdafactorConfig, StepSize};

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum StepSizeArg {
    /// min(0.01, 1 / sqrt(step)) times the RMS of each tensor, as in the paper
    Relative,
    /// --lr and its schedule
    Scheduled,
}

#[derive(Debug, Clone, Args)]
pub struct AdafactorArgs {
    /// Where the size of a step of --optimizer adafactor comes from
    #[arg(long, value_enum, default_value = "relative")]
    pub adafactor_step_size: StepSizeArg,
    /// Decay of the mean of updates; 0 keeps none
    #[arg(long, value_name = "X", default_value_t = 0.0)]
    adafactor_beta1: f64,
    /// The mean squares of step t decay by 1 - t^-X
    #[arg(long, value_name = "X", default_value_t = 0.8)]
    adafactor_decay_rate: f64,
    /// Added to squares of gradients
    #[arg(long, value_name = "X", default_value = "1e-30")]
    adafactor_eps1: f64,
    /// Smallest RMS of a tensor that relative steps count with
    #[arg(long, value_name = "X", default_value_t = 1e-3)]
    adafactor_eps2: f64,
    /// Largest RMS of the update of a tensor
    #[arg(long, value_name = "X", default_value_t = 1.0)]
    adafactor_clip_threshold: f64,
}

impl AdafactorArgs {
    pub fn config(&self, weight_decay: f64) -> AdafactorConfig {
        AdafactorConfig {
            step_size: match self.adafactor_step_size {
                StepSizeArg::Relative => StepSize::Relative,
                StepSizeArg::Scheduled => StepSize::Scheduled,
            },
            beta1: self.adafactor_beta1,
            decay_rate: self.adafactor_decay_rate,
            eps1: self.adafactor_eps1,
            eps2: self.adafactor_eps2,
            clip_threshold: self.adafactor_clip_threshold,
            weight_decay,
        }
    }
}
