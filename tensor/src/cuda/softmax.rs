//! Launches softmax and log-softmax.

use super::kernel::{kernel, rows};
use crate::{Result, Tensor};

/// `y` = softmax or log-softmax of the rows of `x`, selected by `op`; both contiguous.
pub(crate) fn forward(op: &'static str, x: &Tensor, y: &mut Tensor) -> Result<()> {
    let (rows, width) = rows(x);
    kernel(x.device(), "softmax", x.dtype(), op)?
        .input(x)
        .output(y)
        .value(rows as u64)
        .value(width as u64)
        .run_rows(rows, width)
}

/// Overwrites the contiguous `dy` with dx; `op` names the gradient kernel.
pub(crate) fn backward(op: &'static str, y: &Tensor, dy: &mut Tensor) -> Result<()> {
    let (rows, width) = rows(y);
    kernel(y.device(), "softmax", y.dtype(), op)?
        .input(y)
        .updated(dy)
        .value(rows as u64)
        .value(width as u64)
        .run_rows(rows, width)
}
