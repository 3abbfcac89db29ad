//! How parameters are laid out in flats: how large groups are, what of them each rank keeps, and in which type
//! their gradients are.

/// How parameters are laid out.
///
/// ```
/// use ferrotron_nn::{Bias, BufferConfig, Init, Linear, Module, ParamBuffers, Scope, Sharding};
/// use ferrotron_tensor::{DType, Device};
/// let scope = Scope::new(&Device::cpu(1)?, DType::F32, 1);
/// let layer = Linear::new(&scope, 3, 3, Bias::No, Init::XavierNormal)?;
/// // The second of two ranks, each of which keeps the moments of half the elements.
/// let config =
///     BufferConfig { sharding: Sharding::Optimizer, shard: (1, 2), ..BufferConfig::default() };
/// let buffers = ParamBuffers::with_config(&layer.params(), &config)?;
/// let group = &buffers.groups()[0];
/// assert_eq!(group.owned, 4..9);
/// // Half of the second row, and the third: boxes of the global (3, 3).
/// let dims: Vec<_> = group.pieces().iter().map(|(_, place)| place.dims().to_vec()).collect();
/// assert_eq!(dims, [[1, 2], [1, 3]]);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct BufferConfig {
    /// A group is closed when it has this many elements or more.
    pub bucket_numel: usize,
    /// What each of the sharding ranks keeps for itself.
    pub sharding: Sharding,
    /// Of what its shards are made.
    pub shard_unit: ShardUnit,
    /// This rank's number among those that share, and how many they are.
    pub shard: (usize, usize),
    /// In which type the gradients of 16-bit weights are added up and reduced.
    pub gradients: GradientType,
}

impl Default for BufferConfig {
    /// Everything on this rank, in as few groups as there are different facts.
    fn default() -> BufferConfig {
        BufferConfig {
            bucket_numel: usize::MAX,
            sharding: Sharding::None,
            shard_unit: ShardUnit::Elements,
            shard: (0, 1),
            gradients: GradientType::Accumulator,
        }
    }
}

/// What of a group each rank keeps for itself: the stages of ZeRO, Rajbhandari et al., arXiv 1910.02054.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Sharding {
    /// Nothing: stage 0.
    #[default]
    None,
    /// The optimizer's state: stage 1.
    Optimizer,
    /// Gradients as well: stage 2.
    Gradients,
    /// Weights as well: stage 3.
    Weights,
}

impl Sharding {
    /// The stages in their order.
    pub const ALL: [Sharding; 4] =
        [Sharding::None, Sharding::Optimizer, Sharding::Gradients, Sharding::Weights];
}

/// Of what the shards are made that ranks keep of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ShardUnit {
    /// Elements: equal shares of each group, wherever that cuts its parameters.
    #[default]
    Elements,
    /// Parameters, for optimizers that have to see the whole of one: each belongs to the rank in whose equal
    /// share of all parameters of the same facts its middle lies.
    Parameters,
}

/// In which type the gradients of 16-bit weights are added up and reduced. Those of others are in the weights'.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum GradientType {
    /// f32, in which they are computed too.
    #[default]
    Accumulator,
    /// The weights' own: half the memory and traffic, and sums of micro-batches and ranks are rounded.
    Weight,
}
