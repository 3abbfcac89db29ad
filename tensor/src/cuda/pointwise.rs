//! Launches pointwise operations.

use super::copy::by_size;
use super::{kernel, layout};
use crate::ops::table::{Comparison, Unary};
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

/// `out = name(lhs, rhs)` for a contiguous `out`, to which the operands are broadcast. `name` is a row of the table,
/// or its derivative, which multiplies the old contents of `out`.
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

/// `dx = dx op'(saved)`, both contiguous.
pub(crate) fn unary_backward(op: Unary, p: f64, dx: &mut Tensor, saved: &Tensor) -> Result<()> {
    let (dtype, n) = (dx.dtype(), dx.numel());
    kernel(saved.device(), "pointwise", dtype, op.derivative_name())?
        .updated(dx)
        .input(saved)
        .value(n as u64)
        .value(p)
        .run_elements(n)
}

/// `x = op(x)` for a contiguous `x`.
pub(crate) fn in_place(op: Unary, p: f64, x: &mut Tensor) -> Result<()> {
    let (device, dtype, n) = (x.device().clone(), x.dtype(), x.numel());
    kernel(&device, "pointwise", dtype, op.name())?
        .input(x)
        .output(x)
        .value(n as u64)
        .value(p)
        .run_elements(n)
}

/// `x *= factor` for a contiguous `x` and a factor of one element in its accumulator type.
pub(crate) fn scale(x: &mut Tensor, factor: &Tensor) -> Result<()> {
    let (device, dtype, n) = (x.device().clone(), x.dtype(), x.numel());
    kernel(&device, "pointwise", dtype, "scale")?
        .updated(x)
        .input(factor)
        .value(n as u64)
        .run_elements(n)
}

/// `y += x` for a contiguous `x` of the same dims.
pub(crate) fn add_assign(y: &mut Tensor, x: &Tensor) -> Result<()> {
    let (layout, n) = (layout(y.dims(), &[y])?, x.numel());
    kernel(x.device(), "pointwise", x.dtype(), "add_assign")?
        .updated(y)
        .input(x)
        .value(n as u64)
        .value(layout)
        .run_elements(n)
}

/// `y`, contiguous u8, is 1 where the comparison holds, else 0; the operands are broadcast to it.
pub(crate) fn compare(
    comparison: Comparison,
    lhs: &Tensor,
    rhs: &Tensor,
    y: &mut Tensor,
) -> Result<()> {
    let (n, layout) = (y.numel(), layout(y.dims(), &[lhs, rhs])?);
    kernel(lhs.device(), "compare", lhs.dtype(), "compare")?
        .input(lhs)
        .input(rhs)
        .output(y)
        .value(n as u64)
        .value(comparison as i32)
        .value(layout)
        .run_elements(n)
}

/// `y`, contiguous, is `yes` where the u8 `condition` is not 0, else `no`; the operands are broadcast to it.
pub(crate) fn where_cond(
    condition: &Tensor,
    yes: &Tensor,
    no: &Tensor,
    y: &mut Tensor,
) -> Result<()> {
    let (n, layout) = (y.numel(), layout(y.dims(), &[condition, yes, no])?);
    kernel(yes.device(), "copy", by_size(yes.dtype()), "select")?
        .input(condition)
        .input(yes)
        .input(no)
        .output(y)
        .value(n as u64)
        .value(layout)
        .run_elements(n)
}
