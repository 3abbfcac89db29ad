//! Gradient of dropout: the same mask, recomputed from its key. No mask is saved.

use ferrotron_tensor::ops::dropout::dropout;
use ferrotron_tensor::{RandomKey, Result, ShardSpec, Tensor};

use crate::engine::node::Named;
use crate::{InputGrads, Var, forward_span};

impl Var {
    /// Zeros elements with probability `p` and scales the others by 1 / (1 - p): Srivastava et al. (2014). The mask
    /// is a function of `key` and the elements' `place` in the global tensor.
    pub fn dropout(&self, p: f64, key: &RandomKey, place: &ShardSpec) -> Result<Var> {
        if p == 0.0 {
            return Ok(self.clone());
        }
        let _span = forward_span("dropout");
        Var::record(&[self], dropout(self.value(), p, key, place)?, || {
            let (key, place) = (*key, place.clone());
            Named("dropout", move |dy: Tensor, dx: &mut InputGrads| {
                dx.accumulate(0, dropout(&dy, p, &key, &place)?)
            })
        })
    }
}
