//! The shards that update rules gather, known before the first step.

use super::config::OptimizerConfig;
use super::shard_unit::ShardUnit;
use crate::Param;

/// A sharded dim along which an update rule gathers a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GatheredShard {
    /// The dim.
    pub dim: usize,
    /// Its global length.
    pub len: usize,
    /// Its length on this rank.
    pub local_len: usize,
}

/// The shards of a parameter that a rule of [`ShardUnit::HiddenMatrices`] gathers from the ranks along the tensor axis: one
/// for each matrix packed in it. The rule is that of `optimizer`, unless an option of the parameter names another.
pub fn gathered_shards(param: &Param, optimizer: OptimizerConfig) -> Vec<GatheredShard> {
    let rule = param.options().optimizer.unwrap_or(optimizer);
    if !param.is_hidden_matrix() || rule.shard_unit() != ShardUnit::HiddenMatrices {
        return Vec::new();
    }
    let place = param.shard_spec();
    let (global, local) = (place.global_dims(), place.dims());
    let whole = [global[0]];
    let blocks = if param.blocks().is_empty() { &whole[..] } else { param.blocks() };
    let mut shards = Vec::new();
    let mut start = 0;
    for &rows in blocks {
        let block = place.intersect_dim(0, start..start + rows);
        start += rows;
        for (dim, len) in [(0, rows), (1, global[1])] {
            if local[dim] < global[dim] {
                shards.push(GatheredShard { dim, len, local_len: block.dims()[dim] });
            }
        }
    }
    shards
}
