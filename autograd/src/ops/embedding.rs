//! Gradient of the embedding: rows of the cotangent are added to the rows of the table that they came
//! from, in the order of the tokens, straight into the table's gradient. The ids are kept.

use ferrotron_tensor::ops::embedding::{embedding, embedding_backward};
use ferrotron_tensor::{Result, Tensor};

use crate::{Accum, Backward, Cotangents, Grads, Var};

struct EmbeddingBackward {
    ids: Tensor,
}

impl Backward for EmbeddingBackward {
    fn name(&self) -> &'static str {
        "embedding"
    }

    fn saved(&self) -> Vec<&Tensor> {
        vec![&self.ids]
    }

    fn backward(self: Box<Self>, dy: Cotangents, dx: &mut Grads) -> Result<()> {
        let dy = dy.single()?;
        dx.accumulate(0, |table, accum| {
            if accum == Accum::Replace {
                table.fill_zero()?;
            }
            embedding_backward(&dy, &self.ids, table)
        })
    }
}

impl Var {
    /// Rows of this table (V, C) for `ids` (..): (.., C).
    pub fn embedding(&self, ids: &Tensor) -> Result<Var> {
        let value = embedding(self.value(), ids)?;
        Var::record(&[self], value, || EmbeddingBackward { ids: ids.clone() })
    }
}
