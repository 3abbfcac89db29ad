//! Launches gather, scatter and index operations. A bad index is reported by the next synchronization with the GPU.

use super::copy::by_size;
use super::kernel::MOST_BLOCKS;
use super::{argsort, kernel, layout};
use crate::ops::argsort::order::SortOrder;
use crate::{DType, Error, Result, Tensor};

/// Threads that add slices, one column each.
const COLUMNS: usize = 128;
/// Sorted positions that a block adds up. Longer runs of an index are sums of such sums: `CHUNK` of `index.cu`.
const CHUNK: usize = 32;

/// `y = x` at `index` along `dim`; `y` has the dims of `index`.
pub(crate) fn gather(x: &Tensor, dim: usize, index: &Tensor, y: &mut Tensor) -> Result<()> {
    let (n, size) = (index.numel(), x.dims()[dim]);
    if n == 0 {
        return Ok(());
    }
    expect_any("gather", size)?;
    let slice = slice(x, dim, index.dims())?;
    kernel(x.device(), "copy", by_size(x.dtype()), "gather")?
        .input(x)
        .indices(index)
        .output(y)
        .value(n as u64)
        .value(size as i64)
        .value(x.layout().strides()[dim] as i64)
        .bad_index("gather")
        .value(layout(index.dims(), &[&slice, index])?)
        .run_elements(n)
}

/// Adds the elements of `src` to `y` at `index`, which has the same dims, along `dim`, or replaces those of `y`. The
/// kernel named `op` decides.
pub(crate) fn scatter(
    op: &'static str,
    y: &mut Tensor,
    dim: usize,
    index: &Tensor,
    src: &Tensor,
) -> Result<()> {
    if index.numel() == 0 {
        return Ok(());
    }
    let size = y.dims()[dim];
    expect_any(op, size)?;
    // Contiguous, so that the reported offset of a bad index is its row-major position.
    let index = index.contiguous()?;
    let along = |x: &Tensor| x.layout().strides()[dim] as i64;
    let strides = [along(y), along(&index), along(src)];
    let (rows, layout) = {
        let slices = [&*y, &index, src].map(|x| slice(x, dim, index.dims()));
        let [to, at, from] = slices;
        let (to, at, from) = (to?, at?, from?);
        (to.numel(), layout(to.dims(), &[&to, &at, &from])?)
    };
    let device = index.device().clone();
    let kernel = kernel(&device, "index", y.dtype(), op)?
        .output(y)
        .indices(&index)
        .input(src)
        .value(rows as u64)
        .value(size as u64)
        .value(index.dims()[dim] as u64);
    strides
        .iter()
        .fold(kernel, |kernel, &stride| kernel.value(stride))
        .bad_index(op)
        .value(layout)
        .run_elements(rows * size)
}

/// `y` (outer, count, inner) = the slices of `x` (outer, size, inner) at `ids`; all contiguous.
/// `x` holds ids `offset..offset + size` of `global`; other ids give zeros.
pub(crate) fn select(
    op: &'static str,
    x: &Tensor,
    ids: &Tensor,
    y: &mut Tensor,
    [outer, size, inner]: [usize; 3],
    [offset, global]: [usize; 2],
) -> Result<()> {
    let count = ids.numel();
    let width = inner * x.dtype().size() / 16; // a thread loads 16 bytes
    let blocks = if inner == 0 { 0 } else { (outer * count).min(1 << 16) };
    kernel(x.device(), "copy", by_size(x.dtype()), "index_select")?
        .input(x)
        .indices(ids)
        .output(y)
        .value(outer as u64)
        .value(size as u64)
        .value(count as u64)
        .value(inner as u64)
        .value(offset as i64)
        .value(global as i64)
        .bad_index(op)
        .touches(2 * outer * count * inner * x.dtype().size())
        .run([blocks, 1, 1], [width.next_multiple_of(32).clamp(32, 256), 1, 1])
}

/// Adds the slices of `x` (outer, count, inner) to `y` (outer, size, inner) at `ids`, in the order of `ids`; all
/// contiguous. `y` holds ids `offset..offset + size` of `global`; other ids are ignored. Its dtype is that of `x` or
/// its accumulator type.
pub(crate) fn add(
    op: &'static str,
    x: &Tensor,
    ids: &Tensor,
    y: &mut Tensor,
    [outer, size, inner]: [usize; 3],
    [offset, global]: [usize; 2],
) -> Result<()> {
    let (device, count) = (x.device(), ids.numel());
    let mut keys = Tensor::empty(device, DType::I64, &[count])?;
    kernel(device, "sort", DType::I64, "local_ids")?
        .indices(ids)
        .output(&mut keys)
        .value(count as u64)
        .value(offset as i64)
        .value(size as i64)
        .value(global as i64)
        .bad_index(op)
        .run_elements(count)?;
    let order = argsort::first(&keys, SortOrder::Ascending, count)?;
    let (wide, chunks) = (y.dtype().size(), count.div_ceil(CHUNK));
    let mut partials = Tensor::empty(device, x.dtype().accumulator(), &[outer, chunks, inner])?;
    let names = match y.dtype() == x.dtype() {
        true => ["index_add", "index_add_long_runs"],
        false => ["index_add_wide", "index_add_wide_long_runs"],
    };
    let short = (names[0], count, outer * count * inner * (x.dtype().size() + 2 * wide));
    let sums = outer * chunks * inner * partials.dtype().size();
    let long = (chunks > 1).then(|| (names[1], chunks - 1, sums));
    for (name, positions, bytes) in [Some(short), long].into_iter().flatten() {
        kernel(device, "index", x.dtype(), name)?
            .input(x)
            .input(&keys)
            .input(&order)
            .output(y)
            .output(&mut partials)
            .value(outer as u64)
            .value(count as u64)
            .value(size as i64)
            .value(inner as u64)
            .touches(bytes)
            .run([positions, inner.div_ceil(COLUMNS), outer.min(MOST_BLOCKS)], [COLUMNS, 1, 1])?;
    }
    Ok(())
}

/// The first slice of `x` along `dim`, narrowed to `dims` along the other dims.
fn slice(x: &Tensor, dim: usize, dims: &[usize]) -> Result<Tensor> {
    let sizes = dims.iter().enumerate().map(|(d, &size)| if d == dim { 1 } else { size });
    sizes.enumerate().try_fold(x.clone(), |x, (d, size)| x.narrow(d as isize, 0, size))
}

/// Errors if the dim is empty, where every index is out of range.
fn expect_any(op: &'static str, size: usize) -> Result<()> {
    match size {
        0 => Err(Error::value(op, "there is nothing to index: the dim has size 0")),
        _ => Ok(()),
    }
}
