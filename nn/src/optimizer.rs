//! Optimizers over flats: AdamW and SGD with momentum, each one fused pass.

use ferrotron_tensor::ops::adamw::{self, adamw};
use ferrotron_tensor::ops::sgd::{self, sgd};
use ferrotron_tensor::{Category, DType, Error, Flat, Place, Result, Tensor, dispatch_float};

use crate::param_group::piece_parts;
use crate::{Decay, ParamBuffers, ParamGroup};

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
}

impl OptimizerConfig {
    fn moments(&self) -> &'static [&'static str] {
        match self {
            OptimizerConfig::AdamW { .. } => &["exp_avg", "exp_avg_sq"],
            OptimizerConfig::Sgd { .. } => &["momentum"],
        }
    }

    fn validate(&self) -> Result<()> {
        let (fractions, non_negative) = match *self {
            OptimizerConfig::AdamW { beta1, beta2, eps, weight_decay } => (
                vec![("beta1", beta1), ("beta2", beta2)],
                vec![("eps", eps), ("weight decay", weight_decay)],
            ),
            OptimizerConfig::Sgd { momentum, weight_decay } => {
                (vec![("momentum", momentum)], vec![("weight decay", weight_decay)])
            }
        };
        for (name, value) in fractions {
            if !(0.0..1.0).contains(&value) {
                return Err(Error::config(
                    "optimizer",
                    format!("{name} must be in [0, 1), got {value}"),
                ));
            }
        }
        for (name, value) in non_negative {
            if !(value >= 0.0 && value.is_finite()) {
                return Err(Error::config(
                    "optimizer",
                    format!("{name} must be at least 0, got {value}"),
                ));
            }
        }
        Ok(())
    }
}

/// What one step needs besides the gradients.
#[derive(Debug, Clone, Copy)]
pub struct StepConfig {
    /// Learning rate of this step.
    pub lr: f64,
    /// What the gradients are multiplied with: the clip coefficient.
    pub grad_scale: f64,
}

/// The state of an optimizer: its moments, laid out like the weights that this rank updates.
pub struct Optimizer {
    config: OptimizerConfig,
    groups: Vec<Moments>,
    step: u64,
}

/// The moments of one parameter group.
struct Moments {
    /// What the ranges of the flats are: parameters, or the parts of them that this rank updates.
    pieces: Vec<(String, Place)>,
    flats: Vec<Flat>,
}

impl Optimizer {
    /// Zero moments for every weight that this rank updates, in the accumulation type (f32, or f64 for f64
    /// weights).
    ///
    /// Errors, naming it, if a constant is out of its range.
    pub fn new(config: OptimizerConfig, buffers: &ParamBuffers) -> Result<Optimizer> {
        config.validate()?;
        let groups = buffers
            .groups()
            .iter()
            .map(|group| Self::group(&config, group))
            .collect::<Result<_>>()?;
        Ok(Optimizer { config, groups, step: 0 })
    }

    fn group(config: &OptimizerConfig, group: &ParamGroup) -> Result<Moments> {
        let pieces = group.pieces();
        let flats = group.with_owned(|(weights, _), _| {
            let dtype = if weights.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
            let parts = piece_parts(&pieces);
            let flat = |_: &&str| Flat::new(weights.device(), dtype, Category::Optimizer, &parts);
            config.moments().iter().map(flat).collect()
        })?;
        Ok(Moments { pieces, flats })
    }

    /// Updates the weights from their gradients, one pass over each group.
    ///
    /// Errors if a weight is still held by a graph that was not walked; nothing has changed then.
    pub fn step(&mut self, buffers: &ParamBuffers, step: &StepConfig) -> Result<()> {
        self.check_writable(buffers)?;
        self.step += 1;
        let (config, count) = (self.config, self.step);
        for (group, moments) in buffers.groups().iter().zip(&mut self.groups) {
            group.with_owned(|(weights, range), (gradients, gradient_range)| {
                let device = weights.device().clone();
                let decays = group.decay == Decay::Yes;
                dispatch_float!("optimizer", weights.dtype(), T => {
                    type A = <T as ferrotron_tensor::Element>::Acc;
                    let w = &mut weights.whole_mut::<T>()?[range];
                    let g = &gradients.whole::<T>()?[gradient_range];
                    match (config, &mut moments.flats[..]) {
                        (OptimizerConfig::AdamW { beta1, beta2, eps, weight_decay }, [m, v]) => {
                            let weight_decay = if decays { weight_decay } else { 0.0 };
                            let config = adamw::AdamW {
                                lr: step.lr, beta1, beta2, eps, weight_decay, step: count, grad_scale: step.grad_scale,
                            };
                            adamw(&device, &config, w, g, m.whole_mut::<A>()?, v.whole_mut::<A>()?)
                        }
                        (OptimizerConfig::Sgd { momentum, weight_decay }, [m]) => {
                            let weight_decay = if decays { weight_decay } else { 0.0 };
                            let config = sgd::Sgd { lr: step.lr, momentum, weight_decay, grad_scale: step.grad_scale };
                            sgd(&device, &config, w, g, m.whole_mut::<A>()?)
                        }
                        _ => unreachable!("`new` made as many moments as the optimizer has"),
                    }
                })
            })?;
        }
        buffers.mark_updated();
        Ok(())
    }

    /// Errors if anybody reads a weight or a moment: a step that ends in the middle would leave some groups
    /// updated and others not.
    fn check_writable(&mut self, buffers: &ParamBuffers) -> Result<()> {
        for (group, moments) in buffers.groups().iter().zip(&mut self.groups) {
            group.with_owned(|(weights, _), _| {
                for flat in [weights].into_iter().chain(&mut moments.flats) {
                    dispatch_float!("optimizer", flat.dtype(), T => flat.whole_mut::<T>().map(drop))?;
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Steps taken.
    pub fn steps(&self) -> u64 {
        self.step
    }

    /// Continues after `steps` steps: bias correction goes on from there.
    pub fn set_steps(&mut self, steps: u64) {
        self.step = steps;
    }

    /// Calls `f` with every part of a moment that this rank keeps: the parameter's name, the moment's, which
    /// part of the global tensor it is, and its value.
    pub fn visit(
        &self,
        mut f: impl FnMut(&str, &'static str, &Place, Tensor) -> Result<()>,
    ) -> Result<()> {
        (0..self.groups.len()).try_for_each(|group| self.visit_group(group, &mut f))
    }

    /// As [`Optimizer::visit`], of one of [`ParamBuffers::groups`].
    pub fn visit_group(
        &self,
        group: usize,
        mut f: impl FnMut(&str, &'static str, &Place, Tensor) -> Result<()>,
    ) -> Result<()> {
        let Moments { pieces, flats } = &self.groups[group];
        for (moment, flat) in self.config.moments().iter().zip(flats) {
            for (range, (name, place)) in pieces.iter().enumerate() {
                f(name, moment, place, flat.tensor(range)?)?;
            }
        }
        Ok(())
    }

    /// As [`Optimizer::visit`], with the value to overwrite.
    pub fn visit_mut(
        &mut self,
        mut f: impl FnMut(&str, &'static str, &Place, &mut Tensor) -> Result<()>,
    ) -> Result<()> {
        for Moments { pieces, flats } in &mut self.groups {
            for (moment, flat) in self.config.moments().iter().zip(flats) {
                for (range, (name, place)) in pieces.iter().enumerate() {
                    flat.update(range, |tensor| f(name, moment, place, tensor))?;
                }
            }
        }
        Ok(())
    }
}
