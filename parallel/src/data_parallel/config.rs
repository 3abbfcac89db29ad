//! Configuration of gradient reductions, and the rejected combinations.

use ferrotron_nn::{Axis, GradDType, OptimizerConfig, Sharding, Unused};
use ferrotron_tensor::Device;

use crate::mesh::ParallelDims;

/// Configuration of gradient reductions.
#[derive(Debug, Clone, Copy)]
pub struct DataParallelConfig {
    /// The state that is sharded over the ranks.
    pub sharding: Sharding,
    /// The optimizer that updates the parameters: one that needs whole tensors gets whole parameters as shards.
    pub optimizer: OptimizerConfig,
    /// Elements at which a bucket, whose gradients are allocated and reduced together, is closed. `None` makes as few
    /// buckets as possible on a GPU; on CPUs, where gradients are freed between steps, each has the 25 MiB in f32 of
    /// PyTorch's `DistributedDataParallel`.
    pub bucket_numel: Option<usize>,
    /// Steps between synchronizations. 1 reduces gradients in every step. With more, each rank along the data axis
    /// takes independent steps and the ranks then average their weights; moments are never averaged.
    pub synchronize_every: usize,
    /// Updates that ranks do not wait for, if any.
    pub async_updates: Option<AsyncUpdates>,
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
    /// No sharding, a reduction in f32 in every step, and an optimizer that updates elements.
    fn default() -> DataParallelConfig {
        DataParallelConfig {
            sharding: Sharding::None,
            optimizer: OptimizerConfig::ADAMW,
            bucket_numel: None,
            synchronize_every: 1,
            async_updates: None,
            gradients: GradDType::Accumulator,
            unused: Unused::Refuse,
            replica_check: ReplicaCheck::Off,
        }
    }
}

/// Updates that ranks do not wait for: each rank computes its gradients with weights that miss up to `max_staleness`
/// updates. See [`DataParallel::launch_update`](super::DataParallel::launch_update).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AsyncUpdates {
    /// Largest number of updates that the weights of a step may miss. A rank keeps the gradients of as many steps beside
    /// those that it computes. 0 is the synchronous step.
    pub max_staleness: usize,
    /// Steps after which all outstanding updates are applied, so that every rank has the same weights. The caller does
    /// this.
    pub drain_interval: usize,
}

impl Default for AsyncUpdates {
    /// One outstanding update, and none after each tenth step.
    fn default() -> AsyncUpdates {
        AsyncUpdates { max_staleness: 1, drain_interval: 10 }
    }
}

impl DataParallelConfig {
    /// Elements at which a bucket is closed, for parameters on a device.
    pub(super) fn bucket_numel(&self, device: &Device) -> usize {
        let default = if device.gpu().is_some() { usize::MAX } else { 25 << 18 };
        self.bucket_numel.unwrap_or(default)
    }

    /// The asynchronous updates, unless their staleness is 0.
    pub fn stale_updates(&self) -> Option<AsyncUpdates> {
        self.async_updates.filter(|updates| updates.max_staleness > 0)
    }

    /// Steps between those after which all ranks have the same weights: 1 unless ranks take independent steps or do not
    /// wait for updates.
    pub fn synchronization_interval(&self) -> usize {
        self.stale_updates().map_or(self.synchronize_every, |updates| updates.drain_interval)
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
/// | a bucket of no elements | no parameter fits |
/// | `synchronize_every` 0 | the period must be positive |
/// | `synchronize_every > 1`, any sharding | ranks would own shards of different weights |
/// | `synchronize_every > 1`, cp > 1 | ranks along cp share samples, so none has a loss of its own |
/// | stale updates, tp, cp or pp > 1 | ranks that share a replica would need the same weights in each step |
/// | stale updates, any sharding or `synchronize_every > 1` | ranks would own shards of different weights, or average them |
/// | stale updates, `Unused::Skip` or `ReplicaCheck::EveryStep` | every step would wait for all ranks |
/// | stale updates, a drain interval up to the staleness | the staleness could not be reached |
///
/// ```
/// use ferrotron_nn::Sharding;
/// use ferrotron_parallel::data_parallel::{DataParallelConfig, unsupported_reason};
/// use ferrotron_parallel::mesh::ParallelDims;
/// let config = DataParallelConfig { sharding: Sharding::Gradients, ..DataParallelConfig::default() };
/// assert!(unsupported_reason(&config, &ParallelDims::new(4, 1, 1, 2)?).is_none());
/// let config = DataParallelConfig { synchronize_every: 8, ..config };
/// assert!(unsupported_reason(&config, &ParallelDims::new(4, 1, 1, 1)?).unwrap().contains("ZeRO stage 2"));
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub fn unsupported_reason(config: &DataParallelConfig, layout: &ParallelDims) -> Option<String> {
    let DataParallelConfig { sharding, bucket_numel, synchronize_every, .. } = *config;
    let context = layout.size(Axis::Context);
    if bucket_numel == Some(0) {
        return Some("buckets need at least 1 element, got 0".to_string());
    }
    if let Some(updates) = config.stale_updates() {
        return unsupported_updates(updates, config, layout);
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

/// The reason why asynchronous updates are rejected.
fn unsupported_updates(
    updates: AsyncUpdates,
    config: &DataParallelConfig,
    layout: &ParallelDims,
) -> Option<String> {
    let AsyncUpdates { max_staleness, drain_interval } = updates;
    let refuse = |why: String| Some(format!("--async-data-parallel does not go with {why}"));
    let of_model = [
        (Axis::Tensor, "--tensor-model-parallel-size"),
        (Axis::Context, "--context-parallel-size"),
        (Axis::Pipeline, "--pipeline-model-parallel-size"),
    ];
    if let Some((axis, flag)) = of_model.into_iter().find(|(axis, _)| layout.size(*axis) > 1) {
        return refuse(format!(
            "{flag} {}: the ranks that share a replica would compute with different weights; leave it out, or use \
             --max-staleness 0 or --async-data-parallel=false",
            layout.size(axis)
        ));
    }
    if config.sharding > Sharding::None {
        return refuse(format!(
            "--zero-stage {}: ranks would own shards of different weights; use --zero-stage 0, or \
             --async-data-parallel=false",
            config.sharding as usize
        ));
    }
    if config.synchronize_every != 1 {
        return refuse(format!(
            "--local-sgd-steps {}: gradients are summed in every step, or weights averaged; use --local-sgd-steps 1, or \
             --async-data-parallel=false",
            config.synchronize_every
        ));
    }
    if config.unused == Unused::Skip {
        return refuse(
            "`Unused::Skip`, which tells all ranks in every step; use `Unused::Refuse`".to_string(),
        );
    }
    if config.replica_check == ReplicaCheck::EveryStep {
        return refuse(
            "`ReplicaCheck::EveryStep`, which waits for all ranks; use `ReplicaCheck::Off`"
                .to_string(),
        );
    }
    (max_staleness >= drain_interval).then(|| {
        format!(
            "--max-staleness {max_staleness} cannot be reached where --drain-interval {drain_interval} applies all \
             updates: use a staleness below the interval"
        )
    })
}
