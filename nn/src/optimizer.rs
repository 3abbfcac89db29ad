//! Optimizers over flats: AdamW and SGD with momentum, each one fused pass.

use ferrotron_tensor::ops::adamw::{AdamW, adamw};
use ferrotron_tensor::ops::round::{Stochastic, round};
use ferrotron_tensor::ops::sgd::{Sgd, sgd};
use ferrotron_tensor::{
    Category, Device, Element, Error, Flat, Place, RandomKey, Result, Scalar, Tensor,
    dispatch_float,
};
use std::ops::Range;

use crate::param_group::{accumulator, piece_parts, zip};
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

/// How 16-bit weights are updated; others are updated in place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WeightUpdate {
    /// In a copy of them in f32, the master weights, which is rounded afterwards: Micikevicius et al., "Mixed
    /// Precision Training", arXiv 1710.03740, section 3.1.
    #[default]
    MasterCopy,
    /// In place: what is below half the spacing of the weights is lost, unless it is rounded at random.
    InPlace,
}

/// How updated weights are rounded to 16 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Rounding {
    /// To nearest even.
    #[default]
    Nearest,
    /// Up or down at random, right in the mean, by the element's index in the global tensor: see
    /// [`round`](ferrotron_tensor::ops::round).
    Stochastic {
        /// Of the run.
        seed: u64,
    },
}

/// The state of an optimizer: its moments and master weights, laid out like the weights that this rank updates.
pub struct Optimizer {
    config: OptimizerConfig,
    rounding: Rounding,
    groups: Vec<State>,
    step: u64,
}

/// The state of one parameter group.
struct State {
    /// What the ranges of the flats are: parameters, or the parts of them that this rank updates.
    pieces: Vec<(String, Place)>,
    /// The moments, and behind them the master weights if there are any.
    flats: Vec<Flat>,
    has_master: bool,
}

/// What a checkpoint calls the master weights.
pub const MASTER: &str = "master";

impl State {
    /// The names of the flats.
    fn names(&self, config: &OptimizerConfig) -> impl Iterator<Item = &'static str> + use<> {
        config.moments().iter().copied().chain(self.has_master.then_some(MASTER))
    }
}

impl Optimizer {
    /// Zero moments for every weight that this rank updates, in the accumulation type (f32, or f64 for f64
    /// weights), and master weights where weights have 16 bits.
    ///
    /// Errors, naming it, if a constant is out of its range.
    pub fn new(config: OptimizerConfig, buffers: &ParamBuffers) -> Result<Optimizer> {
        Self::with_update(config, buffers, WeightUpdate::default(), Rounding::default())
    }

    /// As [`Optimizer::new`], with a choice of how 16-bit weights are updated and rounded.
    pub fn with_update(
        config: OptimizerConfig,
        buffers: &ParamBuffers,
        update: WeightUpdate,
        rounding: Rounding,
    ) -> Result<Optimizer> {
        config.validate()?;
        let groups = buffers
            .groups()
            .iter()
            .map(|group| Self::state(&config, group, update))
            .collect::<Result<_>>()?;
        Ok(Optimizer { config, rounding, groups, step: 0 })
    }

    fn state(config: &OptimizerConfig, group: &ParamGroup, update: WeightUpdate) -> Result<State> {
        let pieces = group.pieces();
        let (flats, has_master) = group.with_owned(|(weights, range), _| {
            let (device, dtype) = (weights.device().clone(), accumulator(weights.dtype()));
            let has_master = weights.dtype() != dtype && update == WeightUpdate::MasterCopy;
            let parts = piece_parts(&pieces);
            let flat = || Flat::new(&device, dtype, Category::Optimizer, &parts);
            let count = config.moments().len() + usize::from(has_master);
            let mut flats = (0..count).map(|_| flat()).collect::<Result<Vec<_>>>()?;
            if let (true, Some(master)) = (has_master, flats.last_mut()) {
                dispatch_float!("optimizer", weights.dtype(), T => {
                    widen(&device, master.whole_mut()?, &weights.whole::<T>()?[range]);
                });
            }
            Ok((flats, has_master))
        })?;
        Ok(State { pieces, flats, has_master })
    }

    /// Updates the weights from their gradients, one pass over each group.
    ///
    /// Errors if a weight is still held by a graph that was not walked; nothing has changed then.
    pub fn step(&mut self, buffers: &ParamBuffers, step: &StepConfig) -> Result<()> {
        self.check_writable(buffers)?;
        self.step += 1;
        let (config, rounding, count) = (self.config, self.rounding, self.step);
        for (group, state) in buffers.groups().iter().zip(&mut self.groups) {
            group.with_owned(|(weights, range), (gradients, gradient_range)| {
                let device = weights.device().clone();
                let pass = Pass { device: &device, config, step: *step, count, decay: group.decay };
                dispatch_float!("optimizer", weights.dtype(), T => {
                    type A = <T as Element>::Acc;
                    let weights = &mut weights.whole_mut::<T>()?[range];
                    let (moments, master) = state.flats.split_at_mut(config.moments().len());
                    let mut moments = moments.iter_mut().map(Flat::whole_mut::<A>).collect::<Result<Vec<_>>>()?;
                    let exact = T::DTYPE == A::DTYPE || (master.is_empty() && rounding == Rounding::Nearest);
                    if exact {
                        return pass.over_gradients::<T, T>(weights, (gradients, gradient_range), &mut moments);
                    }
                    let mut start = 0;
                    for (name, place) in &state.pieces {
                        let len = place.dims().iter().product::<usize>();
                        let (elements, first) = (start..start + len, gradient_range.start);
                        let weights = &mut weights[elements.clone()];
                        let mut moments: Vec<&mut [A]> =
                            moments.iter_mut().map(|moment| &mut moment[elements.clone()]).collect();
                        let gradients = (gradients, first + start..first + start + len);
                        let mut copy = None;
                        let exact = match master {
                            [master] => &mut master.whole_mut::<A>()?[elements],
                            _ => {
                                let copy = copy.insert(Tensor::empty(&device, A::DTYPE, &[len])?);
                                let copy = copy.as_mut_slice::<A>()?;
                                widen(&device, copy, weights);
                                copy
                            }
                        };
                        pass.over_gradients::<A, T>(exact, gradients, &mut moments)?;
                        let key = match rounding {
                            Rounding::Nearest => None,
                            Rounding::Stochastic { seed } => Some(RandomKey::new(seed, count, name)),
                        };
                        let stochastic = key.as_ref().map(|key| Stochastic { key, place });
                        round(&device, weights, exact, stochastic)?;
                        start += len;
                    }
                    Ok(())
                })
            })?;
        }
        buffers.mark_updated();
        Ok(())
    }

    /// Errors if anybody reads a weight or a moment: a step that ends in the middle would leave some groups
    /// updated and others not.
    fn check_writable(&mut self, buffers: &ParamBuffers) -> Result<()> {
        for (group, state) in buffers.groups().iter().zip(&mut self.groups) {
            group.with_owned(|(weights, _), _| {
                for flat in [weights].into_iter().chain(&mut state.flats) {
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

    /// Calls `f` with every part of a moment, and of the [`MASTER`] weights, that this rank keeps: the parameter's
    /// name, the moment's, which part of the global tensor it is, and its value.
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
        let state = &self.groups[group];
        for (moment, flat) in state.names(&self.config).zip(&state.flats) {
            for (range, (name, place)) in state.pieces.iter().enumerate() {
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
        for state in &mut self.groups {
            let names = state.names(&self.config);
            for (moment, flat) in names.zip(&mut state.flats) {
                for (range, (name, place)) in state.pieces.iter().enumerate() {
                    flat.update(range, |tensor| f(name, moment, place, tensor))?;
                }
            }
        }
        Ok(())
    }
}

/// One step over the elements of a group.
struct Pass<'a> {
    device: &'a Device,
    config: OptimizerConfig,
    step: StepConfig,
    /// Number of the step, from 1.
    count: u64,
    decay: Decay,
}

impl Pass<'_> {
    /// Updates `weights`, which are those of the parameters, of type `T`, or copies of them in another type.
    fn over_gradients<W, T>(
        &self,
        weights: &mut [W],
        (gradients, range): (&Flat, Range<usize>),
        moments: &mut [&mut [W::Acc]],
    ) -> Result<()>
    where
        W: Element,
        T: Element<Acc = W::Acc>,
    {
        if gradients.dtype() == T::DTYPE {
            self.update(weights, &gradients.whole::<T>()?[range], moments)
        } else {
            self.update(weights, &gradients.whole::<W::Acc>()?[range], moments)
        }
    }

    fn update<W, G>(
        &self,
        weights: &mut [W],
        gradients: &[G],
        moments: &mut [&mut [W::Acc]],
    ) -> Result<()>
    where
        W: Element,
        G: Element<Acc = W::Acc>,
    {
        let StepConfig { lr, grad_scale } = self.step;
        let decay = |weight_decay| if self.decay == Decay::Yes { weight_decay } else { 0.0 };
        match (self.config, moments) {
            (OptimizerConfig::AdamW { beta1, beta2, eps, weight_decay }, [m, v]) => {
                let (weight_decay, step) = (decay(weight_decay), self.count);
                let config = AdamW { lr, beta1, beta2, eps, weight_decay, step, grad_scale };
                adamw(self.device, &config, weights, gradients, m, v)
            }
            (OptimizerConfig::Sgd { momentum, weight_decay }, [m]) => {
                let weight_decay = decay(weight_decay);
                let config = Sgd { lr, momentum, weight_decay, grad_scale };
                sgd(self.device, &config, weights, gradients, m)
            }
            _ => unreachable!("`new` made as many moments as the optimizer has"),
        }
    }
}

fn widen<T: Element>(device: &Device, target: &mut [T::Acc], source: &[T]) {
    zip(device, target, source, |target, x| *target = x.acc());
}
