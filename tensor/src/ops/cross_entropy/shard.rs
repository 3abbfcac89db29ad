//! Vocabulary sharding: the classes of a shard, and the reduction of per-token statistics.

use crate::{DType, Error, Result, Tensor};

/// A contiguous shard of a vocabulary: the classes from `offset` on, as many as there are local logits.
///
/// ```
/// use ferrotron_tensor::ops::cross_entropy::VocabShard;
/// // The third of four shards of 13 classes, 4 + 3 + 3 + 3; no shard has more than 4.
/// let shard = VocabShard { offset: 7, global: 13, shards: 4 };
/// assert_eq!(shard.largest(), 4);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VocabShard {
    /// The first class of this shard.
    pub offset: usize,
    /// Classes of the whole vocabulary, V.
    pub global: usize,
    /// Number of shards; none has more than ceil(V / shards) classes.
    pub shards: usize,
}

impl VocabShard {
    /// A vocabulary that is not sharded.
    pub fn unsharded(classes: usize) -> VocabShard {
        VocabShard { offset: 0, global: classes, shards: 1 }
    }

    /// The maximum number of classes per shard, ceil(V / shards). Values that must agree on all shards, such as the
    /// number of token chunks, are computed from it.
    pub fn largest(&self) -> usize {
        self.global.div_ceil(self.shards.max(1))
    }

    /// Errors unless `classes` from the offset on are within the vocabulary and at most the largest shard size.
    pub(crate) fn check(&self, op: &'static str, classes: usize) -> Result<()> {
        let inside = self.offset.checked_add(classes).is_some_and(|end| end <= self.global);
        if inside && classes <= self.largest() {
            return Ok(());
        }
        let VocabShard { offset, global, shards } = self;
        Err(Error::shape(
            op,
            format!(
                "{classes} classes from {offset} on are no shard of {global} classes in {shards} shards of \
                 at most {}",
                self.largest()
            ),
        ))
    }
}

/// Reduces per-token statistics over the shards of a vocabulary: an all-reduce over the group that holds them. Every
/// shard makes the same calls in the same order and must get the same bits.
///
/// (Vocab-parallel cross-entropy of Shoeybi et al., "Megatron-LM", 2019, section 3: shards exchange scalars per token
/// instead of logits.)
pub trait VocabAllReduce: Send + Sync {
    /// The elementwise maximum over the shards of (tokens).
    fn max(&self, per_token: Tensor) -> Result<Tensor>;

    /// The elementwise sum over the shards of (2, tokens), or of (3, tokens) with label smoothing.
    fn sum(&self, per_token: Tensor) -> Result<Tensor>;
}

/// Checks that the result of a reduction has the dtype and dims of its operand.
pub(crate) fn joined(tensor: Tensor, dtype: DType, dims: &[usize]) -> Result<Tensor> {
    if tensor.dims() != dims {
        let message = format!("joining {dims:?} gave {:?}", tensor.dims());
        return Err(Error::shape("join_shards", message));
    }
    if tensor.dtype() != dtype {
        return Err(Error::dtype(
            "join_shards",
            format!("joining {dtype} gave {}", tensor.dtype()),
        ));
    }
    tensor.contiguous()
}
