//! A vocabulary that is cut into shards: which rows are here, and how statistics of a token are joined.

use crate::{Error, Result, Tensor};

/// Which classes of a vocabulary are held: those from `offset` on, as many as there are local logits.
///
/// ```
/// use ferrotron_tensor::ops::cross_entropy::VocabShard;
/// // The third of four shards of 13 classes, 4 + 3 + 3 + 3; no shard has more than 4.
/// let shard = VocabShard { offset: 7, global: 13, shards: 4 };
/// assert_eq!(shard.largest(), 4);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VocabShard {
    /// The first class that is here.
    pub offset: usize,
    /// Classes of the whole vocabulary, V.
    pub global: usize,
    /// Into how many shards it is cut; none has more than ceil(V / shards) classes.
    pub shards: usize,
}

impl VocabShard {
    /// A vocabulary that is all here.
    pub fn whole(classes: usize) -> VocabShard {
        VocabShard { offset: 0, global: classes, shards: 1 }
    }

    /// The most classes a shard may have, ceil(V / shards). What must be the same on all shards, such as
    /// the number of chunks of tokens, is computed from it.
    pub fn largest(&self) -> usize {
        self.global.div_ceil(self.shards.max(1))
    }

    /// Errors unless `classes` from the offset on lie in the vocabulary and are no more than the largest
    /// shard may have.
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

/// Joins what each shard of a vocabulary found about the tokens at hand: an all-reduce over the group that
/// holds the shards. Every shard makes the same calls in the same order, and every shard must get the same
/// bits.
///
/// (Vocab-parallel cross-entropy of Shoeybi et al., "Megatron-LM", 2019, section 3: scalars of a token are
/// exchanged instead of its logits.)
pub trait JoinShards: Send + Sync {
    /// The elementwise maximum over the shards of (tokens).
    fn max(&self, per_token: Tensor) -> Result<Tensor>;

    /// The elementwise sum over the shards of (2, tokens), or of (3, tokens) with label smoothing.
    fn sum(&self, per_token: Tensor) -> Result<Tensor>;
}
