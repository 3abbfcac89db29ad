//! Launches sums of squares and tests for finite elements.

use super::kernel;
use crate::{DType, Result, Tensor};

/// Threads of a block.
const THREADS: usize = 256;
/// Elements per block, for fewer than [`BLOCKS`] blocks. Both constants determine the order of additions.
const ELEMENTS: usize = 16 * THREADS;
const BLOCKS: usize = 1024;

/// Adds the sum of squares of a contiguous `x` to `total`.
pub(crate) fn add_sq_norm(total: &mut Tensor, x: &Tensor) -> Result<()> {
    let (device, n) = (x.device(), x.numel());
    let blocks = n.div_ceil(ELEMENTS).min(BLOCKS);
    let mut partials = Tensor::empty(device, DType::F64, &[blocks])?;
    kernel(device, "sq_norm", x.dtype(), "sq_norm_partials")?
        .input(x)
        .output(&mut partials)
        .value(n as u64)
        .run([blocks, 1, 1], [THREADS, 1, 1])?;
    add_up(total, &partials)
}

/// Adds all of `partials` to `total`.
pub(crate) fn add_up(total: &mut Tensor, partials: &Tensor) -> Result<()> {
    kernel(partials.device(), "sq_norm", DType::F64, "sq_norm_finish")?
        .input(partials)
        .output(total)
        .value(partials.numel() as u64)
        .run([1, 1, 1], [THREADS, 1, 1])
}

/// Returns whether all elements of a contiguous `x` are finite. Synchronizes with the GPU.
pub(crate) fn all_finite(x: &Tensor) -> Result<bool> {
    let n = x.numel();
    x.device().expect_no_capture("all_finite")?;
    let mut found = Tensor::zeros(x.device(), DType::I64, &[1])?;
    kernel(x.device(), "sq_norm", x.dtype(), "find_not_finite")?
        .input(x)
        .output(&mut found)
        .value(n as u64)
        .run_elements(n)?;
    Ok(found.to_vec::<i64>()? == [0])
}
