//! Launches gated linear units.

use super::kernel::{kernel, rows};
use crate::{Result, Tensor};

/// `y` (.., F) of `x` (.., 2F), both contiguous; `op` names the kernel.
pub(crate) fn forward(op: &'static str, x: &Tensor, y: &mut Tensor) -> Result<()> {
    let (rows, width) = rows(y);
    kernel(x.device(), "glu", x.dtype(), op)?
        .input(x)
        .output(y)
        .value(rows as u64)
        .value(width as u64)
        .run_rows(rows, width)
}

/// Overwrites the contiguous `x` (.., 2F) with dx; `op` names the kernel of the gradient.
pub(crate) fn backward(op: &'static str, x: &mut Tensor, dy: &Tensor) -> Result<()> {
    let (rows, width) = rows(dy);
    let dtype = x.dtype();
    kernel(dy.device(), "glu", dtype, op)?
        .updated(x)
        .input(dy)
        .value(rows as u64)
        .value(width as u64)
        .run_rows(rows, width)
}
