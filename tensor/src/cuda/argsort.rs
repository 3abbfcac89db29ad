//! Launches the sort of the places of elements.

use super::kernel;
use crate::ops::argsort::order::SortOrder;
use crate::{DType, Result, Tensor};

/// Elements of a run that a block sorts.
const RUN: usize = 256;

/// The places of the first k elements (.., k) of the contiguous rows of `x` (.., width), in order.
pub(crate) fn first(x: &Tensor, order: SortOrder, k: usize) -> Result<Tensor> {
    let (n, width, device) = (x.numel(), x.dim(-1)?, x.device());
    let descending = (order == SortOrder::Descending) as i32;
    let mut places = Tensor::empty(device, DType::I64, x.dims())?;
    let runs = width.div_ceil(RUN);
    kernel(device, "argsort", x.dtype(), "sort_runs")?
        .input(x)
        .output(&mut places)
        .value(width as u64)
        .value(runs as u64)
        .value(descending)
        .run([if n == 0 { 0 } else { n / width * runs }, 1, 1], [RUN, 1, 1])?;
    let mut run = RUN;
    while run < width {
        let mut merged = Tensor::empty(device, DType::I64, x.dims())?;
        kernel(device, "argsort", x.dtype(), "merge_runs")?
            .input(x)
            .input(&places)
            .output(&mut merged)
            .value(n as u64)
            .value(width as u64)
            .value(run as u64)
            .value(descending)
            .run_elements(n)?;
        (places, run) = (merged, 2 * run);
    }
    places.narrow(-1, 0, k)?.contiguous()
}
