//! Hyperparameters of the optimizers.

use ferrotron_tensor::{Error, Result};

use crate::ShardUnit;

/// An optimizer with its hyperparameters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum OptimizerConfig {
    /// Adam with decoupled weight decay: Loshchilov and Hutter, arXiv 1711.05101, as `torch.optim.AdamW`.
    AdamW {
        /// Decay of the running mean of gradients.
        beta1: f64,
        /// Decay of the running mean of squared gradients.
        beta2: f64,
        /// Added to the denominator.
        eps: f64,
        /// Decoupled decay per unit of learning rate, for parameters with weight decay.
        weight_decay: f64,
    },
    /// Gradient descent with momentum, as `torch.optim.SGD`.
    Sgd {
        /// Momentum factor.
        momentum: f64,
        /// L2 penalty, added to the gradient per unit of weight, for parameters with weight decay.
        weight_decay: f64,
    },
    /// Adafactor, which stores mean squares of a matrix's gradient per row and per column only.
    Adafactor(AdafactorConfig),
}

/// Hyperparameters of Adafactor: Shazeer and Stern, arXiv 1804.04235, named as in Hugging Face transformers'
/// `Adafactor`.
///
/// Queries, keys and values are separate tensors to it, and so are gate and up, although each set is stored as one
/// parameter ([`Param::blocks`](crate::Param::blocks)).
///
/// `torch.optim.Adafactor` differs as follows. It uses eps1 as a lower bound of the mean squares instead of adding
/// it. It takes the smaller of the learning rate and 1 / sqrt(t), and always scales it by the parameter. It decays
/// weights by the learning rate before that scaling, and it has no beta1.
///
/// ```
/// use ferrotron_nn::{AdafactorConfig, OptimizerConfig, StepSize};
/// let relative = OptimizerConfig::Adafactor(AdafactorConfig::default());
/// assert_eq!(relative.learning_rate(3e-4, 40_000), 0.005);
/// let scheduled = AdafactorConfig { step_size: StepSize::Scheduled, ..AdafactorConfig::default() };
/// assert_eq!(OptimizerConfig::Adafactor(scheduled).learning_rate(3e-4, 100), 3e-4);
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdafactorConfig {
    /// The source of the step size.
    pub step_size: StepSize,
    /// Decay of the running mean of updates; 0 disables it.
    pub beta1: f64,
    /// The decay of the mean squares at step t is 1 - t^-decay_rate.
    pub decay_rate: f64,
    /// Added to squared gradients.
    pub eps1: f64,
    /// Lower bound of the parameter RMS that scales a relative step.
    pub eps2: f64,
    /// Upper bound of the RMS of an update, d in the paper.
    pub clip_threshold: f64,
    /// Decoupled decay per unit of step size, for parameters with weight decay.
    pub weight_decay: f64,
}

/// The source of the step size of Adafactor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum StepSize {
    /// min(0.01, 1 / sqrt(t)) at step t, times the larger of the tensor's RMS and eps2: section 8.
    #[default]
    Relative,
    /// The schedule's learning rate, for all tensors.
    Scheduled,
}

impl Default for AdafactorConfig {
    /// The defaults of algorithm 6 of the paper.
    fn default() -> AdafactorConfig {
        AdafactorConfig {
            step_size: StepSize::Relative,
            beta1: 0.0,
            decay_rate: 0.8,
            eps1: 1e-30,
            eps2: 1e-3,
            clip_threshold: 1.0,
            weight_decay: 0.0,
        }
    }
}

impl OptimizerConfig {
    /// AdamW with the hyperparameters of GPT-3: Brown et al., arXiv 2005.14165, appendix B. `torch.optim.AdamW`
    /// defaults to a beta2 of 0.999 and a weight decay of 0.01.
    pub const ADAMW: OptimizerConfig =
        OptimizerConfig::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };

    /// Plain gradient descent.
    pub const SGD: OptimizerConfig = OptimizerConfig::Sgd { momentum: 0.0, weight_decay: 0.0 };

    /// The learning rate of a step, counted from 1, if the schedule's is `scheduled`. Relative step sizes ignore the
    /// schedule.
    pub fn learning_rate(&self, scheduled: f64, step: u64) -> f64 {
        match self {
            OptimizerConfig::Adafactor(config) if config.step_size == StepSize::Relative => {
                (1.0 / (step as f64).sqrt()).min(1e-2)
            }
            _ => scheduled,
        }
    }

    /// The granularity at which optimizer state is sharded.
    pub fn shard_unit(&self) -> ShardUnit {
        match self {
            OptimizerConfig::Adafactor(_) => ShardUnit::Parameters,
            _ => ShardUnit::Elements,
        }
    }

    /// The names of the moments with the layout of the weights.
    pub(super) fn moments(&self) -> &'static [&'static str] {
        match self {
            OptimizerConfig::AdamW { .. } => &["exp_avg", "exp_avg_sq"],
            OptimizerConfig::Sgd { .. } => &["momentum"],
            OptimizerConfig::Adafactor(config) if config.beta1 > 0.0 => &["exp_avg"],
            OptimizerConfig::Adafactor(_) => &[],
        }
    }

    pub(super) fn validate(&self) -> Result<()> {
        let (fractions, non_negative) = match *self {
            OptimizerConfig::AdamW { beta1, beta2, eps, weight_decay } => (
                vec![("beta1", beta1), ("beta2", beta2)],
                vec![("eps", eps), ("weight decay", weight_decay)],
            ),
            OptimizerConfig::Sgd { momentum, weight_decay } => {
                (vec![("momentum", momentum)], vec![("weight decay", weight_decay)])
            }
            OptimizerConfig::Adafactor(config) => (
                vec![("beta1", config.beta1)],
                vec![
                    ("decay rate", config.decay_rate),
                    ("eps1", config.eps1),
                    ("eps2", config.eps2),
                    ("weight decay", config.weight_decay),
                ],
            ),
        };
        let refuse = |message| Err(Error::config("optimizer", message));
        for (name, value) in fractions {
            if !(0.0..1.0).contains(&value) {
                return refuse(format!("{name} must be in [0, 1), got {value}"));
            }
        }
        for (name, value) in non_negative {
            if !(value >= 0.0 && value.is_finite()) {
                return refuse(format!("{name} must be at least 0, got {value}"));
            }
        }
        match self {
            OptimizerConfig::Adafactor(AdafactorConfig { eps1: bad, .. })
                if *bad < f64::from(f32::MIN_POSITIVE) =>
            {
                refuse(format!(
                    "eps1 must be positive, got {bad:e}, which is 0 in f32: rows without gradient divide by it"
                ))
            }
            OptimizerConfig::Adafactor(AdafactorConfig { clip_threshold: bad, .. })
                if bad.is_nan() || *bad <= 0.0 =>
            {
                refuse(format!("the clip threshold must be positive, got {bad}"))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows without gradient have this mean square, in f32.
    #[test]
    fn an_eps1_that_is_zero_in_f32_is_refused() {
        let with = |eps1| {
            OptimizerConfig::Adafactor(AdafactorConfig { eps1, ..AdafactorConfig::default() })
        };
        let error = with(1e-50).validate().unwrap_err().to_string();
        assert!(error.contains("eps1 must be positive, got 1e-50"), "{error}");
        assert!(with(f64::from(f32::MIN_POSITIVE)).validate().is_ok());
    }
}
