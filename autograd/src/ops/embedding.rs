//! Gradient of the embedding: rows of the cotangent are added to the rows of the table that they came
//! from, in the order of the tokens, straight into the table's gradient.

use ferrotron_tensor::ops::embedding::{embedding, embedding_backward};
use ferrotron_tensor::{Result, Tensor};

use crate::{Accum, Grads, Var};

impl Var {
    /// Rows of this table (V, C) for `ids` (..): (.., C).
    pub fn embedding(&self, ids: &Tensor) -> Result<Var> {
        Var::record(&[self], embedding(self.value(), ids)?, || {
            let ids = ids.clone();
            move |dy: Tensor, dx: &mut Grads| {
                dx.accumulate(0, |table, accum| {
                    if accum == Accum::Replace {
                        table.fill_zero()?;
                    }
                    embedding_backward(&dy, &ids, table)
                })
            }
        })
    }
}
