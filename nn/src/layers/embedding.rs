//! Embedding tables: one vector per token or position.

use ferrotron_autograd::Var;
use ferrotron_tensor::{At, Error, Result, Tensor};

use crate::{Init, Module, Param, Scope, WeightDecay};

/// A trainable table (count, width).
#[derive(Debug, Clone, Module)]
pub struct Embedding {
    path: String,
    weight: Param,
}

impl Embedding {
    /// A table of `count` rows of `width`. Errors if either is 0.
    pub fn new(scope: &Scope, count: usize, width: usize, init: Init) -> Result<Embedding> {
        if count == 0 || width == 0 {
            return Err(Error::config(
                "embedding",
                format!("sizes must be positive, got {count} rows of {width}"),
            )
            .at(scope.path()));
        }
        Ok(Embedding {
            path: scope.path().to_string(),
            weight: scope.param("weight", &[count, width], init, WeightDecay::On).as_embedding(),
        })
    }

    /// ids (..) -> (.., width), in the dtype of the scope. Errors if an id is not below `count`.
    pub fn forward(&self, ids: &Tensor) -> Result<Var> {
        let rows = self.weight.var()?.embedding(ids);
        rows.and_then(|rows| rows.cast(self.weight.compute_dtype())).at(&self.path)
    }

    /// The table (count, width).
    pub fn weight(&self) -> &Param {
        &self.weight
    }
}
