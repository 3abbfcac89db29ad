//! Shares of a checkpoint: ranks that hold the same state each write a part of it.

use ferrotron_nn::{AxisSet, Param, Sharding};
use ferrotron_tensor::{Result, ShardSpec, Tensor};

use super::DataParallel;
use crate::collective::Group;

/// Deals out the tensors that all ranks of a group hold. Each goes to the rank with the fewest elements so far, so that
/// the largest share exceeds the smallest by one tensor at most. Every rank makes the same deal.
struct CheckpointShares {
    rank: usize,
    /// Elements of each rank.
    elements: Vec<usize>,
}

impl CheckpointShares {
    /// Begins a deal among the ranks of `group`, or gives the first one everything unless they hold the same.
    pub fn new(group: &Group, same: bool) -> CheckpointShares {
        let ranks = if same { group.size() } else { 1 };
        CheckpointShares { rank: group.rank(), elements: vec![0; ranks] }
    }

    /// Deals the next tensor; returns whether it is this rank's.
    pub fn takes(&mut self, place: &ShardSpec) -> bool {
        let least = (0..self.elements.len()).min_by_key(|&rank| self.elements[rank]).unwrap_or(0);
        self.elements[least] += place.dims().iter().product::<usize>();
        least == self.rank
    }
}

impl DataParallel {
    /// Returns a function that says of each shard of the optimizer's state whether this rank writes it to checkpoints.
    /// Call it in the order in which the optimizer visits them, with the axes along which a shard is replicated.
    /// Together the ranks write every element once, and the ranks along the batch axes equal shares. Where replicas
    /// take steps of their own, the first one's state is written.
    pub fn written_states(&self) -> impl FnMut(AxisSet, &ShardSpec) -> bool {
        let alike = self.shared.config.synchronize_every == 1;
        // With any sharding, the ranks along the batch axes own different shards.
        let sharded = self.shared.sharding() > Sharding::None;
        let mut shares = CheckpointShares::new(self.shared.mesh.dp_cp(), alike);
        move |replicated, place| self.shared.counts(replicated) && (sharded || shares.takes(place))
    }

    /// Calls `f` with every shard of a weight that this rank writes to checkpoints. Together the ranks write every
    /// element once, and the ranks along the batch axes equal shares.
    pub fn visit_weights(
        &self,
        mut f: impl FnMut(&str, &ShardSpec, Tensor) -> Result<()>,
    ) -> Result<()> {
        let mut shares = CheckpointShares::new(self.shared.mesh.dp_cp(), true);
        let groups = self.buffers().groups().iter();
        for group in groups.filter(|group| self.shared.counts(group.replicated)) {
            // Ranks along the batch axes hold equal weights, unless weights are sharded.
            let sharded = group.weight_shard.is_some();
            group.visit_weights(|name, place, tensor| {
                if sharded || shares.takes(place) { f(name, place, tensor) } else { Ok(()) }
            })?;
        }
        let writes = |param: &&Param| {
            self.shared.counts(param.replicated()) && shares.takes(param.shard_spec())
        };
        let frozen = self.buffers().frozen().iter();
        frozen
            .filter(writes)
            .try_for_each(|param| f(param.name(), param.shard_spec(), param.leaf().value()?))
    }
}
