//! Launches the search for the first elements in order.

use super::kernel;
use crate::ops::argsort::order::SortOrder;
use crate::{Result, Tensor};

/// `indices` (.., k) = the places of the first k elements of the contiguous rows of `x` (.., width), in order.
pub(crate) fn first(
    op: &'static str,
    x: &Tensor,
    order: SortOrder,
    indices: &mut Tensor,
) -> Result<()> {
    let (n, width, k) = (x.numel(), x.dim(-1)?, indices.dim(-1)?);
    if !x.dtype().is_float() {
        let message = format!("takes floating-point tensors, got {}", x.dtype());
        return Err(crate::Error::dtype(op, message));
    }
    kernel(x.device(), "argsort", x.dtype(), "first_in_order")?
        .input(x)
        .output(indices)
        .value(n as u64)
        .value(width as u64)
        .value(k as u64)
        .value((order == SortOrder::Descending) as i32)
        .run_elements(n)
}
