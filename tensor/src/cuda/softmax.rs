//! Softmax and log-softmax.

use super::kernel;
use crate::{Result, Tensor};

/// `y` = the softmax or, as `op` says, its logarithm of the rows of `x`; both dense.
pub(crate) fn forward(op: &'static str, x: &Tensor, y: &mut Tensor) -> Result<()> {
    let (rows, width) = rows(x);
    kernel(x.device(), "softmax", x.dtype(), op)?
        .input(x)
        .output(y)
        .value(rows as u64)
        .value(width as u64)
        .run_rows(rows, width)
}

/// Overwrites the dense `dy` with dx, of the operation that `op` is the gradient of.
pub(crate) fn backward(op: &'static str, y: &Tensor, dy: &mut Tensor) -> Result<()> {
    let (rows, width) = rows(y);
    kernel(y.device(), "softmax", y.dtype(), op)?
        .input(y)
        .output(dy)
        .value(rows as u64)
        .value(width as u64)
        .run_rows(rows, width)
}

fn rows(x: &Tensor) -> (usize, usize) {
    let width = x.dims().last().copied().unwrap_or(1);
    (x.numel().checked_div(width).unwrap_or(0), width)
}
