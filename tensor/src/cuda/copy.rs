//! Launches copies between views.

use ferrotron_cuda::arguments::Layout;

use super::kernel;
use super::launched::{Products, host_copy_launched, launched};
use crate::core::tensor::check_device;
use crate::{DType, Error, Result, Tensor};

/// Tile size of the transpose kernel, in rows and columns.
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
    let units = units(x, out);
    let layout = layout_of_units(units, x, out)?;
    let n = x.numel() / units;
    kernel(x.device(), "copy", dtype_with_size(units * x.dtype().size()), "copy")?
        .input(x)
        .output(out)
        .value(n as u64)
        .value(layout)
        .run_elements(n)
}

/// Number of adjacent elements that can be copied as one unit of up to 8 bytes.
fn units(x: &Tensor, out: &Tensor) -> usize {
    let size = x.dtype().size();
    let fits = |units: usize| {
        [x, out].iter().all(|view| {
            let steps = view.dims().iter().zip(view.layout().strides());
            let mut long = steps.filter(|(size, _)| **size != 1).rev();
            let dense = long.next().is_some_and(|(size, step)| *step == 1 && size % units == 0);
            let whole = long.all(|(_, step)| step % units == 0);
            dense && whole && view.address() % (units * size) as u64 == 0
        })
    };
    [8 / size, 4 / size, 2 / size].into_iter().find(|&units| units > 1 && fits(units)).unwrap_or(1)
}

/// The layout of two views of equal dims, in units of `units` adjacent elements.
fn layout_of_units(units: usize, x: &Tensor, out: &Tensor) -> Result<Layout> {
    let mut dims = x.dims().to_vec();
    let strides = [x, out].map(|view| {
        let steps = view.layout().strides().iter().map(|&step| step.div_ceil(units) as isize);
        steps.collect::<Vec<_>>()
    });
    // The innermost dim longer than 1 is dense and keeps stride 1.
    if let Some(size) = dims.iter_mut().rev().find(|size| **size != 1) {
        *size /= units;
    }
    Layout::new(&dims, &[&strides[0], &strides[1]]).map_err(Error::from_gpu)
}

/// `out = x` for contiguous tensors, by the GPU's copy engine. Either may be in pinned host memory.
fn copy_bytes(x: &Tensor, out: &mut Tensor) -> Result<()> {
    check_device("copy", x, out)?;
    if !out.is_unique() {
        return Err(Error::memory("copy", format!("{out:?} has other holders")));
    }
    let Some(gpu) = x.device().gpu() else { return Ok(()) };
    let len = x.numel() * x.dtype().size();
    match x.is_offloaded() == out.is_offloaded() {
        true => launched("copy", x.dtype(), 2 * len, Products::default()),
        false => host_copy_launched(len),
    }
    // SAFETY: a contiguous view's bytes are within its buffer. `out` has no other holder, so its buffer is not that
    // of `x`. Both are used in the order of this stream.
    unsafe { gpu.compute().copy(out.address(), x.address(), len) }.map_err(Error::from_gpu)
}

/// Zero-fills a unique, contiguous tensor.
pub(crate) fn zero_fill(x: &mut Tensor) -> Result<()> {
    if !x.is_contiguous() || !x.is_unique() {
        let message = format!("{x:?} must be contiguous and have a single holder");
        return Err(Error::memory("zero_fill", message));
    }
    let Some(gpu) = x.device().gpu() else { return Ok(()) };
    let len = x.numel() * x.dtype().size();
    launched("zero_fill", x.dtype(), len, Products::default());
    // SAFETY: a contiguous view's bytes are within its buffer, which has no other holder.
    unsafe { gpu.compute().zero_fill(x.address(), len) }.map_err(Error::from_gpu)
}

/// Batch, rows and columns of the dense matrices whose transpose is `x`, and the strides of batch and rows.
/// `None` if `x` is not a transpose.
fn transposed(x: &Tensor) -> Option<[usize; 5]> {
    let (dims, strides) = (x.dims(), x.layout().strides());
    let &[ref outer @ .., columns, rows] = dims else { return None };
    let &[ref steps @ .., column_stride, row_stride] = strides else { return None };
    // At most one batch dim: several would have to be merged.
    let (batch, batch_stride) = match (outer, steps) {
        ([], []) => (1, 0),
        (&[batch], &[stride]) => (batch, stride),
        _ => return None,
    };
    let fits = batch < 1 << 16 && rows.div_ceil(TILE) < 1 << 16;
    let fits = fits && column_stride == 1 && row_stride > 1 && columns > 1 && rows > 1;
    fits.then_some([batch, rows, columns, batch_stride, row_stride])
}

/// The dtype of the same size for which the copy kernels are compiled.
pub(super) fn by_size(dtype: DType) -> DType {
    dtype_with_size(dtype.size())
}

fn dtype_with_size(size: usize) -> DType {
    match size {
        1 => DType::U8,
        2 => DType::BF16,
        4 => DType::U32,
        _ => DType::I64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Device;

    #[test]
    fn a_transpose_has_no_more_tiles_than_a_grid_takes() {
        let device = Device::fake(1).unwrap();
        let most = TILE * 65_535;
        for (rows, fits) in [(most, true), (most + 1, false)] {
            let x = Tensor::zeros(&device, DType::U8, &[rows, 2]).unwrap().transpose(0, 1).unwrap();
            assert_eq!(transposed(&x).is_some(), fits, "{rows} rows");
        }
    }
}
