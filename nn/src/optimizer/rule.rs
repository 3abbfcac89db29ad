//! The trait of update rules, the state that a rule declares, and the facts of a step that it may read.

use ferrotron_tensor::ops::rounded::Rounded;
use ferrotron_tensor::ops::step::{DeviceStepParams, StepParams};
use ferrotron_tensor::{DType, Error, Result, Tensor};

use super::block::Block;
use super::shard_exchange::{ExchangeSize, ShardExchange, ShardedSum};
use super::shard_unit::ShardUnit;
use super::state::StateSpec;

/// Defines both updates of a rule by one pass over its tensors, which takes the rounded weights if there are any.
macro_rules! updates_in_one_pass {
    ($pass:path) => {
        fn update(
            &self,
            weights: &mut ferrotron_tensor::Tensor,
            gradient: &ferrotron_tensor::Tensor,
            states: &mut [&mut ferrotron_tensor::Tensor],
            step: &$crate::optimizer::UpdateStep,
        ) -> ferrotron_tensor::Result<()> {
            $pass(self, weights, gradient, states, None, step)
        }

        fn update_and_round(
            &self,
            weights: &mut ferrotron_tensor::Tensor,
            gradient: &ferrotron_tensor::Tensor,
            states: &mut [&mut ferrotron_tensor::Tensor],
            rounded: ferrotron_tensor::ops::rounded::Rounded,
            step: &$crate::optimizer::UpdateStep,
        ) -> ferrotron_tensor::Result<()> {
            $pass(self, weights, gradient, states, Some(rounded), step)
        }
    };
}
pub(super) use updates_in_one_pass;

/// A rule by which an [`Optimizer`](super::Optimizer) changes weights: the state that it keeps of each parameter, and
/// one step.
///
/// The optimizer does all else for every rule: ZeRO, offloading, master weights, rounding, checkpoints, resharding and
/// the count of bytes. A rule is chosen by [`OptimizerConfig`](super::OptimizerConfig); one of your own is
/// `OptimizerConfig::custom(&RULE)`.
///
/// ```
/// use ferrotron_nn::{OptimizerConfig, StateSpec, UpdateRule, UpdateStep};
/// use ferrotron_tensor::{Result, Tensor};
///
/// /// SGD with momentum: m = 0.9 m + g, w = w - lr m.
/// #[derive(Debug)]
/// struct Momentum;
///
/// impl UpdateRule for Momentum {
///     fn name(&self) -> &'static str {
///         "momentum"
///     }
///     fn states(&self, _dims: &[usize]) -> Vec<StateSpec> {
///         vec![StateSpec::per_element("momentum")]
///     }
///     fn update(
///         &self,
///         weights: &mut Tensor,
///         gradient: &Tensor,
///         states: &mut [&mut Tensor],
///         step: &UpdateStep,
///     ) -> Result<()> {
///         let momentum = states[0].mul_scalar(0.9)?.add(gradient)?;
///         weights.copy_from(&weights.sub(&momentum.mul_scalar(step.lr()?)?)?)?;
///         states[0].copy_from(&momentum)
///     }
/// }
/// let config = OptimizerConfig::custom(&Momentum);
/// # drop(config);
/// ```
pub trait UpdateRule: std::fmt::Debug + Send + Sync {
    /// The name in error messages.
    fn name(&self) -> &'static str;

    /// Errors, naming it, if a hyperparameter is out of range.
    fn validate(&self) -> Result<()> {
        Ok(())
    }

    /// The unit in which [`UpdateRule::update`] gets parameters. By default it gets any ranges of elements, and each state
    /// has one number per element. With another unit it gets one tensor at a time, a [`Block`], and ZeRO gives each
    /// parameter to one rank.
    fn shard_unit(&self) -> ShardUnit {
        ShardUnit::Elements
    }

    /// The rule of the parameters that are no hidden matrices, if this one's unit is [`ShardUnit::HiddenMatrices`]. It must
    /// update elements. `None`, the default, is [`OptimizerConfig::ADAMW`](super::OptimizerConfig::ADAMW).
    ///
    /// [`OptimizerConfig::rule`](super::OptimizerConfig::rule) makes a rule of a choice.
    fn fallback(&self) -> Option<Box<dyn UpdateRule>> {
        None
    }

    /// The state that the rule keeps of a tensor of the global `dims`, in the order in which
    /// [`UpdateRule::update`] gets it. It begins as zeros. The names become those in checkpoints.
    fn states(&self, dims: &[usize]) -> Vec<StateSpec>;

    /// The learning rate of a step, counted from 1, if the schedule's is `scheduled`.
    fn learning_rate(&self, scheduled: f64, _step: u64) -> f64 {
        scheduled
    }

    /// Returns whether [`UpdateRule::update`] is one kernel that reads weights and gradients in their stored dtypes,
    /// multiplies gradients by the step's factor and reads [`UpdateStep::device_params`].
    ///
    /// If not, the default, it gets both in the accumulator dtype (f32, or f64), gradients multiplied already, and is
    /// not called in a skipped step. On a GPU the host then waits for the device once in a step, since the device decides
    /// whether the step is skipped and how gradients are clipped. Muon waits too; the project's other rules are kernels.
    fn is_fused(&self) -> bool {
        false
    }

    /// Computes numbers that need a whole step before the first update, for each block of `tensors`:
    /// [`UpdateStep::prepared`]. Called once in a step for rules whose [unit](UpdateRule::shard_unit) is not elements.
    fn prepare(
        &self,
        tensors: &mut dyn StepTensors,
        _step: &UpdateStep,
    ) -> Result<Vec<Vec<Tensor>>> {
        Ok((0..tensors.len()).map(|_| Vec::new()).collect())
    }

    /// The exchanges along the tensor axis in a step that updates these blocks, for the count of bytes that a rank sends.
    /// States and updates have the dtype `accumulator`.
    ///
    /// By default a rule of [`ShardUnit::HiddenMatrices`] calls [`UpdateStep::on_whole_matrix`] once for each matrix, and
    /// another rule exchanges nothing. A rule that does otherwise says so here; numbers in training do not depend on it.
    fn shard_exchanges(&self, blocks: &[&Block], accumulator: DType) -> Vec<ExchangeSize> {
        if self.shard_unit() != ShardUnit::HiddenMatrices {
            return Vec::new();
        }
        let gather = |block: &&Block| {
            let gathered_dim = Some(block.global_dims()[block.cut_dim()?]);
            Some(ExchangeSize { numel: block.numel(), dtype: accumulator, gathered_dim })
        };
        blocks.iter().filter_map(gather).collect()
    }

    /// Updates the vector `weights` from the vector `gradient`, of as many elements, and the declared `states`.
    fn update(
        &self,
        weights: &mut Tensor,
        gradient: &Tensor,
        states: &mut [&mut Tensor],
        step: &UpdateStep,
    ) -> Result<()>;

    /// Like [`UpdateRule::update`], and rounds the updated weights into `rounded`, to nearest or stochastically.
    fn update_and_round(
        &self,
        weights: &mut Tensor,
        gradient: &Tensor,
        states: &mut [&mut Tensor],
        rounded: Rounded,
        step: &UpdateStep,
    ) -> Result<()> {
        self.update(weights, gradient, states, step)?;
        rounded.round(weights)
    }
}

/// The blocks that a step updates by one rule, before the first update.
pub trait StepTensors {
    /// Number of blocks.
    fn len(&self) -> usize;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A block.
    fn block(&self, index: usize) -> &Block;

    /// Returns whether the block has no gradient in this step and stays as it is, with its state.
    fn is_unused(&self, index: usize) -> bool;

    /// The gradient of a block as a vector, in its stored dtype and without the step's factor.
    fn gradient(&self, index: usize) -> Result<Tensor>;

    /// The weights of a block as a vector: the master weights if there are any.
    fn weights(&self, index: usize) -> Result<Tensor>;

    /// Passes the declared states of a block to `f`.
    fn with_states(
        &mut self,
        index: usize,
        f: &mut dyn FnMut(&mut [&mut Tensor]) -> Result<()>,
    ) -> Result<()>;
}

/// The facts of a step that a rule may read.
#[derive(Clone, Copy)]
pub struct UpdateStep<'a> {
    pub(super) params: &'a DeviceStepParams,
    /// The values on the host, for rules that are not fused.
    pub(super) values: Option<StepParams>,
    /// The weight decay of the parameters, if it is not the rule's.
    pub(super) weight_decay: Option<f64>,
    pub(super) block: Option<&'a Block>,
    /// The unit of the rule.
    pub(super) unit: ShardUnit,
    pub(super) prepared: &'a [Tensor],
    pub(super) exchange: &'a dyn ShardExchange,
}

impl<'a> UpdateStep<'a> {
    /// The step of a group whose learning rate is multiplied by `factor`, with its numbers on the device.
    pub(super) fn for_group<'b>(
        self,
        scaled: Option<&'b DeviceStepParams>,
        factor: f64,
        weight_decay: Option<f64>,
    ) -> UpdateStep<'b>
    where
        'a: 'b,
    {
        let values = self.values.map(|numbers| StepParams { lr: numbers.lr * factor, ..numbers });
        UpdateStep { params: scaled.unwrap_or(self.params), values, weight_decay, ..self }
    }

    /// The learning rate of these parameters.
    ///
    /// Errors for a [fused](UpdateRule::is_fused) rule, whose kernels read [`UpdateStep::device_params`].
    pub fn lr(&self) -> Result<f64> {
        Ok(self.values()?.lr)
    }

    /// The number of the step, from 1.
    ///
    /// Errors as [`UpdateStep::lr`].
    pub fn number(&self) -> Result<u64> {
        Ok(self.values()?.update)
    }

    fn values(&self) -> Result<StepParams> {
        let message = "a fused rule reads the numbers of a step on the device";
        self.values.ok_or_else(|| Error::config("optimizer", message))
    }

    /// The numbers of the step in the memory of the device, for kernels.
    pub fn device_params(&self) -> &'a DeviceStepParams {
        self.params
    }

    /// The weight decay of these parameters, if the rule's is `own`: 0 for biases and norms, unless they were given
    /// one by name.
    pub fn weight_decay(&self, own: f64) -> f64 {
        self.weight_decay.unwrap_or(own)
    }

    /// The tensor that is updated.
    ///
    /// Errors for a rule whose [unit](UpdateRule::shard_unit) is elements.
    pub fn block(&self) -> Result<&'a Block> {
        let message =
            "a rule that updates ranges of elements sees no tensor: choose another `shard_unit`";
        self.block.ok_or_else(|| Error::config("optimizer", message))
    }

    /// The numbers that [`UpdateRule::prepare`] computed for the block.
    pub fn prepared(&self) -> &'a [Tensor] {
        self.prepared
    }

    /// Sums `tensor` over the ranks of tensor parallelism that hold the other shards of the block: squares, say. These
    /// ranks make the same calls in the same order, for [parts](Block::is_part) of tensors only.
    pub fn sum_over_shards(&self, tensor: Tensor) -> Result<Tensor> {
        self.sum(ShardedSum::Squares, tensor)
    }

    /// All-reduces `tensor` over the ranks that hold the other shards of the same parameters, which make the same
    /// calls in the same order.
    pub(super) fn sum(&self, what: ShardedSum, tensor: Tensor) -> Result<Tensor> {
        self.exchange.sum(what, tensor)
    }

    /// Calls `f` with the whole of a hidden matrix, of [`Block::global_dims`], and returns this rank's shard of the result,
    /// as a vector. `own` is this rank's shard of the matrix: the gradient, or what a rule has made of it.
    ///
    /// If the matrix is sharded along the tensor axis, the ranks along it gather it, compute the same, and must all make
    /// this call; each other rank has the whole.
    ///
    /// Errors unless the rule's [unit](UpdateRule::shard_unit) is [`ShardUnit::HiddenMatrices`], if `own` has another number
    /// of elements than the shard or the result other dims than the matrix, and as `f`.
    pub fn on_whole_matrix(
        &self,
        own: &Tensor,
        f: impl FnOnce(&Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let refuse = |message: String| Err(Error::config("optimizer", message));
        if self.unit != ShardUnit::HiddenMatrices {
            return refuse(
                "shards are gathered for rules with `ShardUnit::HiddenMatrices` only".to_string(),
            );
        }
        let block = self.block()?;
        let (dims, whole) = (block.dims(), block.global_dims());
        if own.numel() != dims.iter().product() {
            let (name, got) = (block.name(), own.dims());
            return refuse(format!(
                "a tensor of {got:?} is not this rank's shard {dims:?} of '{name}'"
            ));
        }
        let (matrix, shard) = match block.cut_dim() {
            None => (own.reshape(dims)?, None),
            Some(dim) => {
                let own = own.reshape(dims)?;
                let (matrix, range) = self.exchange.all_gather(&own, dim, whole[dim])?;
                (matrix.contiguous()?, Some((dim, range)))
            }
        };
        let result = f(&matrix)?;
        if result.dims() != whole {
            let (name, got) = (block.name(), result.dims());
            return refuse(format!("a result of {got:?} instead of {whole:?} for '{name}'"));
        }
        let own = match shard {
            None => result,
            Some((dim, range)) => result.narrow(dim as isize, range.start, range.len())?,
        };
        own.contiguous()?.reshape(&[dims.iter().product()])
    }
}

/// A reference to a rule is a rule.
impl<R: UpdateRule + ?Sized> UpdateRule for &R {
    fn name(&self) -> &'static str {
        (**self).name()
    }
    fn validate(&self) -> Result<()> {
        (**self).validate()
    }
    fn shard_unit(&self) -> ShardUnit {
        (**self).shard_unit()
    }
    fn fallback(&self) -> Option<Box<dyn UpdateRule>> {
        (**self).fallback()
    }
    fn states(&self, dims: &[usize]) -> Vec<StateSpec> {
        (**self).states(dims)
    }
    fn learning_rate(&self, scheduled: f64, step: u64) -> f64 {
        (**self).learning_rate(scheduled, step)
    }
    fn is_fused(&self) -> bool {
        (**self).is_fused()
    }
    fn prepare(
        &self,
        tensors: &mut dyn StepTensors,
        step: &UpdateStep,
    ) -> Result<Vec<Vec<Tensor>>> {
        (**self).prepare(tensors, step)
    }
    fn shard_exchanges(&self, blocks: &[&Block], accumulator: DType) -> Vec<ExchangeSize> {
        (**self).shard_exchanges(blocks, accumulator)
    }
    fn update(
        &self,
        weights: &mut Tensor,
        gradient: &Tensor,
        states: &mut [&mut Tensor],
        step: &UpdateStep,
    ) -> Result<()> {
        (**self).update(weights, gradient, states, step)
    }
    fn update_and_round(
        &self,
        weights: &mut Tensor,
        gradient: &Tensor,
        states: &mut [&mut Tensor],
        rounded: Rounded,
        step: &UpdateStep,
    ) -> Result<()> {
        (**self).update_and_round(weights, gradient, states, rounded, step)
    }
}
