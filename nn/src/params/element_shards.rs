//! The division of a bucket's elements among the ranks that share them.

use ferrotron_tensor::ShardSpec;
use std::ops::Range;

use crate::{BufferConfig, Param, ShardUnit, Sharding};

/// Elements of which a large shard is a multiple: 16 bytes of 16-bit numbers, which NCCL moves at once.
const ALIGNMENT: usize = 8;

/// Elements of the smallest shard for which that matters: smaller ones take as long as a message without content.
const LARGE: usize = 4096;

/// A rank's elements of a bucket.
///
/// All ranks have equal shards, so that one call reduces or gathers a flat buffer: it ends with padding, of fewer than
/// one element for each rank, or [`ALIGNMENT`] if shards are [`LARGE`]. The shards of the last ranks are, in part,
/// padding, which nobody updates. Without sharding the buffers are the same, and so is the order in which gradients are
/// added.
pub(crate) struct ElementShards {
    /// The elements of parameters that this rank updates.
    pub owned: Range<usize>,
    /// The elements behind those of parameters.
    pub padding: usize,
}

impl ElementShards {
    /// The elements of `params`, which belong to `owners` unless shards consist of elements.
    pub fn new(params: &[Param], owners: &[usize], config: &BufferConfig) -> ElementShards {
        let numel: usize = params.iter().map(|param| param.leaf().numel()).sum();
        let (rank, ranks) = config.shard;
        if shard_unit(&params[0], config) == ShardUnit::Parameters {
            let before = |limit: usize| {
                let earlier = params.iter().zip(owners).filter(|&(_, &owner)| owner < limit);
                earlier.map(|(param, _)| param.leaf().numel()).sum::<usize>()
            };
            let owned = match config.sharding {
                Sharding::None => 0..numel,
                _ => before(rank)..before(rank + 1),
            };
            return ElementShards { owned, padding: 0 };
        }
        let shard = match numel.div_ceil(ranks) {
            shard if ranks > 1 && shard >= LARGE => shard.next_multiple_of(ALIGNMENT),
            shard => shard,
        };
        let owned = match config.sharding {
            Sharding::None => 0..numel,
            _ => numel.min(rank * shard)..numel.min((rank + 1) * shard),
        };
        ElementShards { owned, padding: ranks * shard - numel }
    }
}

/// The unit in which the optimizer of a parameter shards it: elements or parameters.
pub(crate) fn shard_unit(param: &Param, config: &BufferConfig) -> ShardUnit {
    let own = param.options().optimizer.unwrap_or(config.optimizer).shard_unit();
    match own {
        ShardUnit::HiddenMatrices if param.is_hidden_matrix() => ShardUnit::Parameters,
        ShardUnit::HiddenMatrices => ShardUnit::Elements,
        unit => unit,
    }
}

/// Names and dims of the ranges of a bucket's flat buffers.
pub(crate) fn parts(params: &[Param], padding: usize) -> Vec<(String, Vec<usize>)> {
    let part = |param: &Param| (param.name().to_string(), param.leaf().dims().to_vec());
    let padding = (padding > 0).then(|| ("padding".to_string(), vec![padding]));
    params.iter().map(part).chain(padding).collect()
}

/// Names and dims of the ranges of a shard.
pub(crate) fn piece_parts(pieces: &[(String, ShardSpec)]) -> Vec<(String, Vec<usize>)> {
    pieces.iter().map(|(name, place)| (name.clone(), place.dims().to_vec())).collect()
}
