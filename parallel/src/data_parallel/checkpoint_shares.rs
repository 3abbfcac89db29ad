//! Shares of a checkpoint: ranks that hold the same state each write a part of it.

use ferrotron_tensor::ShardSpec;

use crate::collective::Group;

/// Deals out the tensors that all ranks of a group hold. Each goes to the rank with the fewest elements so far, so that
/// the largest share exceeds the smallest by one tensor at most. Every rank makes the same deal.
pub(super) struct CheckpointShares {
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
