//! Gradient of a cast between floats: the inverse cast. Any other cast has none.

use ferrotron_tensor::{DType, Result, Tensor};

use crate::engine::node::Named;
use crate::{InputGrads, Var, forward_span};

/// Casts to another dtype.
pub(crate) fn cast(x: &Var, dtype: DType) -> Result<Var> {
    if x.dtype() == dtype {
        return Ok(x.clone());
    }
    let _span = forward_span("cast");
    let (original, value) = (x.dtype(), x.value().cast(dtype)?);
    if !(original.is_float() && dtype.is_float()) {
        return Ok(Var::constant(value));
    }
    Var::record(&[x], value, || {
        Named("cast", move |dy: Tensor, dx: &mut InputGrads| dx.accumulate(0, dy.cast(original)?))
    })
}
