//! Pointwise operations.

use super::{kernel, layout};
use crate::ops::table::Unary;
use crate::{Result, Tensor};

/// `out = op(x)`, both contiguous.
pub(crate) fn unary(op: Unary, p: f64, x: &Tensor, out: &mut Tensor) -> Result<()> {
    let n = x.numel();
    kernel(x.device(), "pointwise", x.dtype(), op.name())?
        .input(x)
        .output(out)
        .value(n as u64)
        .value(p)
        .run_elements(n)
}

/// `out = name(lhs, rhs)` for a contiguous `out`, to which the others are broadcast: a row of the table, or its
/// derivative times what `out` held.
pub(crate) fn binary(
    name: &'static str,
    lhs: &Tensor,
    rhs: &Tensor,
    out: &mut Tensor,
) -> Result<()> {
    let (n, layout) = (out.numel(), layout(out.dims(), &[lhs, rhs])?);
    kernel(lhs.device(), "pointwise", lhs.dtype(), name)?
        .input(lhs)
        .input(rhs)
        .output(out)
        .value(n as u64)
        .value(layout)
        .run_elements(n)
}
