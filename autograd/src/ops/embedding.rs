//! Gradient of the embedding: adds rows of the cotangent to their table rows, in token order, directly into the
//! table's gradient. It saves the ids. A shard of a table accumulates only its own rows.

use ferrotron_tensor::ops::cross_entropy::VocabShard;
use ferrotron_tensor::ops::embedding::{embedding_shard, embedding_shard_backward};
use ferrotron_tensor::{Result, Tensor};

use crate::{Accum, Backward, Cotangents, InputGrads, Var, forward_span};

struct EmbeddingBackward {
    ids: Tensor,
    shard: VocabShard,
}

impl Backward for EmbeddingBackward {
    fn name(&self) -> &'static str {
        "embedding"
    }

    fn saved(&self) -> Vec<Tensor> {
        vec![self.ids.clone()]
    }

    fn backward(self: Box<Self>, dy: Cotangents, dx: &mut InputGrads) -> Result<()> {
        let dy = dy.single()?;
        dx.accumulate_with(0, |table, accum| {
            if accum == Accum::Replace {
                table.zero_fill()?;
            }
            embedding_shard_backward(&dy, &self.ids, self.shard, table)
        })
    }
}

impl Var {
    /// Looks up rows of this table (V, C) for `ids` (..): (.., C).
    pub fn embedding(&self, ids: &Tensor) -> Result<Var> {
        self.embedding_shard(ids, VocabShard::unsharded(self.value().dim(0)?))
    }

    /// [`Var::embedding`] of a sharded table; this variable holds `shard`. Ids of other shards give zeros,
    /// so that the sum over the shards equals the result of the whole table.
    pub fn embedding_shard(&self, ids: &Tensor, shard: VocabShard) -> Result<Var> {
        let _span = forward_span("embedding");
        let value = embedding_shard(self.value(), ids, shard)?;
        Var::record(&[self], value, || EmbeddingBackward { ids: ids.clone(), shard })
    }
}
