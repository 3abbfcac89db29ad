//! Layout of parameters in flat buffers: bucket size, sharding, and dtype of gradients.

use crate::{Axis, AxisSet, OptimizerConfig};

/// Configuration of the layout of parameters.
///
/// ```
/// use ferrotron_nn::{Bias, BufferConfig, Init, Linear, Module, ParamAndGradBuffer, Scope, Sharding};
/// use ferrotron_tensor::{DType, Device};
/// let scope = Scope::new(&Device::cpu(1)?, DType::F32, 1);
/// let layer = Linear::new(&scope, 3, 5, Bias::No, Init::XavierNormal)?;
/// // The second of two ranks; each keeps the moments of half the elements, rounded up.
/// let config =
///     BufferConfig { sharding: Sharding::Optimizer, shard: (1, 2), ..BufferConfig::default() };
/// let buffers = ParamAndGradBuffer::with_config(&layer.params(), &config)?;
/// let group = &buffers.groups()[0];
/// assert_eq!((group.owned.clone(), group.padded_numel()), (8..15, 16));
/// // The end of the third row, and the other two: boxes of the global (5, 3).
/// let dims: Vec<_> = group.pieces().iter().map(|(_, place)| place.dims().to_vec()).collect();
/// assert_eq!(dims, [[1, 1], [2, 3]]);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct BufferConfig {
    /// A bucket is closed once it has at least this many elements.
    pub bucket_numel: usize,
    /// The state that is sharded over the ranks.
    pub sharding: Sharding,
    /// The optimizer that updates the parameters: one that needs whole tensors gets whole parameters as shards.
    pub optimizer: OptimizerConfig,
    /// This rank's index among the sharding ranks, and their number.
    pub shard: (usize, usize),
    /// The dtype in which gradients of 16-bit weights are accumulated and reduced.
    pub gradients: GradDType,
    /// The treatment of parameters that the loss of a step does not depend on.
    pub unused: Unused,
    /// All ranks that train the model, which update it together: with more than one,
    /// [`Optimizer::step`](crate::Optimizer::step) is refused.
    pub ranks: usize,
    /// The axes that divide buckets: all by default. Along others, which must have one rank, parameters that are
    /// replicated and those that are sharded share buckets.
    pub axes: AxisSet,
}

impl Default for BufferConfig {
    /// No sharding, as few buckets as possible, and an optimizer that updates elements.
    fn default() -> BufferConfig {
        BufferConfig {
            bucket_numel: usize::MAX,
            sharding: Sharding::None,
            optimizer: OptimizerConfig::ADAMW,
            shard: (0, 1),
            gradients: GradDType::Accumulator,
            unused: Unused::Refuse,
            ranks: 1,
            axes: Axis::ALL.into_iter().collect(),
        }
    }
}

/// The treatment of a parameter that gets no contribution to its gradient in a step. Examples are an expert that no
/// token is routed to, or a layer that is left out by mistake.
///
/// ```
/// use ferrotron_autograd::Var;
/// use ferrotron_nn::{
///     Bias, BufferConfig, Init, Linear, Module, Optimizer, OptimizerConfig, ParamAndGradBuffer, Scope, StepConfig,
///     Unused,
/// };
/// use ferrotron_tensor::{DType, Device, Tensor};
/// let device = Device::cpu(1)?;
/// let scope = Scope::new(&device, DType::F32, 1);
/// let expert = |name| Linear::new(&scope.child(name), 2, 2, Bias::No, Init::Ones);
/// let experts = [expert("first")?, expert("second")?];
/// let params: Vec<_> = experts.iter().flat_map(|expert| expert.params()).collect();
/// let config = BufferConfig { unused: Unused::Skip, ..BufferConfig::default() };
/// let buffers = ParamAndGradBuffer::with_config(&params, &config)?;
/// let mut optimizer = Optimizer::new(OptimizerConfig::ADAMW, &buffers)?;
/// buffers.zero_gradients();
/// let x = Var::constant(Tensor::full(&device, DType::F32, &[1, 2], 1.0)?);
/// experts[0].forward(&x)?.sum_all()?.backward()?;
/// optimizer.step(&buffers, &StepConfig { lr: 0.1, grad_scale: 1.0 })?;
/// assert!(experts[0].weight().leaf().value()?.to_f64()? < vec![1.0; 4]);
/// assert_eq!(experts[1].weight().leaf().value()?.to_f64()?, [1.0; 4]); // not even decayed
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Unused {
    /// An error that names the parameters, from the norm and from the step.
    #[default]
    Refuse,
    /// Keeps weight and optimizer state as they are, without decay, if no rank contributed. If some did, the others add
    /// zero. The number of the step, for bias correction, is that of all parameters.
    Skip,
}

/// The state of a bucket that is sharded: the stages of ZeRO, Rajbhandari et al., arXiv 1910.02054.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Sharding {
    /// No state: stage 0.
    #[default]
    None,
    /// The optimizer state: stage 1.
    Optimizer,
    /// Gradients too: stage 2.
    Gradients,
    /// Weights too: stage 3.
    Weights,
}

impl Sharding {
    /// The stages, in order.
    pub const ALL: [Sharding; 4] =
        [Sharding::None, Sharding::Optimizer, Sharding::Gradients, Sharding::Weights];
}

/// The dtype in which gradients of 16-bit weights are accumulated and reduced. Other weights use their own dtype.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum GradDType {
    /// f32, in which they are also computed.
    #[default]
    Accumulator,
    /// The weights' dtype: half the memory and communication, but sums over micro-batches and ranks are rounded.
    Weight,
}
