//! Indexing: gather and scatter-add, index-select and index-add.
//!
//! - gather: y\[.., k, ..\] = x\[.., index\[.., k, ..\], ..\] along one dim.
//!   Gradient: dx = scatter_add(zeros, dim, index, dy); needs the index.
//! - scatter_add: y = base, then y\[.., index\[.., k, ..\], ..\] += src\[.., k, ..\].
//!   Gradient: dbase = dy, dsrc = gather(dy, dim, index); needs the index.
//! - scatter: like scatter_add, but replaces; of repeated indices the last one counts.
//!   Gradient: dbase = dy where nothing was written, dsrc = gather(dy, dim, index) where it was not overwritten.
//! - index_select: y\[.., k, ..\] = x\[.., ids\[k\], ..\], one list of ids for all rows.
//!   Gradient: dx = index_add(zeros, dim, ids, dy); needs the ids.
//! - index_add: y = base, then y\[.., ids\[k\], ..\] += source\[.., k, ..\].
//!   Gradient: dbase = dy, dsource = index_select(dy, dim, ids); needs the ids.
//!
//! Sums accumulate in `Element::Acc`, in the order of the index. Each element of the result belongs to one thread, so
//! the result does not depend on the number of threads.

use super::rows::{CHEAP, around, for_rows};
use crate::core::copy::into_unique;
use crate::core::tensor::{check_device, check_pair};
use crate::cuda;
use crate::gemm::Accum;
use crate::numeric::simd::vectorized;
use crate::{
    DType, Element, Error, Index, Real, Result, Tensor, dispatch_any, dispatch_float,
    dispatch_index,
};

/// The indices in row-major order with `dim` and the last dim exchanged, each below `size`.
///
/// Errors, with position and value, if an index is not below `size`. Those of a fake device have no values, and are all 0.
pub(crate) fn indices(
    op: &'static str,
    index: &Tensor,
    dim: usize,
    size: usize,
) -> Result<Vec<usize>> {
    if index.device().is_fake() {
        return Ok(vec![0; index.numel()]);
    }
    let moved =
        if index.rank() == 0 { index.clone() } else { index.transpose(dim as isize, -1)? };
    let dense = moved.contiguous()?;
    dispatch_index!(op, index.dtype(), I => {
        let check = |(at, id): (usize, &I)| {
            id.index().filter(|&i| i < size).ok_or_else(|| {
                let mut position = coordinates(moved.dims(), at);
                if let Some(last) = position.len().checked_sub(1) {
                    position.swap(dim, last);
                }
                Error::value(op, format!("index {id} at position {position:?} is not below {size}"))
            })
        };
        dense.as_slice::<I>()?.iter().enumerate().map(check).collect()
    })
}

/// The coordinates of the `flat`-th element.
fn coordinates(dims: &[usize], flat: usize) -> Vec<usize> {
    let mut rest = flat;
    let mut all: Vec<usize> = dims
        .iter()
        .rev()
        .map(|&size| {
            let coordinate = rest % size.max(1);
            rest /= size.max(1);
            coordinate
        })
        .collect();
    all.reverse();
    all
}

/// Elements of `x` along `dim` at `index`. The result has the dims of `index`, which has the rank of `x` and, except
/// along `dim`, no larger sizes.
///
/// ```
/// use ferrotron_tensor::{Device, Tensor, ops::index::gather};
/// let device = Device::cpu(1)?;
/// let logits = Tensor::from_slice(&device, &[1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0], &[2, 3])?;
/// let targets = Tensor::from_slice(&device, &[2_i64, 0], &[2, 1])?;
/// assert_eq!(gather(&logits, 1, &targets)?.to_vec::<f32>()?, [3.0, 4.0]);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub fn gather(x: &Tensor, dim: isize, index: &Tensor) -> Result<Tensor> {
    let resolved = x.resolve("gather", dim)?;
    check_fits("gather", x, resolved, index)?;
    if x.device().gpu().is_some() {
        let mut y = Tensor::empty(x.device(), x.dtype(), index.dims())?;
        cuda::index::gather(x, resolved, index, &mut y)?;
        return Ok(y);
    }
    let ids = indices("gather", index, resolved, x.dims()[resolved])?;
    let mut x = x.clone();
    for (d, &size) in index.dims().iter().enumerate() {
        if d != resolved {
            x = x.narrow(d as isize, 0, size)?;
        }
    }
    let x = x.transpose(resolved as isize, -1)?;
    let index = index.transpose(resolved as isize, -1)?;
    let width = index.dim(-1)?;
    let mut y = Tensor::empty(x.device(), x.dtype(), index.dims())?;
    dispatch_any!(x.dtype(), T => {
        let (_, stride) = x.layout().row();
        let source = x.buffer_slice::<T>()?;
        for_rows(x.device(), (y.as_mut_slice::<T>()?, width), ids.len(), |first, rows| {
            let ids = ids[first * width..].chunks_exact(width);
            for (i, (row, ids)) in rows.chunks_exact_mut(width).zip(ids).enumerate() {
                let start = x.layout().row_offset(first + i);
                for (y, id) in row.iter_mut().zip(ids) {
                    *y = source[start + id * stride];
                }
            }
        });
    });
    y.transpose(resolved as isize, -1)
}

/// Adds the elements of `src` to `base` along `dim` at `index`, which has the dims of `src`. The base is overwritten
/// if it has no other holder. Indices may repeat.
pub fn scatter_add(base: Tensor, dim: isize, index: &Tensor, src: &Tensor) -> Result<Tensor> {
    scatter_as("scatter_add", Accum::Add, base, dim, index, src)
}

/// Like [`scatter_add`], but replaces the elements of `base`. Of repeated indices the last one counts.
pub fn scatter(base: Tensor, dim: isize, index: &Tensor, src: &Tensor) -> Result<Tensor> {
    scatter_as("scatter", Accum::Replace, base, dim, index, src)
}

fn scatter_as(
    op: &'static str,
    accum: Accum,
    base: Tensor,
    dim: isize,
    index: &Tensor,
    src: &Tensor,
) -> Result<Tensor> {
    let resolved = base.resolve(op, dim)?;
    check_fits(op, &base, resolved, index)?;
    check_pair(op, &base, src)?;
    if src.dims() != index.dims() {
        return Err(Error::shape(op, format!("src is {:?}, index {:?}", src.dims(), index.dims())));
    }
    if base.device().gpu().is_some() {
        let mut y = into_unique(base)?;
        cuda::index::scatter(op, &mut y, resolved, index, src)?;
        return Ok(y);
    }
    let ids = indices(op, index, resolved, base.dims()[resolved])?;
    let last = resolved as isize;
    let moved = base.transpose(last, -1)?;
    drop(base);
    let mut y = into_unique(moved)?;
    let src = src.transpose(last, -1)?.contiguous()?;
    let (width, count) = (y.dim(-1)?, src.dim(-1)?);
    let dims = y.dims().to_vec();
    let device = y.device().clone();
    // The row of the index for a row of the base, if there is one.
    let outer = dims.len() - 1;
    let index_row = |row: usize| {
        let at = coordinates(&dims[..outer], row);
        let inside = at.iter().zip(src.dims()).all(|(c, size)| c < size);
        inside.then(|| at.iter().zip(src.dims()).fold(0, |row, (c, size)| row * size + c))
    };
    dispatch_float!(op, y.dtype(), T => {
        let (all, elements) = (y.numel(), src.as_slice::<T>()?);
        for_rows(&device, (y.as_mut_slice::<T>()?, width), all, |first, rows| {
            let mut sums = vec![<T as Element>::Acc::ZERO; width];
            for (i, row) in rows.chunks_exact_mut(width).enumerate() {
                let Some(from) = index_row(first + i) else { continue };
                sums.iter_mut().zip(row.iter()).for_each(|(sum, y)| *sum = y.acc());
                let range = from * count..(from + 1) * count;
                for (x, &id) in elements[range.clone()].iter().zip(&ids[range]) {
                    match accum {
                        Accum::Add => sums[id] += x.acc(),
                        Accum::Replace => sums[id] = x.acc(),
                    }
                }
                row.iter_mut().zip(&sums).for_each(|(y, &sum)| *y = T::from_acc(sum));
            }
        });
    });
    y.transpose(last, -1)
}

/// The slices of `x` along `dim` at `ids`, in the order of `ids`.
pub fn index_select(x: &Tensor, dim: isize, ids: &Tensor) -> Result<Tensor> {
    let resolved = x.resolve("index_select", dim)?;
    check_list("index_select", x, ids)?;
    let x = x.contiguous()?;
    let mut dims = x.dims().to_vec();
    dims[resolved] = ids.numel();
    let (outer, size, inner) = around(x.dims(), resolved);
    let mut y = Tensor::empty(x.device(), x.dtype(), &dims)?;
    if x.device().gpu().is_some() {
        let sizes = [outer, size, inner];
        cuda::index::select("index_select", &x, &ids.contiguous()?, &mut y, sizes, [0, size])?;
        return Ok(y);
    }
    let list = indices("index_select", ids, 0, size)?;
    dispatch_any!(x.dtype(), T => {
        let (work, source) = (y.numel() / CHEAP, x.as_slice::<T>()?);
        for_rows(x.device(), (y.as_mut_slice::<T>()?, inner), work, |first, rows| {
            for (i, row) in rows.chunks_exact_mut(inner).enumerate() {
                let (block, k) = ((first + i) / list.len(), (first + i) % list.len());
                row.copy_from_slice(&source[(block * size + list[k]) * inner..][..inner]);
            }
        });
    });
    Ok(y)
}

/// Adds the slices of `source` along `dim` to `base` at `ids`, in the order of `ids`. The base is overwritten if it has
/// no other holder. Ids may repeat.
pub fn index_add(base: Tensor, dim: isize, ids: &Tensor, source: &Tensor) -> Result<Tensor> {
    let resolved = base.resolve("index_add", dim)?;
    check_list("index_add", &base, ids)?;
    check_pair("index_add", &base, source)?;
    let mut dims = base.dims().to_vec();
    dims[resolved] = ids.numel();
    if source.dims() != dims {
        let message = format!(
            "{} ids along dim {dim} of {:?} need a source of {dims:?}, got {:?}",
            ids.numel(),
            base.dims(),
            source.dims()
        );
        return Err(Error::shape("index_add", message));
    }
    let source = source.contiguous()?;
    let (outer, size, inner) = around(base.dims(), resolved);
    let mut y = into_unique(base)?;
    if source.device().gpu().is_some() {
        let sizes = [outer, size, inner];
        cuda::index::add("index_add", &source, &ids.contiguous()?, &mut y, sizes, [0, size])?;
        return Ok(y);
    }
    let (count, device) = (ids.numel(), source.device());
    let groups = Groups::new(&indices("index_add", ids, 0, size)?, size);
    dispatch_float!("index_add", source.dtype(), T => {
        let source = source.as_slice::<T>()?;
        for_rows(device, (y.as_mut_slice::<T>()?, inner), source.len(), |first, rows| {
            for (i, row) in rows.chunks_exact_mut(inner).enumerate() {
                let (block, id) = ((first + i) / size, (first + i) % size);
                add_rows(row, &source[block * count * inner..], groups.positions(id));
            }
        });
    });
    Ok(y)
}

/// Rows of zeros with a 1 at each of these indices: (..) to (.., classes), in i64.
pub(crate) fn one_hot(ids: &Tensor, classes: usize) -> Result<Tensor> {
    // Selecting from no more than a vector checks the indices, on a GPU when the host waits for it.
    let list = ids.reshape(&[ids.numel()])?.contiguous()?;
    let checked = Tensor::zeros(ids.device(), DType::U8, &[classes, 1])?;
    if ids.device().gpu().is_some() {
        let mut seen = Tensor::empty(ids.device(), DType::U8, &[list.numel(), 1])?;
        cuda::index::select("one_hot", &checked, &list, &mut seen, [1, classes, 1], [0, classes])?;
    } else {
        indices("one_hot", &list, 0, classes)?;
    }
    let columns = Tensor::arange(ids.device(), DType::I64, 0.0, classes as f64, 1.0)?;
    ids.cast(DType::I64)?.unsqueeze(-1)?.eq(&columns)?.cast(DType::I64)
}

/// The positions of each id, ascending. Summing in this order makes scattered sums deterministic.
pub(crate) struct Groups {
    starts: Vec<usize>,
    positions: Vec<usize>,
}

impl Groups {
    /// Groups ids below `size` by a counting sort.
    pub(crate) fn new(ids: &[usize], size: usize) -> Groups {
        let mut starts = vec![0; size + 1];
        ids.iter().for_each(|&id| starts[id + 1] += 1);
        for id in 0..size {
            starts[id + 1] += starts[id];
        }
        let mut next = starts.clone();
        let mut positions = vec![0; ids.len()];
        for (position, &id) in ids.iter().enumerate() {
            positions[next[id]] = position;
            next[id] += 1;
        }
        Groups { starts, positions }
    }

    /// The positions of `id`.
    pub(crate) fn positions(&self, id: usize) -> &[usize] {
        &self.positions[self.starts[id]..self.starts[id + 1]]
    }

    /// Number of positions whose id is below `id`.
    pub(crate) fn before(&self, id: usize) -> usize {
        self.starts[id]
    }
}

vectorized! {
    /// Adds the rows of `source` at `positions` to `row`, in order.
    pub(crate) fn add_rows<T: Element, S: Element<Acc = T::Acc>>(row: &mut [T], source: &[S], positions: &[usize]) {
        const STRIPE: usize = 512;
        if positions.is_empty() {
            return;
        }
        let width = row.len();
        let mut sums = [T::Acc::ZERO; STRIPE];
        for (i, stripe) in row.chunks_mut(STRIPE).enumerate() {
            let sums = &mut sums[..stripe.len()];
            sums.iter_mut().zip(stripe.iter()).for_each(|(sum, y)| *sum = y.acc());
            for position in positions {
                let from = &source[position * width + i * STRIPE..][..sums.len()];
                sums.iter_mut().zip(from).for_each(|(sum, x)| *sum += x.acc());
            }
            stripe.iter_mut().zip(sums).for_each(|(y, sum)| *y = T::from_acc(*sum));
        }
    }
}

/// Errors unless `index` can index `x` along `dim`.
fn check_fits(op: &'static str, x: &Tensor, dim: usize, index: &Tensor) -> Result<()> {
    check_device(op, x, index)?;
    let sizes = || x.dims().iter().zip(index.dims()).enumerate();
    if x.rank() != index.rank() || sizes().any(|(d, (x, i))| d != dim && i > x) {
        let message = format!("index {:?} does not fit {:?} along {dim}", index.dims(), x.dims());
        return Err(Error::shape(op, message));
    }
    Ok(())
}

fn check_list(op: &'static str, x: &Tensor, ids: &Tensor) -> Result<()> {
    check_device(op, x, ids)?;
    if ids.rank() != 1 {
        return Err(Error::shape(op, format!("ids are a list, got {:?}", ids.dims())));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
