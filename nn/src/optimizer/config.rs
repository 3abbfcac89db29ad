//! The constants of the optimizers.

use ferrotron_tensor::{Error, Result};

use crate::ShardUnit;

/// The constants of an optimizer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum OptimizerConfig {
    /// Adam with decoupled weight decay: Loshchilov and Hutter, arXiv 1711.05101, as `torch.optim.AdamW`.
    AdamW {
        /// Decay of the mean of the gradient.
        beta1: f64,
        /// Decay of the mean of its square.
        beta2: f64,
        /// Added to the root of the latter.
        eps: f64,
        /// Decoupled decay per unit of learning rate, for parameters that decay.
        weight_decay: f64,
    },
    /// Gradient descent with momentum, as `torch.optim.SGD`.
    Sgd {
        /// Share of the last update that goes on.
        momentum: f64,
        /// Added to the gradient per unit of weight, for parameters that decay.
        weight_decay: f64,
    },
    /// Adafactor, which keeps of the mean squares of a matrix's gradient those of its rows and columns alone.
    Adafactor(AdafactorConfig),
}

/// The constants of Adafactor: Shazeer and Stern, arXiv 1804.04235, named as in Hugging Face transformers' `Adafactor`.
///
/// Queries, keys and values are tensors of their own to it, as gate and up are, though they are stored as one
/// parameter ([`Param::blocks`](crate::Param::blocks)).
///
/// `torch.optim.Adafactor` differs in that it bounds the mean squares from below where eps1 is added here, takes
/// the smaller of a learning rate and 1 / sqrt(t) and always scales it with the parameter, decays weights by the
/// learning rate before that scaling, and has no beta1.
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
    /// Where the size of a step comes from.
    pub step_size: StepSize,
    /// Decay of the mean of updates; 0 keeps none.
    pub beta1: f64,
    /// The mean squares of step t decay by 1 - t^-decay_rate.
    pub decay_rate: f64,
    /// Added to squares of gradients.
    pub eps1: f64,
    /// Smallest scale of a relative step: that of tensors whose RMS is smaller.
    pub eps2: f64,
    /// Largest RMS of an update, d in the paper.
    pub clip_threshold: f64,
    /// Decoupled decay per unit of step size, for parameters that decay.
    pub weight_decay: f64,
}

/// Where the size of a step of Adafactor comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum StepSize {
    /// It is min(0.01, 1 / sqrt(t)) in step t, times the tensor's RMS or eps2 if that is larger: section 8.
    #[default]
    Relative,
    /// It is the schedule's learning rate, for all tensors.
    Scheduled,
}

impl Default for AdafactorConfig {
    /// The paper's, of algorithm 6.
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
    /// AdamW with the constants of GPT-3: Brown et al., arXiv 2005.14165, appendix B. `torch.optim.AdamW` has a beta2
    /// of 0.999 and a weight decay of 0.01.
    pub const ADAMW: OptimizerConfig =
        OptimizerConfig::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };

    /// Gradient descent and nothing else.
    pub const SGD: OptimizerConfig = OptimizerConfig::Sgd { momentum: 0.0, weight_decay: 0.0 };

    /// The learning rate of a step, from 1, for which the schedule has `scheduled`. Relative steps have their own.
    pub fn learning_rate(&self, scheduled: f64, step: u64) -> f64 {
        match self {
            OptimizerConfig::Adafactor(config) if config.step_size == StepSize::Relative => {
                (1.0 / (step as f64).sqrt()).min(1e-2)
            }
            _ => scheduled,
        }
    }

    /// Of what the shards of its state are made.
    pub fn shard_unit(&self) -> ShardUnit {
        match self {
            OptimizerConfig::Adafactor(_) => ShardUnit::Parameters,
            _ => ShardUnit::Elements,
        }
    }

    /// The moments that are of the weights' layout.
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

    /// Rows without gradient have this as their mean square, in f32.
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
