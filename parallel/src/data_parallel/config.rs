//! Configuration of gradient reductions, and the rejected combinations.

use ferrotron_nn::{Axis, GradDType, OptimizerConfig, Sharding, Unused};

use crate::mesh::ParallelDims;

/// Configuration of gradient reductions.
#[derive(Debug, Clone, Copy)]
pub struct DataParallelConfig {
    /// The state that is sharded over the ranks.
    pub sharding: Sharding,
    /// The optimizer that updates the parameters: one that needs whole tensors gets whole parameters as shards.
    pub optimizer: OptimizerConfig,
    /// Elements at which a bucket is closed; `None` puts all compatible parameters into one bucket.
    pub bucket_numel: Option<usize>,
    /// Steps between synchronizations. 1 reduces gradients in every step. With more, each rank along the data axis
    /// takes independent steps and the ranks then average their weights; moments are never averaged.
    pub synchronize_every: usize,
    /// The dtype in which gradients of 16-bit weights are reduced.
    pub gradients: GradDType,
    /// The treatment of parameters that the loss of a step does not depend on. With [`Unused::Skip`], buckets are
    /// reduced in one order, whichever rank uses which; a step sends one more number per parameter; and sharded weights
    /// are all gathered at once in each micro-batch, since ranks may use different ones.
    pub unused: Unused,
    /// Whether every step compares the replicas of parameters over ranks.
    pub replica_check: ReplicaCheck,
}

impl Default for DataParallelConfig {
    /// No sharding, one bucket, a reduction in f32 in every step, and an optimizer that updates elements.
    fn default() -> DataParallelConfig {
        DataParallelConfig {
            sharding: Sharding::None,
            optimizer: OptimizerConfig::ADAMW,
            bucket_numel: None,
            synchronize_every: 1,
            gradients: GradDType::Accumulator,
            unused: Unused::Refuse,
            replica_check: ReplicaCheck::Off,
        }
    }
}

/// Whether replicas are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ReplicaCheck {
    /// Checks only by [`DataParallel::check_replicas`](super::DataParallel::check_replicas).
    #[default]
    Off,
    /// Checks at the end of every [`DataParallel::finish_step`](super::DataParallel::finish_step). Each rank reads its
    /// weights and gradients and sends a digest of each parameter: for tests, and for the first steps of a new model.
    EveryStep,
}

/// The reason why a combination is rejected, in one line; `None` if it is supported.
///
/// | rejected | reason |
/// |---|---|
/// | sharded gradients or weights, more than one pipeline stage | buckets are reduced after each micro-batch, but a pipeline has several in flight |
/// | a bucket of no elements | no parameter fits |
/// | `synchronize_every` 0 | the period must be positive |
/// | `synchronize_every > 1`, any sharding | ranks would own shards of different weights |
/// | `synchronize_every > 1`, cp > 1 | ranks along cp share samples, so none has a loss of its own |
///
/// ```
/// use ferrotron_nn::Sharding;
/// use ferrotron_parallel::data_parallel::{DataParallelConfig, unsupported_reason};
/// use ferrotron_parallel::mesh::ParallelDims;
/// let config = DataParallelConfig { sharding: Sharding::Gradients, ..DataParallelConfig::default() };
/// assert!(unsupported_reason(&config, &ParallelDims::new(4, 1, 1, 1)?).is_none());
/// assert!(unsupported_reason(&config, &ParallelDims::new(4, 1, 1, 2)?).unwrap().contains("pipeline"));
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub fn unsupported_reason(config: &DataParallelConfig, layout: &ParallelDims) -> Option<String> {
    let DataParallelConfig { sharding, bucket_numel, synchronize_every, .. } = *config;
    let (stages, context) = (layout.size(Axis::Pipeline), layout.size(Axis::Context));
    if sharding >= Sharding::Gradients && stages > 1 {
        return Some(format!(
            "ZeRO stage {} reduces gradients after each micro-batch and does not go with {stages} pipeline stages; \
             use stage 0 or 1",
            sharding as usize
        ));
    }
    if bucket_numel == Some(0) {
        return Some("buckets need at least 1 element, got 0".to_string());
    }
    match (synchronize_every, sharding) {
        (0, _) => Some("weights are synchronized every 1 or more steps, got 0".to_string()),
        (1, _) => None,
        (every, Sharding::None) if context > 1 => Some(format!(
            "synchronizing every {every} steps needs ranks with samples of their own; along the context axis {context} \
             ranks share them"
        )),
        (_, Sharding::None) => None,
        (every, _) => Some(format!(
            "synchronizing every {every} steps does not go with ZeRO stage {}: the ranks' weights differ in between; \
             use stage 0",
            sharding as usize
        )),
    }
}
