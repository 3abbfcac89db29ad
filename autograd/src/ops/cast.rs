//! Gradient of a cast: the inverse cast.

use ferrotron_tensor::{DType, Result, Tensor};

use crate::engine::node::Named;
use crate::{InputGrads, Var, forward_span};

impl Var {
    /// Casts to another floating-point dtype.
    pub fn cast(&self, dtype: DType) -> Result<Var> {
        let _span = forward_span("cast");
        let original = self.dtype();
        Var::record(&[self], self.value().cast(dtype)?, || {
            Named("cast", move |dy: Tensor, dx: &mut InputGrads| {
                dx.accumulate(0, dy.cast(original)?)
            })
        })
    }
}
