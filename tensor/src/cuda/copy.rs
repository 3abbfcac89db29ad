//! Copies between views.

use super::{kernel, layout};
use crate::tensor::check_device;
use crate::{DType, Error, Result, Tensor};

/// The side of a tile of the transposing kernel.
const TILE: usize = 32;

/// `out = x` for views of equal dims and dtype.
pub(crate) fn copy(x: &Tensor, out: &mut Tensor) -> Result<()> {
    let dtype = by_size(x.dtype());
    if x.is_contiguous() && out.is_contiguous() {
        return copy_bytes(x, out);
    }
    if out.is_contiguous()
        && let Some([batch, rows, columns, batch_stride, row_stride]) = transposed(x)
    {
        return kernel(x.device(), "copy", dtype, "transpose")?
            .input(x)
            .output(out)
            .value(rows as u64)
            .value(columns as u64)
            .value(batch_stride as i64)
            .value(row_stride as i64)
            .run([columns.div_ceil(TILE), rows.div_ceil(TILE), batch], [TILE, 8, 1]);
    }
    let layout = layout(x.dims(), &[x, out])?;
    let n = x.numel();
    kernel(x.device(), "copy", dtype, "copy")?
        .input(x)
        .output(out)
        .value(n as u64)
        .value(layout)
        .run_elements(n)
}

/// `out = x` for contiguous tensors: the GPU's copy engine does it, also from and to memory of the host.
fn copy_bytes(x: &Tensor, out: &mut Tensor) -> Result<()> {
    check_device("copy", x, out)?;
    if !out.is_unique() {
        return Err(Error::memory("copy", format!("{out:?} has other holders")));
    }
    let Some(gpu) = x.device().gpu() else { return Ok(()) };
    let len = x.numel() * x.dtype().size();
    // SAFETY: a contiguous view's bytes are within its buffer; that of `out` is nobody else's, so it is not that of `x`.
    // Both are used in the order of this stream.
    unsafe { gpu.compute().copy(out.address(), x.address(), len) }.map_err(Error::of_gpu)
}

/// Sets every element of a unique, contiguous tensor to zero.
pub(crate) fn fill_zero(x: &mut Tensor) -> Result<()> {
    if !x.is_contiguous() || !x.is_unique() {
        let message = format!("{x:?} must be contiguous and have a single holder");
        return Err(Error::memory("fill_zero", message));
    }
    let Some(gpu) = x.device().gpu() else { return Ok(()) };
    // SAFETY: a contiguous view's bytes are within its buffer, which nobody else holds.
    unsafe { gpu.compute().fill_zero(x.address(), x.numel() * x.dtype().size()) }
        .map_err(Error::of_gpu)
}

/// Batch, rows and columns of the dense matrices whose transposes `x` shows, and the strides of batch and rows; nothing
/// if it shows something else.
fn transposed(x: &Tensor) -> Option<[usize; 5]> {
    let (dims, strides) = (x.dims(), x.layout().strides());
    let &[ref outer @ .., columns, rows] = dims else { return None };
    let &[ref steps @ .., column_stride, row_stride] = strides else { return None };
    // One dim of batch at most: others would have to be joined.
    let (batch, batch_stride) = match (outer, steps) {
        ([], []) => (1, 0),
        (&[batch], &[stride]) => (batch, stride),
        _ => return None,
    };
    let fits = batch < 1 << 16 && rows < TILE << 16;
    let fits = fits && column_stride == 1 && row_stride > 1 && columns > 1 && rows > 1;
    fits.then_some([batch, rows, columns, batch_stride, row_stride])
}

/// The dtype for which the kernels that only move elements are compiled.
pub(super) fn by_size(dtype: DType) -> DType {
    match dtype.size() {
        1 => DType::U8,
        2 => DType::BF16,
        4 => DType::U32,
        _ => DType::I64,
    }
}
