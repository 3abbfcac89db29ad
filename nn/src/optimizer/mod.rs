//! Optimizers over flat buffers: AdamW and SGD with momentum in one fused pass, and Adafactor per parameter. Their
//! state may be offloaded to host memory, and is prefetched in chunks during the update.

mod adafactor;
mod config;
pub(crate) mod loss_scale;
mod mean_squares;
mod pass;
pub mod schedule;

pub use adafactor::{ReduceSums, ShardedSum};
pub use config::{AdafactorConfig, OptimizerConfig, StepSize};

use ferrotron_tensor::ops::round::widen;
use ferrotron_tensor::ops::step::{DeviceStepParams, StepParams};
use ferrotron_tensor::{
    Category, DType, Device, Error, FlatBuffer, MemoryKind, Result, ShardSpec, Tensor,
};
use std::ops::Range;

use self::mean_squares::{FactoredBlock, MeanSquares};
use self::pass::{Pass, RUN};
use crate::{AxisSet, ParamAndGradBucket, ParamAndGradBuffer};

/// The inputs of a step besides the gradients.
#[derive(Debug, Clone, Copy)]
pub struct StepConfig {
    /// Learning rate of this step.
    pub lr: f64,
    /// Factor of the gradients: the clip coefficient.
    pub grad_scale: f64,
}

/// The update of 16-bit weights; other weights are updated in place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WeightUpdate {
    /// Update an f32 copy, the master weights, and round it to the weights: Micikevicius et al., "Mixed Precision
    /// Training", arXiv 1710.03740, section 3.1.
    #[default]
    MasterCopy,
    /// Update in place. Changes below half the spacing of the weights are lost, unless rounding is stochastic.
    InPlace,
}

/// The rounding of updated weights to 16 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Rounding {
    /// To nearest even.
    #[default]
    Nearest,
    /// Stochastic rounding: up or down at random with expectation equal to the value, by the element's index in the
    /// global tensor. See [`round`](ferrotron_tensor::ops::round).
    Stochastic {
        /// Seed of the run.
        seed: u64,
    },
}

/// Options of weight updates and of the placement of optimizer state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct UpdateConfig {
    /// The update of 16-bit weights.
    pub weights: WeightUpdate,
    /// The rounding of 16-bit weights.
    pub rounding: Rounding,
    /// Memory kind of moments and master weights. ZeRO-Offload, Ren et al., arXiv 2101.06840, keeps them in host
    /// memory.
    pub states: MemoryKind,
}

/// An optimizer with its state: moments and master weights in the layout of the weights that this rank updates.
pub struct Optimizer {
    config: OptimizerConfig,
    rounding: Rounding,
    states: MemoryKind,
    groups: Vec<GroupState>,
    step: u64,
}

/// The state of one parameter group.
struct GroupState {
    /// The ranges of the weights: parameters, the shards of them that this rank updates, or Adafactor's blocks.
    pieces: Vec<ParamShard>,
    /// Moments with the layout of the weights.
    moments: Vec<Moment>,
    /// Mean squares of Adafactor.
    mean_squares: Option<MeanSquares>,
    master: Option<Moment>,
}

/// A shard of a parameter, or of state derived from one.
#[derive(Debug, Clone)]
struct ParamShard {
    param: String,
    place: ShardSpec,
    /// The axes along which all ranks hold the same values.
    replicated: AxisSet,
}

impl ParamShard {
    fn numel(&self) -> usize {
        self.place.dims().iter().product()
    }
}

/// Optimizer state for the parameters of a group, with its name in checkpoints.
struct Moment {
    name: &'static str,
    /// The shard that each range of the flat buffer holds.
    pieces: Vec<ParamShard>,
    flat: FlatBuffer,
}

/// Name of the master weights in checkpoints.
pub const MASTER: &str = "master";

/// Placement and dtype of moments.
struct Store {
    kind: MemoryKind,
    device: Device,
    dtype: DType,
}

impl Moment {
    /// A moment of zeros.
    fn new(name: &'static str, pieces: Vec<ParamShard>, store: &Store) -> Result<Self> {
        let Store { kind, device, dtype } = store;
        let dims = |piece: &ParamShard| (piece.param.clone(), piece.place.dims().to_vec());
        let parts: Vec<_> = pieces.iter().map(dims).collect();
        let flat = FlatBuffer::new_in(*kind, device, *dtype, Category::Optimizer, &parts)?;
        Ok(Moment { name, pieces, flat })
    }
}

impl GroupState {
    /// Starts reading the state of these elements, if it is in mapped files.
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
    /// Creates zero moments for every weight that this rank updates, in the accumulator dtype (f32, or f64 for f64
    /// weights), and master weights for 16-bit weights.
    ///
    /// Errors, naming it, if a hyperparameter is out of range.
    pub fn new(config: OptimizerConfig, buffers: &ParamAndGradBuffer) -> Result<Optimizer> {
        Self::with_update(config, buffers, &UpdateConfig::default())
    }

    /// Like [`Optimizer::new`], with options for 16-bit weights and the placement of state.
    pub fn with_update(
        config: OptimizerConfig,
        buffers: &ParamAndGradBuffer,
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

    fn state(
        config: &OptimizerConfig,
        group: &ParamAndGradBucket,
        update: &UpdateConfig,
    ) -> Result<GroupState> {
        let blocks = match config {
            OptimizerConfig::Adafactor(_) => Some(FactoredBlock::all(group)?),
            _ => None,
        };
        let own = |(param, place)| ParamShard { param, place, replicated: group.replicated };
        let pieces: Vec<ParamShard> = match &blocks {
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
                let weights = weights.slice(range)?;
                master.flat.with_slice_mut(.., |master| widen(master, &weights))?;
            }
            Ok(GroupState { pieces: pieces.clone(), moments, mean_squares, master })
        })
    }

    /// Updates the weights from their gradients, in one pass per group.
    ///
    /// # Errors
    ///
    /// Errors, without any change, if a graph that was not consumed still holds a weight. Errors for Adafactor if
    /// parameters are sharded over ranks: see [`Optimizer::step_with`].
    pub fn step(&mut self, buffers: &ParamAndGradBuffer, step: &StepConfig) -> Result<()> {
        let Some(param) = buffers.params().next() else { return Ok(()) };
        let step = DeviceStepParams::new(param.leaf().device(), &self.numbers(step))?;
        self.step_with(buffers, &step, &mut |_, _| {
            let message = "parameters are cut between ranks, whose sums have to be added up";
            Err(Error::config("optimizer", message))
        })
    }

    /// The parameters of the next step.
    pub fn numbers(&self, step: &StepConfig) -> StepParams {
        let update = self.step + 1;
        let lr = self.config.learning_rate(step.lr, update);
        StepParams { update, lr, grad_scale: step.grad_scale }
    }

    /// Like [`Optimizer::step`], with the next step's [parameters](Optimizer::numbers) in device memory, on a rank
    /// that may hold shards of parameters.
    ///
    /// `sum` all-reduces Adafactor's partial sums over the ranks that hold the other shards. All of these ranks make
    /// the same calls, with the same number of elements in the same order. It is not called if nothing is sharded.
    pub fn step_with(
        &mut self,
        buffers: &ParamAndGradBuffer,
        step: &DeviceStepParams,
        sum: &mut ReduceSums,
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

    /// Counts a step that the device executes without a call of `step`, as in a replayed CUDA graph.
    pub fn count_step(&mut self, buffers: &ParamAndGradBuffer) {
        self.step += 1;
        buffers.mark_updated();
    }

    /// The number of elements in each call of `sum` by [`Optimizer::step_with`] in a step.
    pub fn part_sums(&self) -> Vec<usize> {
        match &self.config {
            OptimizerConfig::Adafactor(config) => adafactor::part_sums(config, &self.groups),
            _ => Vec::new(),
        }
    }

    /// Errors if a tensor reads a weight or a moment: stopping in the middle of a step would leave only some groups
    /// updated.
    fn check_writable(&mut self, buffers: &ParamAndGradBuffer) -> Result<()> {
        for (group, state) in buffers.groups().iter().zip(&mut self.groups) {
            group.with_owned(|(weights, _), _| {
                let flats = state.all_mut().map(|moment| &mut moment.flat);
                [weights].into_iter().chain(flats).try_for_each(FlatBuffer::check_writable)
            })?;
        }
        Ok(())
    }

    /// Number of steps taken.
    pub fn steps(&self) -> u64 {
        self.step
    }

    /// Resumes after `steps` steps, for bias correction.
    pub fn set_steps(&mut self, steps: u64) {
        self.step = steps;
    }

    /// Calls `f` with every local shard of a moment, and of the [`MASTER`] weights: parameter name, moment name,
    /// shard of the global tensor, and value.
    pub fn visit(
        &self,
        f: impl FnMut(&str, &'static str, &ShardSpec, Tensor) -> Result<()>,
    ) -> Result<()> {
        self.visit_where(|_| true, f)
    }

    /// Like [`Optimizer::visit`], restricted to entries whose replicated axes satisfy the filter. For Adafactor's
    /// reductions over a sharded dim, these include the axis along which it is sharded.
    pub fn visit_where(
        &self,
        is_wanted: impl Fn(AxisSet) -> bool,
        mut f: impl FnMut(&str, &'static str, &ShardSpec, Tensor) -> Result<()>,
    ) -> Result<()> {
        for moment in self.groups.iter().flat_map(GroupState::all) {
            for (range, piece) in moment.pieces.iter().enumerate() {
                if is_wanted(piece.replicated) {
                    f(&piece.param, moment.name, &piece.place, moment.flat.tensor(range)?)?;
                }
            }
        }
        Ok(())
    }

    /// Like [`Optimizer::visit`], with the value to overwrite.
    pub fn visit_mut(
        &mut self,
        mut f: impl FnMut(&str, &'static str, &ShardSpec, &mut Tensor) -> Result<()>,
    ) -> Result<()> {
        for Moment { name, pieces, flat } in self.groups.iter_mut().flat_map(GroupState::all_mut) {
            for (range, piece) in pieces.iter().enumerate() {
                flat.with_mut(range, |tensor| f(&piece.param, name, &piece.place, tensor))?;
            }
        }
        Ok(())
    }
}
