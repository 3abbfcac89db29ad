//! Hyperparameters of the optimizers and the values of a step: plain data for the kernels of either device.

use crate::Tensor;

/// Hyperparameters of AdamW.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// Decay of the running mean of gradients.
    pub beta1: f64,
    /// Decay of the running mean of squared gradients.
    pub beta2: f64,
    /// Added to the denominator, which keeps the quotient finite.
    pub eps: f64,
    /// Fraction of a weight that is subtracted at learning rate 1.
    pub weight_decay: f64,
}

impl Default for AdamW {
    /// PyTorch's defaults.
    fn default() -> Self {
        AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 1e-2 }
    }
}

/// Hyperparameters of SGD.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sgd {
    /// Momentum factor.
    pub momentum: f64,
    /// Coefficient of the L2 penalty, which is added to the gradient.
    pub weight_decay: f64,
    /// The form of momentum.
    pub nesterov: Nesterov,
}

/// The form of the momentum of SGD.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Nesterov {
    /// The step is the momentum m.
    #[default]
    Off,
    /// The step is g + momentum * m, with the gradient g, as in `torch.optim.SGD(nesterov=True)`. Sutskever et al., "On
    /// the importance of initialization and momentum in deep learning", ICML 2013.
    On,
}

/// Hyperparameters of Lion.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Lion {
    /// Share of the momentum in the direction of a step.
    pub beta1: f64,
    /// Decay of the momentum.
    pub beta2: f64,
    /// Fraction of a weight that is subtracted at learning rate 1.
    pub weight_decay: f64,
}

impl Default for Lion {
    /// The defaults of the paper, without weight decay.
    fn default() -> Self {
        Lion { beta1: 0.9, beta2: 0.99, weight_decay: 0.0 }
    }
}

/// Hyperparameters of a step of Adafactor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Adafactor {
    /// Lower bound of the parameter scale for relative steps.
    pub eps2: f64,
    /// Upper bound of the RMS of an update.
    pub clip_threshold: f64,
    /// Decay of the running mean of updates, if there is one.
    pub beta1: f64,
    /// Fraction of a weight that is subtracted per unit of step size.
    pub weight_decay: f64,
}

/// Decay of the running means of squares.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SecondMomentDecay {
    /// The decay of step t is 1 - t^-rate.
    pub rate: f64,
    /// Added to squares.
    pub eps1: f64,
}

/// The means whose mean normalizes the factors: those that are not sharded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormalizeBy {
    /// Means over rows.
    Rows,
    /// Means over columns.
    Columns,
}

/// Parameters of the decision.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CheckStepConfig {
    /// Divisor of the summed loss.
    pub tokens: f64,
    /// Maximum gradient norm; 0 disables clipping.
    pub max_norm: f64,
    /// Reaction to an overflow.
    pub overflow: OverflowPolicy,
}

/// Reaction to gradients that are not finite.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum OverflowPolicy {
    /// Skip the step, whose loss scale was too large. The rule adapts the loss scale behind each step.
    SkipStep(LossScaleRule),
    /// Apply no further step.
    Stop,
}

/// The rule of a dynamic loss scale.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossScaleRule {
    /// Steps without an overflow after which the scale is doubled.
    pub window: u64,
    /// Number of overflows until the scale is halved. Each further overflow halves it again, until it has been doubled.
    pub hysteresis: u64,
    /// Lower bound of the scale.
    pub minimum: f64,
}

/// A loss scale and its history.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossScaleState {
    /// Factor of the loss.
    pub scale: f64,
    /// Steps without an overflow since the last overflow or change of scale.
    pub steady: u64,
    /// Overflows left until the scale is halved.
    pub patience: u64,
}

impl LossScaleState {
    /// A scale without a history.
    pub const fn constant(scale: f64) -> LossScaleState {
        LossScaleState { scale, steady: 0, patience: 0 }
    }
}

/// The sums of a step, each an f64 tensor of one element.
#[derive(Debug, Clone, Copy)]
pub struct StepSums<'a> {
    /// Sum of the losses.
    pub loss: &'a Tensor,
    /// Sum of the squared gradients.
    pub sq_norm: &'a Tensor,
    /// A number that is not finite if gradients of another replica of the model, with a norm of its own, are not.
    pub others: Option<&'a Tensor>,
}

/// The values of a [`DeviceStepParams`](super::step::DeviceStepParams).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepParams {
    /// Number of this step, from 1: moments start at 0, and bias correction scales up early ones.
    pub update: u64,
    /// Learning rate.
    pub lr: f64,
    /// Factor of the gradients: clip coefficient x inverse loss scale.
    pub grad_scale: f64,
}
