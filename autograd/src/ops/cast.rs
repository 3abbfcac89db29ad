//! Gradient of a cast: the inverse cast.

use ferrotron_tensor::{DType, Result, Tensor};

use crate::engine::node::Named;
use crate::{InputGrads, Var, forward_span};

/// Casts to another dtype.
pub(crate) fn cast(x: &Var, dtype: DType) -> Result<Var> {
    let _span = forward_span("cast");
    let original = x.dtype();
    Var::record(&[x], x.value().cast(dtype)?, || {
        Named("cast", move |dy: Tensor, dx: &mut InputGrads| dx.accumulate(0, dy.cast(original)?))
    })
}
