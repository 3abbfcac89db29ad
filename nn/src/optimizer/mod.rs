//! Optimizers over flats: AdamW and SGD with momentum, each one fused pass; Adafactor, parameter by parameter. What
//! they keep may live in host memory, from which the next elements are fetched while some are updated.

mod adafactor;
mod config;
mod mean_squares;
mod pass;

pub use adafactor::{PartSum, SumParts};
pub use config::{AdafactorConfig, OptimizerConfig, StepSize};

use ferrotron_tensor::ops::round::widen;
use ferrotron_tensor::ops::step::{Step, StepNumbers};
use ferrotron_tensor::{Category, DType, Device, Error, Flat, MemoryKind, Place, Result, Tensor};
use std::ops::Range;

use self::mean_squares::{Block, MeanSquares};
use self::pass::{Pass, RUN};
use crate::{AxisSet, ParamBuffers, ParamGroup};

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

/// How an optimizer keeps and updates what it has beside its constants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct UpdateConfig {
    /// How 16-bit weights are updated.
    pub weights: WeightUpdate,
    /// How they are rounded.
    pub rounding: Rounding,
    /// In which of the device's memories moments and master weights live: ZeRO-Offload, Ren et al., arXiv
    /// 2101.06840, keeps them in the host's.
    pub states: MemoryKind,
}

/// The state of an optimizer: its moments and master weights, laid out like the weights that this rank updates.
pub struct Optimizer {
    config: OptimizerConfig,
    rounding: Rounding,
    states: MemoryKind,
    groups: Vec<State>,
    step: u64,
}

/// The state of one parameter group.
struct State {
    /// What the weights are cut into: parameters, the parts of them that this rank updates, or Adafactor's blocks.
    pieces: Vec<Piece>,
    /// Those of the weights' layout.
    moments: Vec<Moment>,
    /// Adafactor's.
    mean_squares: Option<MeanSquares>,
    master: Option<Moment>,
}

/// A part of a parameter, or of what is kept of one.
#[derive(Debug, Clone)]
struct Piece {
    param: String,
    place: Place,
    /// The axes along which every rank keeps the same.
    replicated: AxisSet,
}

impl Piece {
    fn numel(&self) -> usize {
        self.place.dims().iter().product()
    }
}

/// Numbers that are kept for the parameters of a group, with their name in checkpoints.
struct Moment {
    name: &'static str,
    /// What the ranges of the flat are.
    pieces: Vec<Piece>,
    flat: Flat,
}

/// What a checkpoint calls the master weights.
pub const MASTER: &str = "master";

/// Where moments are made, and of what type.
struct Store {
    kind: MemoryKind,
    device: Device,
    dtype: DType,
}

impl Moment {
    /// Zeros.
    fn new(name: &'static str, pieces: Vec<Piece>, store: &Store) -> Result<Self> {
        let Store { kind, device, dtype } = store;
        let dims = |piece: &Piece| (piece.param.clone(), piece.place.dims().to_vec());
        let parts: Vec<_> = pieces.iter().map(dims).collect();
        let flat = Flat::new_in(*kind, device, *dtype, Category::Optimizer, &parts)?;
        Ok(Moment { name, pieces, flat })
    }
}

impl State {
    /// Begins to read what is kept for these elements.
    fn prefetch(&self, elements: &Range<usize>) {
        let kept = self.moments.iter().chain(&self.master);
        kept.for_each(|moment| moment.flat.prefetch(elements.clone()));
    }

    fn all(&self) -> impl Iterator<Item = &Moment> {
        let mean_squares = self.mean_squares.iter().flat_map(|means| &means.moments);
        self.moments.iter().chain(mean_squares).chain(&self.master)
    }

    fn all_mut(&mut self) -> impl Iterator<Item = &mut Moment> {
        let mean_squares = self.mean_squares.iter_mut().flat_map(|means| &mut means.moments);
        self.moments.iter_mut().chain(mean_squares).chain(&mut self.master)
    }
}

impl Optimizer {
    /// Zero moments for every weight that this rank updates, in the accumulation type (f32, or f64 for f64
    /// weights), and master weights where weights have 16 bits.
    ///
    /// Errors, naming it, if a constant is out of its range.
    pub fn new(config: OptimizerConfig, buffers: &ParamBuffers) -> Result<Optimizer> {
        Self::with_update(config, buffers, &UpdateConfig::default())
    }

    /// As [`Optimizer::new`], with a choice of how 16-bit weights are updated and where the state lives.
    pub fn with_update(
        config: OptimizerConfig,
        buffers: &ParamBuffers,
        update: &UpdateConfig,
    ) -> Result<Optimizer> {
        config.validate()?;
        let groups = buffers
            .groups()
            .iter()
            .map(|group| Self::state(&config, group, update))
            .collect::<Result<_>>()?;
        let UpdateConfig { rounding, states, .. } = *update;
        Ok(Optimizer { config, rounding, states, groups, step: 0 })
    }

    fn state(config: &OptimizerConfig, group: &ParamGroup, update: &UpdateConfig) -> Result<State> {
        let blocks = match config {
            OptimizerConfig::Adafactor(_) => Some(Block::all(group)?),
            _ => None,
        };
        let own = |(param, place)| Piece { param, place, replicated: group.replicated };
        let pieces: Vec<Piece> = match &blocks {
            Some(blocks) => blocks.iter().map(|block| block.piece.clone()).collect(),
            None => group.pieces().into_iter().map(own).collect(),
        };
        group.with_owned(|(weights, range), _| {
            let (device, dtype) = (weights.device().clone(), weights.dtype().accumulator());
            let store = Store { kind: update.states, device, dtype };
            let moment = |&name: &&'static str| Moment::new(name, pieces.clone(), &store);
            let moments = config.moments().iter().map(moment).collect::<Result<_>>()?;
            let mean_squares = blocks.map(|blocks| MeanSquares::new(blocks, &store)).transpose()?;
            let has_master = weights.dtype() != dtype && update.weights == WeightUpdate::MasterCopy;
            let mut master = has_master.then(|| moment(&MASTER)).transpose()?;
            if let Some(master) = &mut master {
                let weights = weights.elements(range)?;
                master.flat.update_elements(.., |master| widen(master, &weights))?;
            }
            Ok(State { pieces: pieces.clone(), moments, mean_squares, master })
        })
    }

    /// Updates the weights from their gradients, one pass over each group.
    ///
    /// Errors if a weight is still held by a graph that was not walked; nothing has changed then. Errors for
    /// Adafactor where other ranks hold parts of the same parameters: see [`Optimizer::step_with`].
    pub fn step(&mut self, buffers: &ParamBuffers, step: &StepConfig) -> Result<()> {
        let Some(param) = buffers.params().next() else { return Ok(()) };
        let step = Step::new(param.leaf().device(), &self.numbers(step))?;
        self.step_with(buffers, &step, &mut |_, _| {
            let message = "parameters are cut between ranks, whose sums have to be added up";
            Err(Error::config("optimizer", message))
        })
    }

    /// The numbers of the next step.
    pub fn numbers(&self, step: &StepConfig) -> StepNumbers {
        let update = self.step + 1;
        let lr = self.config.learning_rate(step.lr, update);
        StepNumbers { update, lr, grad_scale: step.grad_scale }
    }

    /// As [`Optimizer::step`] with the next step's [numbers](Optimizer::numbers) where the device has them, on a rank
    /// that may hold parts of parameters. What Adafactor has to know of the whole are sums: `sum` adds them up over
    /// the ranks that hold the other parts, which all call it equally often, each time with as many numbers that mean
    /// the same. Nobody calls it where nothing is cut.
    pub fn step_with(
        &mut self,
        buffers: &ParamBuffers,
        step: &Step,
        sum: &mut SumParts,
    ) -> Result<()> {
        self.check_writable(buffers)?;
        let (config, rounding, states) = (self.config, self.rounding, self.states);
        let count = self.step + 1;
        let Some(param) = buffers.params().next() else { return Ok(()) };
        let device = &param.leaf().device().clone();
        let adafactor = match &config {
            OptimizerConfig::Adafactor(rule) => {
                adafactor::prepare(rule, (step, device), buffers.groups(), &mut self.groups, sum)?
            }
            _ => self.groups.iter().map(|_| Vec::new()).collect(),
        };
        self.step = count;
        for (index, (group, adafactor)) in buffers.groups().iter().zip(&adafactor).enumerate() {
            if let Some(next) = self.groups.get(index + 1) {
                next.prefetch(&(0..RUN));
            }
            let state = &mut self.groups[index];
            let pass = Pass {
                device,
                config,
                rounding,
                states,
                step,
                count,
                decay: group.decay,
                adafactor,
            };
            group.with_owned(|weights, gradients| pass.group(state, weights, gradients))?;
        }
        buffers.mark_updated();
        Ok(())
    }

    /// Counts a step that the device takes without a call, as a replayed CUDA graph does.
    pub fn count_step(&mut self, buffers: &ParamBuffers) {
        self.step += 1;
        buffers.mark_updated();
    }

    /// How many numbers each call of [`Optimizer::step_with`]'s `sum` gets in a step.
    pub fn part_sums(&self) -> Vec<usize> {
        match &self.config {
            OptimizerConfig::Adafactor(config) => adafactor::part_sums(config, &self.groups),
            _ => Vec::new(),
        }
    }

    /// Errors if anybody reads a weight or a moment: a step that ends in the middle would leave some groups
    /// updated and others not.
    fn check_writable(&mut self, buffers: &ParamBuffers) -> Result<()> {
        for (group, state) in buffers.groups().iter().zip(&mut self.groups) {
            group.with_owned(|(weights, _), _| {
                let flats = state.all_mut().map(|moment| &mut moment.flat);
                [weights].into_iter().chain(flats).try_for_each(Flat::check_writable)
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
        f: impl FnMut(&str, &'static str, &Place, Tensor) -> Result<()>,
    ) -> Result<()> {
        self.visit_where(|_| true, f)
    }

    /// As [`Optimizer::visit`], of what `is_wanted` says of the axes along which every rank keeps the same: those
    /// of a parameter, and of Adafactor's sums over a dim that is cut, the axis along which it is.
    pub fn visit_where(
        &self,
        is_wanted: impl Fn(AxisSet) -> bool,
        mut f: impl FnMut(&str, &'static str, &Place, Tensor) -> Result<()>,
    ) -> Result<()> {
        for moment in self.groups.iter().flat_map(State::all) {
            for (range, piece) in moment.pieces.iter().enumerate() {
                if is_wanted(piece.replicated) {
                    f(&piece.param, moment.name, &piece.place, moment.flat.tensor(range)?)?;
                }
            }
        }
        Ok(())
    }

    /// As [`Optimizer::visit`], with the value to overwrite.
    pub fn visit_mut(
        &mut self,
        mut f: impl FnMut(&str, &'static str, &Place, &mut Tensor) -> Result<()>,
    ) -> Result<()> {
        for Moment { name, pieces, flat } in self.groups.iter_mut().flat_map(State::all_mut) {
            for (range, piece) in pieces.iter().enumerate() {
                flat.update(range, |tensor| f(&piece.param, name, &piece.place, tensor))?;
            }
        }
        Ok(())
    }
}
