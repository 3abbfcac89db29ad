//! `--optimizer`, the constants of each, and the moving average of the weights.

use clap::{Args, ValueEnum};
use ferrotron::nn::{
    AdafactorConfig, MuonConfig, MuonScale, Nesterov, NewtonSchulz, OptimizerConfig, StepSize,
};
use ferrotron::{Error, Result};

/// The optimizer of a run that names none.
pub const DEFAULT_OPTIMIZER: &str = "adam";

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum OptimizerArg {
    /// AdamW
    Adam,
    /// Gradient descent with momentum
    Sgd,
    /// Adafactor: mean squares of rows and columns instead of every element's
    Adafactor,
    /// Lion: steps are signs of a mean of gradients
    Lion,
    /// Muon: orthogonalized momentum for hidden matrices, AdamW for all else
    Muon,
}

#[derive(Debug, Clone, Args)]
pub struct OptimizerArgs {
    /// Optimizer: AdamW, gradient descent with momentum, Adafactor, Lion, or Muon
    #[arg(long, value_enum, default_value = DEFAULT_OPTIMIZER)]
    optimizer: OptimizerArg,
    /// Decay of the mean of the gradient
    #[arg(long, value_name = "X", default_value_t = 0.9)]
    adam_beta1: f64,
    /// Decay of the mean of the square of the gradient
    #[arg(long, value_name = "X", default_value_t = 0.99)]
    adam_beta2: f64,
    /// Added to the root of the mean of the square of the gradient
    #[arg(long, value_name = "X", default_value = "1e-8")]
    adam_eps: f64,
    /// Momentum of --optimizer sgd
    #[arg(long, value_name = "X", default_value_t = 0.9)]
    sgd_momentum: f64,
    /// Nesterov's form of the momentum of --optimizer sgd
    #[arg(long)]
    sgd_nesterov: bool,
    /// Share of the momentum in the direction of a step of --optimizer lion
    #[arg(long, value_name = "X", default_value_t = 0.95)]
    lion_beta1: f64,
    /// Decay of the momentum of --optimizer lion
    #[arg(long, value_name = "X", default_value_t = 0.98)]
    lion_beta2: f64,
    #[command(flatten)]
    adafactor: AdafactorArgs,
    #[command(flatten)]
    muon: MuonArgs,
    /// Keep a moving average of the weights that decays by X in each step, for eval, generate and export with --ema; 0
    /// keeps none
    #[arg(long, value_name = "X", default_value_t = 0.0)]
    ema_decay: f64,
}

impl OptimizerArgs {
    /// The optimizer with its constants.
    pub fn config(&self, weight_decay: f64) -> OptimizerConfig {
        match self.optimizer {
            OptimizerArg::Adam => OptimizerConfig::AdamW {
                beta1: self.adam_beta1,
                beta2: self.adam_beta2,
                eps: self.adam_eps,
                weight_decay,
            },
            OptimizerArg::Sgd if self.sgd_nesterov => {
                OptimizerConfig::NesterovSgd { momentum: self.sgd_momentum, weight_decay }
            }
            OptimizerArg::Sgd => OptimizerConfig::Sgd { momentum: self.sgd_momentum, weight_decay },
            OptimizerArg::Adafactor => {
                OptimizerConfig::Adafactor(self.adafactor.config(weight_decay))
            }
            OptimizerArg::Muon => OptimizerConfig::Muon(MuonConfig {
                momentum: self.muon.muon_momentum,
                nesterov: if self.muon.muon_use_nesterov { Nesterov::On } else { Nesterov::Off },
                coefficients: match self.muon.muon_coefficient_type {
                    CoefficientsArg::Simple => NewtonSchulz::Simple,
                    CoefficientsArg::Quintic => NewtonSchulz::Quintic,
                },
                steps: self.muon.muon_num_ns_steps,
                scale: match self.muon.muon_scale_mode {
                    ScaleArg::Spectral => MuonScale::Spectral,
                    ScaleArg::UnitRmsNorm => MuonScale::UnitRmsNorm,
                    ScaleArg::ShapeScaling => MuonScale::ShapeScaling,
                },
                extra_scale: self.muon.muon_extra_scale_factor,
                weight_decay,
                adam_beta1: self.adam_beta1,
                adam_beta2: self.adam_beta2,
                adam_eps: self.adam_eps,
            }),
            OptimizerArg::Lion => {
                let (beta1, beta2) = (self.lion_beta1, self.lion_beta2);
                OptimizerConfig::Lion { beta1, beta2, weight_decay }
            }
        }
    }

    /// Returns whether steps have a size of their own, whatever `--lr` is.
    pub fn ignores_lr(&self) -> bool {
        self.optimizer == OptimizerArg::Adafactor
            && self.adafactor.adafactor_step_size == StepSizeArg::Relative
    }

    /// The decay of the moving average; `None` if none is kept.
    ///
    /// Errors unless it is in [0, 1).
    pub fn ema_decay(&self) -> Result<Option<f64>> {
        let decay = self.ema_decay;
        match (0.0..1.0).contains(&decay) {
            true => Ok(Some(decay).filter(|decay| *decay > 0.0)),
            false => Err(Error::config("--ema-decay", format!("must be in [0, 1), got {decay}"))),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum StepSizeArg {
    /// min(0.01, 1 / sqrt(step)) times the RMS of each tensor, as in the paper
    Relative,
    /// --lr and its schedule
    Scheduled,
}

#[derive(Debug, Clone, Args)]
struct AdafactorArgs {
    /// Source of the step size of --optimizer adafactor
    #[arg(long, value_enum, default_value = "relative")]
    adafactor_step_size: StepSizeArg,
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
    fn config(&self, weight_decay: f64) -> AdafactorConfig {
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

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum CoefficientsArg {
    /// 3.4445, -4.7750, 2.0315 in every step
    Simple,
    /// Others in each of five steps
    Quintic,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
enum ScaleArg {
    /// sqrt(max(rows, columns))
    Spectral,
    /// sqrt(rows / columns)
    UnitRmsNorm,
    /// sqrt(max(1, rows / columns))
    ShapeScaling,
}

#[derive(Debug, Clone, Args)]
struct MuonArgs {
    /// Decay of the momentum of --optimizer muon
    #[arg(long, value_name = "X", default_value_t = 0.9)]
    muon_momentum: f64,
    /// Nesterov's form of the momentum of --optimizer muon
    #[arg(long)]
    muon_use_nesterov: bool,
    /// Coefficients of its Newton-Schulz iteration
    #[arg(long, value_enum, default_value = "quintic")]
    muon_coefficient_type: CoefficientsArg,
    /// Steps of its Newton-Schulz iteration
    #[arg(long, value_name = "N", default_value_t = 5)]
    muon_num_ns_steps: usize,
    /// Factor of an update by the shape of the matrix
    #[arg(long, value_enum, default_value = "spectral")]
    muon_scale_mode: ScaleArg,
    /// Another factor; with spectral, 0.2 gives updates the size of AdamW's
    #[arg(long, value_name = "X", default_value_t = 1.0)]
    muon_extra_scale_factor: f64,
}
