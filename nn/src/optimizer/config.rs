//! The choice of an optimizer.

use ferrotron_tensor::ops::adamw::AdamW;
use ferrotron_tensor::ops::lion::Lion;
use ferrotron_tensor::ops::sgd::{Nesterov, Sgd};
use ferrotron_tensor::{Error, Result};

use super::adafactor::AdafactorConfig;
use super::muon::MuonConfig;
use super::rule::UpdateRule;
use super::shard_unit::ShardUnit;

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
    /// Gradient descent with momentum in Nesterov's form, as `torch.optim.SGD` with `nesterov=True`.
    NesterovSgd {
        /// Momentum factor.
        momentum: f64,
        /// L2 penalty, added to the gradient per unit of weight, for parameters with weight decay.
        weight_decay: f64,
    },
    /// Lion, whose steps are signs: Chen et al., arXiv 2302.06675.
    Lion {
        /// Share of the momentum in the direction of a step.
        beta1: f64,
        /// Decay of the momentum.
        beta2: f64,
        /// Decoupled decay per unit of learning rate, for parameters with weight decay.
        weight_decay: f64,
    },
    /// Adafactor, which stores mean squares of a matrix's gradient per row and per column only.
    Adafactor(AdafactorConfig),
    /// Muon for hidden matrices, AdamW for embeddings, the output head, norms and biases.
    Muon(MuonConfig),
    /// A rule of your own: [`OptimizerConfig::custom`].
    Custom(CustomRule),
}

impl OptimizerConfig {
    /// AdamW with the hyperparameters of GPT-3: Brown et al., arXiv 2005.14165, appendix B. `torch.optim.AdamW`
    /// defaults to a beta2 of 0.999 and a weight decay of 0.01.
    pub const ADAMW: OptimizerConfig =
        OptimizerConfig::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };

    /// Plain gradient descent.
    pub const SGD: OptimizerConfig = OptimizerConfig::Sgd { momentum: 0.0, weight_decay: 0.0 };

    /// An update rule of your own: see [`UpdateRule`].
    ///
    /// ```
    /// # use ferrotron_nn::{OptimizerConfig, StateSpec, UpdateRule, UpdateStep};
    /// # use ferrotron_tensor::{Result, Tensor};
    /// # #[derive(Debug)]
    /// # struct Scaled(f64);
    /// # impl UpdateRule for Scaled {
    /// #     fn name(&self) -> &'static str { "scaled" }
    /// #     fn states(&self, _: &[usize]) -> Vec<StateSpec> { Vec::new() }
    /// #     fn update(&self, w: &mut Tensor, g: &Tensor, _: &mut [&mut Tensor], _: &UpdateStep) -> Result<()> {
    /// #         w.copy_from(&w.sub(&g.mul_scalar(self.0)?)?)
    /// #     }
    /// # }
    /// let config = OptimizerConfig::custom(&Scaled(0.1)); // a constant, which lives as long as the program
    /// let factor = 0.1 * 0.5;
    /// let other = OptimizerConfig::custom(Box::leak(Box::new(Scaled(factor))));
    /// assert_ne!(config, other);
    /// ```
    pub const fn custom(rule: &'static dyn UpdateRule) -> OptimizerConfig {
        OptimizerConfig::Custom(CustomRule(rule))
    }

    /// The update rule; of Muon that of hidden matrices, whose [fallback](UpdateRule::fallback) updates all else.
    pub fn rule(&self) -> Box<dyn UpdateRule> {
        match *self {
            OptimizerConfig::AdamW { beta1, beta2, eps, weight_decay } => {
                Box::new(AdamW { beta1, beta2, eps, weight_decay })
            }
            OptimizerConfig::Sgd { momentum, weight_decay } => {
                Box::new(Sgd { momentum, weight_decay, nesterov: Nesterov::Off })
            }
            OptimizerConfig::NesterovSgd { momentum, weight_decay } => {
                Box::new(Sgd { momentum, weight_decay, nesterov: Nesterov::On })
            }
            OptimizerConfig::Lion { beta1, beta2, weight_decay } => {
                Box::new(Lion { beta1, beta2, weight_decay })
            }
            OptimizerConfig::Adafactor(config) => Box::new(config),
            OptimizerConfig::Muon(config) => Box::new(config),
            OptimizerConfig::Custom(CustomRule(rule)) => Box::new(rule),
        }
    }

    /// The update rule of parameters that are sharded in this unit: the fallback of a rule of hidden matrices, if by
    /// elements.
    pub(super) fn rule_of(&self, unit: ShardUnit) -> Box<dyn UpdateRule> {
        let rule = self.rule();
        match (rule.shard_unit(), unit) {
            (ShardUnit::HiddenMatrices, ShardUnit::Elements) => fallback(&*rule),
            _ => rule,
        }
    }

    /// Errors, naming it, if a hyperparameter is out of range, and if a fallback does not update elements.
    pub(super) fn validate(&self) -> Result<()> {
        let rule = self.rule();
        rule.validate()?;
        if rule.shard_unit() != ShardUnit::HiddenMatrices {
            return Ok(());
        }
        let other = fallback(&*rule);
        if other.shard_unit() != ShardUnit::Elements {
            let message = format!(
                "rule '{}': its fallback '{}' does not update elements: choose another, such as AdamW",
                rule.name(),
                other.name()
            );
            return Err(Error::config("optimizer", message));
        }
        other.validate()
    }

    /// The learning rate of a step, counted from 1, if the schedule's is `scheduled`. Relative step sizes ignore the
    /// schedule.
    pub fn learning_rate(&self, scheduled: f64, step: u64) -> f64 {
        self.rule().learning_rate(scheduled, step)
    }

    /// Returns whether some parameters are updated a whole tensor at a time, so that ZeRO gives each to one rank.
    pub fn updates_whole_tensors(&self) -> bool {
        self.shard_unit() != ShardUnit::Elements
    }

    /// The unit in which weights, gradients and state are sharded.
    pub(crate) fn shard_unit(&self) -> ShardUnit {
        self.rule().shard_unit()
    }
}

/// The rule of the parameters that are no hidden matrices.
fn fallback(rule: &dyn UpdateRule) -> Box<dyn UpdateRule> {
    rule.fallback().unwrap_or_else(|| OptimizerConfig::ADAMW.rule())
}

/// An update rule of a user's, which is equal to itself only.
#[derive(Debug, Clone, Copy)]
pub struct CustomRule(&'static dyn UpdateRule);

impl PartialEq for CustomRule {
    fn eq(&self, other: &CustomRule) -> bool {
        std::ptr::eq(self.0, other.0)
    }
}
