//! Reductions over any dims: sum, mean, max, arg-max and log-sum-exp, and `sum_to_size`, the adjoint of a broadcast.
//!
//! - sum: y = sum_i x_i. Gradient: dy broadcast; needs only the dims. An empty sum is 0.
//! - mean: y = sum_i x_i / n. Gradient: dy / n broadcast. An empty mean is NaN (0 / 0).
//! - amax: y = max_i x_i. Gradient: dy where x = y; needs x and y. An empty maximum is an error; NaN wins.
//! - log_sum_exp: y = m + ln sum_i e^(x_i - m), m = max_i x_i. Gradient: dy e^(x_i - y); needs x and y.
//!
//! Accumulates in `Element::Acc` within fixed blocks (32 lanes of 4096 row elements, or 128 elements of a column),
//! then combines the blocks in f64 in order. The result does not depend on the number of threads.

use super::cast::cast;
use super::rows::{CHEAP, around, for_rows};
use crate::cuda::reduce::Operand;
use crate::kernel_span::kernel_span;
use crate::numeric::simd::vectorized;
use crate::{DType, Dims, Element, Error, Real, Result, Scalar, Tensor, dispatch_float};
use smallvec::SmallVec;

/// Whether a reduced dim is kept with size 1 or dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeepDims {
    /// Reduced dims have size 1 in the result.
    Keep,
    /// Reduced dims are removed from the result.
    Drop,
}

const LANES: usize = 32;
const ROW_BLOCK: usize = 4096;
/// 768 rows, a batch of the character model, make an even number: each of two threads sums its own tokens.
const COLUMN_BLOCK: usize = 128;

/// A reduction: `step` adds an element to an accumulator, `join` combines two accumulators.
trait Fold {
    const START: f64;
    const PER_NANOSECOND: usize = CHEAP;
    fn step<A: Real>(acc: A, x: A, shift: A) -> A;
    fn join<A: Real>(acc: A, other: A) -> A;
}

struct Sum;
impl Fold for Sum {
    const START: f64 = 0.0;
    #[inline(always)]
    fn step<A: Real>(acc: A, x: A, _: A) -> A {
        acc + x
    }
    #[inline(always)]
    fn join<A: Real>(acc: A, other: A) -> A {
        acc + other
    }
}

struct Max;
impl Fold for Max {
    const START: f64 = f64::NEG_INFINITY;
    #[inline(always)]
    #[allow(clippy::eq_op)]
    fn step<A: Real>(acc: A, x: A, _: A) -> A {
        if x > acc || x != x { x } else { acc }
    }
    #[inline(always)]
    fn join<A: Real>(acc: A, other: A) -> A {
        Self::step(acc, other, other)
    }
}

/// Sum of e^(x - shift).
struct SumExp;
impl Fold for SumExp {
    const START: f64 = 0.0;
    const PER_NANOSECOND: usize = 1;
    #[inline(always)]
    fn step<A: Real>(acc: A, x: A, shift: A) -> A {
        acc + (x - shift).exp()
    }
    #[inline(always)]
    fn join<A: Real>(acc: A, other: A) -> A {
        acc + other
    }
}

vectorized! {
    /// Reduces consecutive elements to one value.
    fn fold_row<F: Fold, T: Element>(x: &[T], shift: T::Acc) -> T::Acc {
        if x.len() < LANES {
            return x.iter().fold(T::Acc::from_f64(F::START), |acc, x| F::step(acc, x.acc(), shift));
        }
        let mut lanes = [T::Acc::from_f64(F::START); LANES];
        let chunks = x.chunks_exact(LANES);
        let rest = chunks.remainder();
        for chunk in chunks {
            for (lane, x) in lanes.iter_mut().zip(chunk) {
                *lane = F::step(*lane, x.acc(), shift);
            }
        }
        for (lane, x) in lanes.iter_mut().zip(rest) {
            *lane = F::step(*lane, x.acc(), shift);
        }
        lanes.into_iter().fold(T::Acc::from_f64(F::START), F::join)
    }

    /// Reduces each column of consecutive rows to one value.
    fn fold_columns<F: Fold, T: Element>(x: &[T], out: &mut [T::Acc]) {
        let width = out.len();
        let zero = T::Acc::ZERO;
        out.fill(T::Acc::from_f64(F::START));
        let fours = x.chunks_exact(4 * width);
        let rest = fours.remainder();
        for four in fours {
            let (a, b) = four.split_at(2 * width);
            let ((a, b), (c, d)) = (a.split_at(width), b.split_at(width));
            for ((((out, a), b), c), d) in out.iter_mut().zip(a).zip(b).zip(c).zip(d) {
                let ab = F::step(F::step(*out, a.acc(), zero), b.acc(), zero);
                *out = F::step(F::step(ab, c.acc(), zero), d.acc(), zero);
            }
        }
        for row in rest.chunks_exact(width) {
            for (out, x) in out.iter_mut().zip(row) {
                *out = F::step(*out, x.acc(), zero);
            }
        }
    }

    /// Joins the values of blocks, rows of `width`, for the columns from `column` on: in f64, in order. Divides them by `n`.
    fn join_columns<F: Fold, T: Element>(values: &[T::Acc], width: usize, column: usize, n: T::Acc, out: &mut [T]) {
        for (i, out) in out.chunks_mut(LANES).enumerate() {
            let columns = column + i * LANES..column + i * LANES + out.len();
            let mut lanes = [F::START; LANES];
            for row in values.chunks_exact(width) {
                for (lane, x) in lanes.iter_mut().zip(&row[columns.clone()]) {
                    *lane = F::join(*lane, x.f64());
                }
            }
            for (y, lane) in out.iter_mut().zip(lanes) {
                *y = T::from_acc(T::Acc::from_f64(lane) / n);
            }
        }
    }
}

/// A contiguous tensor as (outer, reduced, inner); the middle dim is reduced.
struct ReduceView {
    x: Tensor,
    outer: usize,
    reduced: usize,
    inner: usize,
    /// The dims of the result with and without the reduced ones.
    keep: Dims,
    drop: Dims,
}

impl ReduceView {
    /// A result of `dtype` that `f` fills on a GPU; `None` on other devices.
    fn on_gpu(
        &self,
        dtype: DType,
        keep: KeepDims,
        f: impl FnOnce(Operand, &mut Tensor) -> Result<()>,
    ) -> Result<Option<Tensor>> {
        if self.x.device().gpu().is_none() {
            return Ok(None);
        }
        let mut out = Tensor::empty(self.x.device(), dtype, self.dims(keep))?;
        let ReduceView { x, outer, reduced, inner, .. } = self;
        f(Operand { x, outer: *outer, reduced: *reduced, inner: *inner }, &mut out)?;
        Ok(Some(out))
    }

    fn dims(&self, keep: KeepDims) -> &[usize] {
        if keep == KeepDims::Keep { &self.keep } else { &self.drop }
    }
}

/// A flag per dim: whether it is reduced. Errors if a dim is out of range or repeated.
fn chosen(op: &'static str, x: &Tensor, dims: &[isize]) -> Result<SmallVec<[bool; 8]>> {
    let mut goes = SmallVec::from_elem(false, x.rank());
    for &dim in dims {
        if std::mem::replace(&mut goes[x.resolve(op, dim)?], true) {
            return Err(Error::shape(op, format!("dim {dim} is given twice in {dims:?}")));
        }
    }
    Ok(goes)
}

/// Permutes `x` to a form that the kernels read; `rows` requires inner = 1.
fn view(x: &Tensor, goes: &[bool], rows: bool) -> Result<ReduceView> {
    let dims = x.dims();
    let (kept, reduced): (Dims, Dims) = (0..x.rank()).partition(|&d| !goes[d]);
    let size = |set: &[usize]| set.iter().map(|&d| dims[d]).product::<usize>();
    let made = |x: Tensor, outer, inner| ReduceView {
        x,
        outer,
        inner,
        reduced: size(&reduced),
        keep: (0..dims.len()).map(|d| if goes[d] { 1 } else { dims[d] }).collect(),
        drop: kept.iter().map(|&d| dims[d]).collect(),
    };
    let order = |first: &[usize], last: &[usize]| {
        x.permute(&first.iter().chain(last).copied().collect::<Dims>())
    };
    let kept_first = order(&kept, &reduced)?;
    if kept_first.is_contiguous() {
        return Ok(made(kept_first, size(&kept), 1));
    }
    if !rows {
        let reduced_first = order(&reduced, &kept)?;
        if reduced_first.is_contiguous() {
            return Ok(made(reduced_first, 1, size(&kept)));
        }
        let long: Dims = reduced.iter().copied().filter(|&d| dims[d] != 1).collect();
        if let (Some(&first), Some(&last)) = (long.first(), long.last())
            && (first..=last).all(|d| goes[d] || dims[d] == 1)
        {
            let (outer, inner) = (around(dims, first).0, around(dims, last).2);
            return Ok(made(x.contiguous()?, outer, inner));
        }
    }
    Ok(made(kept_first.contiguous()?, size(&kept), 1))
}

/// The reduced values of each block (outer, blocks, inner) in the accumulator dtype. `shift` has one value per row.
fn fold<F: Fold, T: Element>(view: &ReduceView, shift: Option<&[T::Acc]>) -> Result<Tensor> {
    let ReduceView { x, outer, reduced, inner, .. } = view;
    let (outer, reduced, inner) = (*outer, *reduced, *inner);
    let block = if inner == 1 { ROW_BLOCK } else { COLUMN_BLOCK };
    let blocks = reduced.div_ceil(block).max(1);
    let acc = T::Acc::DTYPE;
    let mut partial = Tensor::empty(x.device(), acc, &[outer, blocks, inner])?;
    let _span = kernel_span!("reduce", x.dtype(), 0, [x] => [&partial]);
    let elements = x.as_slice::<T>()?;
    let out = partial.as_mut_slice::<T::Acc>()?;
    let work = elements.len() / F::PER_NANOSECOND;
    for_rows(x.device(), (out, inner), work, |first, rows| {
        for (i, row) in rows.chunks_exact_mut(inner).enumerate() {
            let (at, block_at) = ((first + i) / blocks, (first + i) % blocks * block);
            let end = reduced.min(block_at + block);
            let x = &elements[(at * reduced + block_at) * inner..(at * reduced + end) * inner];
            match row {
                [one] => {
                    let shift = shift.map_or(T::Acc::ZERO, |shift| shift[at]);
                    *one = fold_row::<F, T>(x, shift);
                }
                row => fold_columns::<F, T>(x, row),
            }
        }
    });
    Ok(partial)
}

/// Joins the values of the blocks, divides them by `n`, and returns them in dtype T with the given dims.
fn join<F: Fold, T: Element>(parts: Tensor, dims: &[usize], n: T::Acc) -> Result<Tensor> {
    let &[_, blocks, inner] = parts.dims() else { unreachable!("parts have three dims") };
    if blocks == 1 && T::DTYPE == T::Acc::DTYPE && n == T::Acc::ONE {
        return parts.reshape(dims);
    }
    let mut out = Tensor::empty(parts.device(), T::DTYPE, dims)?;
    let values = parts.as_slice::<T::Acc>()?;
    // The values of one block are a single row of columns.
    let inner = if blocks == 1 { values.len() } else { inner };
    for_rows(parts.device(), (out.as_mut_slice::<T>()?, 1), values.len() / CHEAP, |first, out| {
        let (mut first, mut rest) = (first, out);
        while !rest.is_empty() {
            let (at, column) = (first / inner, first % inner);
            let (out, later) = rest.split_at_mut(rest.len().min(inner - column));
            first += out.len();
            let values = &values[at * blocks * inner..][..blocks * inner];
            join_columns::<F, T>(values, inner, column, n, out);
            rest = later;
        }
    });
    Ok(out)
}

/// Sum over `dims`.
///
/// ```
/// use ferrotron_tensor::{Device, Tensor, ops::reduce::{KeepDims, sum}};
/// let x = Tensor::from_slice(&Device::cpu(1)?, &[1.0_f32, 2.0, 3.0, 4.0], &[2, 2])?;
/// assert_eq!(sum(&x, &[-1], KeepDims::Drop)?.to_vec::<f32>()?, [3.0, 7.0]);
/// assert_eq!(sum(&x, &[0], KeepDims::Keep)?.dims(), [1, 2]);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub fn sum(x: &Tensor, dims: &[isize], keep: KeepDims) -> Result<Tensor> {
    let view = view(x, &chosen("sum", x, dims)?, false)?;
    if let Some(y) = view.on_gpu(x.dtype(), keep, |x, y| x.sum(1.0, y))? {
        return Ok(y);
    }
    dispatch_float!("sum", x.dtype(), T => {
        join::<Sum, T>(fold::<Sum, T>(&view, None)?, view.dims(keep), Real::ONE)
    })
}

/// Sum of all elements, as a tensor without dims.
pub fn sum_all(x: &Tensor) -> Result<Tensor> {
    let dims: Vec<isize> = (0..x.rank() as isize).collect();
    sum(x, &dims, KeepDims::Drop)
}

/// Mean over `dims`.
pub fn mean(x: &Tensor, dims: &[isize], keep: KeepDims) -> Result<Tensor> {
    let view = view(x, &chosen("mean", x, dims)?, false)?;
    if let Some(y) = view.on_gpu(x.dtype(), keep, |x, y| x.sum(x.reduced as f64, y))? {
        return Ok(y);
    }
    dispatch_float!("mean", x.dtype(), T => {
        let n = <T as Element>::Acc::from_f64(view.reduced as f64);
        join::<Sum, T>(fold::<Sum, T>(&view, None)?, view.dims(keep), n)
    })
}

/// Maximum over `dims`; NaN if there is one.
///
/// Errors if the reduced dims are empty.
pub fn amax(x: &Tensor, dims: &[isize], keep: KeepDims) -> Result<Tensor> {
    let view = view(x, &chosen("amax", x, dims)?, false)?;
    refuse_empty("amax", x, dims, view.reduced)?;
    if let Some(y) = view.on_gpu(x.dtype(), keep, |x, y| x.max(y))? {
        return Ok(y);
    }
    dispatch_float!("amax", x.dtype(), T => {
        join::<Max, T>(fold::<Max, T>(&view, None)?, view.dims(keep), Real::ONE)
    })
}

/// ln of the sum of e^x over `dims`, without overflow; minus infinity if the reduced dims are empty.
pub fn log_sum_exp(x: &Tensor, dims: &[isize], keep: KeepDims) -> Result<Tensor> {
    let view = view(x, &chosen("log_sum_exp", x, dims)?, true)?;
    if let Some(y) = view.on_gpu(x.dtype(), keep, |x, y| x.log_sum_exp(y))? {
        return Ok(y);
    }
    dispatch_float!("log_sum_exp", x.dtype(), T => {
        // An infinite maximum is not subtracted: infinity minus infinity is NaN.
        type Acc = <T as Element>::Acc;
        let rows = [view.outer * view.inner];
        let mut shift = join::<Max, Acc>(fold::<Max, T>(&view, None)?, &rows, Real::ONE)?;
        for x in shift.as_mut_slice::<Acc>()? {
            *x = if x.is_finite() { *x } else { Real::ZERO };
        }
        let shift = shift.as_slice::<Acc>()?;
        let sums = fold::<SumExp, T>(&view, Some(shift))?;
        let mut sums = join::<SumExp, Acc>(sums, &rows, Real::ONE)?;
        for (x, &shift) in sums.as_mut_slice::<Acc>()?.iter_mut().zip(shift) {
            *x = x.ln() + shift;
        }
        cast(&sums.reshape(view.dims(keep))?, T::DTYPE)
    })
}

/// Index (i64) of the first maximum along `dim`, or of the first NaN if there is one.
///
/// Errors if the dim is empty.
pub fn argmax(x: &Tensor, dim: isize, keep: KeepDims) -> Result<Tensor> {
    let view = view(x, &chosen("argmax", x, &[dim])?, true)?;
    refuse_empty("argmax", x, &[dim], view.reduced)?;
    if let Some(y) = view.on_gpu(DType::I64, keep, |x, y| x.argmax(y))? {
        return Ok(y);
    }
    let mut out = Tensor::empty(x.device(), DType::I64, view.dims(keep))?;
    dispatch_float!("argmax", x.dtype(), T => {
        let elements = view.x.as_slice::<T>()?;
        for_rows(x.device(), (out.as_mut_slice::<i64>()?, 1), elements.len(), |first, out| {
            for (i, out) in out.iter_mut().enumerate() {
                let row = &elements[(first + i) * view.reduced..][..view.reduced];
                *out = first_maximum(row) as i64;
            }
        });
    });
    Ok(out)
}

fn first_maximum<T: Element>(row: &[T]) -> usize {
    let largest = fold_row::<Max, T>(row, T::Acc::ZERO);
    let wanted = |x: &T| x.acc() == largest;
    let nan = |x: &T| x.partial_cmp(x).is_none();
    row.iter().position(wanted).or_else(|| row.iter().position(nan)).unwrap_or(0)
}

fn refuse_empty(op: &'static str, x: &Tensor, dims: &[isize], reduced: usize) -> Result<()> {
    if reduced == 0 {
        let message = format!("nothing to choose from in dims {dims:?} of {:?}", x.dims());
        return Err(Error::shape(op, message));
    }
    Ok(())
}

/// The adjoint of a broadcast: sums `x` down to `dims`, which broadcast to the dims of `x`. It is the gradient of
/// `broadcast_to`; a bias gradient is the case (N, C) to (C). Returns `x` itself if no dim was broadcast.
///
/// ```
/// use ferrotron_tensor::{Device, Tensor, ops::reduce::sum_to_size};
/// let x = Tensor::from_slice(&Device::cpu(1)?, &[1.0_f32, 2.0, 3.0, 4.0], &[2, 2])?;
/// assert_eq!(sum_to_size(&x, &[2])?.to_vec::<f32>()?, [4.0, 6.0]);
/// assert_eq!(sum_to_size(&x, &[2, 1])?.to_vec::<f32>()?, [3.0, 7.0]);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub fn sum_to_size(x: &Tensor, dims: &[usize]) -> Result<Tensor> {
    if x.dims() == dims {
        return Ok(x.clone());
    }
    let fits = |extra: usize| dims.iter().zip(&x.dims()[extra..]).all(|(&d, &n)| d == n || d == 1);
    let Some(extra) = x.rank().checked_sub(dims.len()).filter(|&extra| fits(extra)) else {
        let message = format!("{dims:?} does not broadcast to {:?}", x.dims());
        return Err(Error::shape("sum_to_size", message));
    };
    let stretched: SmallVec<[isize; 8]> = (0..x.rank())
        .filter(|&d| d < extra || dims[d - extra] != x.dims()[d])
        .map(|d| d as isize)
        .collect();
    sum(x, &stretched, KeepDims::Keep)?.reshape(dims)
}

#[cfg(test)]
mod tests;
