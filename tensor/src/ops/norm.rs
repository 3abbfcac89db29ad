//! Kernels shared by LayerNorm and RMSNorm: one pass over each row, and sums over rows for the weight gradients.
//!
//! With `m` the row's mean (0 for RMSNorm), `r = 1 / sqrt(mean((x - m)^2) + eps)` and `h = (x - m) r`:
//!
//! - forward: `y = h w + b`, in Acc, rounded once;
//! - backward: `dx = r (dy w - mean(dy w) - h mean(dy w h))` (RMSNorm: without the middle term),
//!   `dw = sum over rows of dy h`, `db = sum over rows of dy`.
//!
//! A gradient needs x, m, r and w. Sums over rows are computed in blocks, whose size depends on the shape only, and
//! added in order. They do not depend on the number of threads. `w` and `b` have the dtype of x or Acc: the kernels read
//! them in Acc.

mod checks;
pub(crate) mod kind;
mod sums;

use checks::{check_parameter, check_weight};
pub(crate) use kind::{GradSelection, Gradients, NormKind};
use sums::{add_rows, row_means, sum};

use super::cast::to_dtype;
use super::rows::{CHEAP, for_rows2};
use crate::core::tensor::{check_device, check_pair};
use crate::cuda;
use crate::kernel_span::kernel_span;
use crate::numeric::disjoint::Disjoint;
use crate::numeric::prefetch::{self, AHEAD, LINE};
use crate::numeric::simd::vectorized;
use crate::{Element, Error, Real, Result, Scalar, Tensor, dispatch_float};

/// Approximate elements normalised per nanosecond, to decide whether threads share a loop.
const PER_NANOSECOND: usize = 4;

/// Elements per forward task.
const TASK: usize = 16 * 1024;

/// y, mean (empty for RMSNorm) and reciprocal standard deviation of each row.
pub(super) fn forward<N: NormKind>(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<(Tensor, Tensor, Tensor)> {
    let (width, outer) = check_weight::<N>(N::OP, x, weight)?;
    if let Some(bias) = bias {
        check_parameter(N::OP, x, bias)?;
        if bias.dims() != [width] {
            return Err(Error::shape(
                N::OP,
                format!("x {:?} needs a bias [{width}], got {:?}", x.dims(), bias.dims()),
            ));
        }
    }
    if !eps.is_finite() || eps < 0.0 {
        return Err(Error::value(N::OP, format!("eps must be finite and at least 0, got {eps}")));
    }
    let device = x.device();
    let rows: usize = outer.iter().product();
    let (x, weight) = (x.to_contiguous()?, weight.to_contiguous()?);
    let bias = bias.map(Tensor::to_contiguous).transpose()?;
    let bias = bias.as_deref();
    if device.gpu().is_some() {
        return cuda::norm::forward::<N>(&x, &weight, bias, eps);
    }
    let mut y = Tensor::empty(device, x.dtype(), x.dims())?;
    dispatch_float!(N::OP, x.dtype(), T => {
        type Acc = <T as Element>::Acc;
        let acc = Acc::DTYPE;
        let weight = to_dtype(&weight, acc)?;
        let bias = bias.map(|bias| to_dtype(bias, acc)).transpose()?;
        let mean_dims = if N::CENTRED { outer } else { &[0] };
        let mut mean = Tensor::empty(device, acc, mean_dims)?;
        let mut rstd = Tensor::empty(device, acc, outer)?;
        {
            let _span = kernel_span!(N::OP, x.dtype(), 0, [&x, &weight] => [&y, &rstd]);
            let (x, weight) = (x.as_slice::<T>()?, weight.as_slice::<Acc>()?);
            let bias = bias.as_ref().map_or(Ok(&[][..]), |bias| bias.as_slice::<Acc>())?;
            let y = Disjoint::new(y.as_mut_slice::<T>()?);
            let mean = Disjoint::new(mean.as_mut_slice()?);
            let rstd = Disjoint::new(rstd.as_mut_slice()?);
            let block = (TASK / width.max(1)).max(1);
            device.for_each(rows.div_ceil(block), x.len() / PER_NANOSECOND, &|task| {
                let first = task * block;
                let n = block.min(rows - first);
                let span = first * width..(first + n) * width;
                // SAFETY: tasks own disjoint blocks of rows.
                let (y, mean, rstd) = unsafe {
                    let mean = if N::CENTRED { mean.part(first, n) } else { mean.part(0, 0) };
                    (y.part(span.start, span.len()), mean, rstd.part(first, n))
                };
                forward_rows::<T, N>(&x[span], weight, bias, Real::from_f64(eps), y, mean, rstd);
            });
        }
        Ok((y, mean, rstd))
    })
}

vectorized! {
    fn forward_rows<T: Element, N: NormKind>(
        x: &[T],
        weight: &[T::Acc],
        bias: &[T::Acc],
        eps: T::Acc,
        y: &mut [T],
        mean: &mut [T::Acc],
        rstd: &mut [T::Acc],
    ) {
        let width = weight.len();
        let count = <T::Acc as Real>::from_f64(width.max(1) as f64);
        // Backward comes here once more, long after x was written. The processor itself fetches wide rows ahead.
        let fetched = if width <= AHEAD { width } else { 0 };
        for (row, rstd) in rstd.iter_mut().enumerate() {
            let later = row * width + AHEAD;
            for column in (0..fetched).step_by(LINE / size_of::<T>()) {
                prefetch::to_l1(x.as_ptr().wrapping_add(later + column));
                prefetch::to_write(y.as_ptr().wrapping_add(later + column));
            }
            let x = &x[row * width..(row + 1) * width];
            let y = &mut y[row * width..(row + 1) * width];
            let mut m = T::Acc::ZERO;
            if N::CENTRED {
                m = sum(x, |x| x.acc()) / count;
                mean[row] = m;
            }
            let variance = sum(x, |x| (x.acc() - m) * (x.acc() - m)) / count;
            let r = T::Acc::ONE / (variance + eps).sqrt();
            *rstd = r;
            if bias.is_empty() {
                for ((y, &x), &w) in y.iter_mut().zip(x).zip(weight) {
                    *y = T::from_acc((x.acc() - m) * r * w);
                }
            } else {
                for (((y, &x), &w), &b) in y.iter_mut().zip(x).zip(weight).zip(bias) {
                    *y = T::from_acc((x.acc() - m) * r * w + b);
                }
            }
        }
    }
}

/// Computes the selected gradients. dx is rounded and then added to `before`, if any.
pub(super) fn backward<N: NormKind>(
    dy: &Tensor,
    x: &Tensor,
    mean: Option<&Tensor>,
    rstd: &Tensor,
    weight: &Tensor,
    before: Option<&Tensor>,
    wanted: GradSelection,
) -> Result<Gradients> {
    let op = N::OP_BACKWARD;
    let (width, outer) = check_weight::<N>(op, x, weight)?;
    for (name, gradient) in [("dy", Some(dy)), ("the gradient before", before)] {
        let Some(gradient) = gradient else { continue };
        check_pair(op, x, gradient)?;
        if gradient.dims() != x.dims() {
            let (own, of_x) = (gradient.dims(), x.dims());
            return Err(Error::shape(op, format!("{name} {own:?} is not of x's {of_x:?}")));
        }
    }
    let device = x.device();
    let rows: usize = outer.iter().product();
    dispatch_float!(op, x.dtype(), T => {
        type Acc = <T as Element>::Acc;
        for (name, stat) in [("rstd", Some(rstd)), ("mean", mean)] {
            let Some(stat) = stat else { continue };
            stat.check_dtype::<Acc>(op)?;
            check_device(op, x, stat)?;
            if stat.dims() != outer {
                return Err(Error::shape(
                    op,
                    format!("x {:?} needs {name} {outer:?}, got {:?}", x.dims(), stat.dims()),
                ));
            }
        }
        let (x, dy) = (x.to_contiguous()?, dy.to_contiguous()?);
        let (weight, rstd) = (weight.to_contiguous()?, rstd.to_contiguous()?);
        let mean = mean.map(Tensor::to_contiguous).transpose()?;
        let before = before.map(Tensor::to_contiguous).transpose()?;
        let (mean, before) = (mean.as_deref(), before.as_deref());
        if device.gpu().is_some() {
            return cuda::norm::backward::<N>(&dy, &x, (mean, &rstd), &weight, before, wanted);
        }
        let weight = to_dtype(&weight, Acc::DTYPE)?;
        let want_weights = wanted != GradSelection::Input;
        // At most 128 blocks, so partial sums stay small relative to the input.
        let block = rows.div_ceil(128).max(32);
        let blocks = rows.div_ceil(block);
        let mut dx = Tensor::empty(device, x.dtype(), x.dims())?;
        let partial = if want_weights { 2 * width } else { 0 };
        let mut partials = Tensor::empty(device, Acc::DTYPE, &[blocks, partial])?;
        let _span = kernel_span!(op, x.dtype(), 0, [&x, &dy, &weight, &rstd; before] => [&dx, &partials]);
        {
            let (x, dy) = (x.as_slice::<T>()?, dy.as_slice::<T>()?);
            let weight = weight.as_slice::<Acc>()?;
            let rstd = rstd.as_slice::<Acc>()?;
            let mean = mean.map_or(Ok(&[][..]), |mean| mean.as_slice::<Acc>())?;
            let before = before.map(|before| before.as_slice::<T>()).transpose()?;
            let dx = Disjoint::new(dx.as_mut_slice::<T>()?);
            let partials = Disjoint::new(partials.as_mut_slice::<Acc>()?);
            device.for_each(blocks, x.len() / PER_NANOSECOND, &|task| {
                let first = task * block;
                let n = block.min(rows - first);
                let span = first * width..(first + n) * width;
                // SAFETY: tasks own disjoint blocks of rows and one row of partial sums each.
                let (dx, sums) = unsafe {
                    (dx.part(span.start, span.len()), partials.part(task * partial, partial))
                };
                let mean = if N::CENTRED { &mean[first..first + n] } else { &[] };
                let rstd = &rstd[first..first + n];
                let before = before.map(|before| &before[span.clone()]);
                let (dy, x) = (&dy[span.clone()], &x[span]);
                backward_rows::<T, N>(dy, x, mean, rstd, weight, before, dx, sums);
            });
        }
        let weights = if want_weights {
            let mut dweight = Tensor::zeros(device, Acc::DTYPE, &[width])?;
            let mut dbias = Tensor::zeros(device, Acc::DTYPE, &[width])?;
            let sums = partials.as_slice::<Acc>()?;
            let totals = ((dweight.as_mut_slice::<Acc>()?, 1), (dbias.as_mut_slice::<Acc>()?, 1));
            for_rows2(device, totals.0, totals.1, sums.len() / CHEAP, |first, dweight, dbias| {
                add_partials(sums, width, first, dweight, dbias);
            });
            Some((dweight, dbias))
        } else {
            None
        };
        Ok((dx, weights))
    })
}

vectorized! {
    /// Computes `dx`, to which it adds `before` after rounding, and `sums` (dweight, then dbias), which is empty if not needed.
    fn backward_rows<T: Element, N: NormKind>(
        dy: &[T],
        x: &[T],
        mean: &[T::Acc],
        rstd: &[T::Acc],
        weight: &[T::Acc],
        before: Option<&[T]>,
        dx: &mut [T],
        sums: &mut [T::Acc],
    ) {
        let width = weight.len();
        let count = <T::Acc as Real>::from_f64(width.max(1) as f64);
        let zero = T::Acc::ZERO;
        sums.fill(zero);
        let (dweight, dbias) = sums.split_at_mut(sums.len() / 2);
        for (row, &r) in rstd.iter().enumerate() {
            let m = if N::CENTRED { mean[row] } else { zero };
            let span = row * width..(row + 1) * width;
            let (x, dy) = (&x[span.clone()], &dy[span.clone()]);
            let (total, along) = row_means::<T>(dy, x, weight, m, r);
            let total = if N::CENTRED { total / count } else { zero };
            let along = along / count;
            let gradient = |dy: T, x: T, w: T::Acc| {
                let h = (x.acc() - m) * r;
                T::from_acc(r * (dy.acc() * w - total - h * along))
            };
            let dx = dx[span.clone()].iter_mut().zip(dy.iter().zip(x).zip(weight));
            if let Some(before) = before {
                for ((dx, ((&dy, &x), &w)), before) in dx.zip(&before[span]) {
                    *dx = T::from_acc(gradient(dy, x, w).acc() + before.acc());
                }
            } else {
                for (dx, ((&dy, &x), &w)) in dx {
                    *dx = gradient(dy, x, w);
                }
            }
        }
        if dweight.is_empty() {
            return;
        }
        // Four rows at a time: the sums are read and written a quarter as often.
        let fours = rstd.len() / 4 * 4;
        let stat = |row: usize| (if N::CENTRED { mean[row] } else { zero }, rstd[row]);
        for row in (0..fours).step_by(4) {
            let span = row * width..(row + 4) * width;
            let stats = [stat(row), stat(row + 1), stat(row + 2), stat(row + 3)];
            add_rows::<T, 4>(&dy[span.clone()], &x[span], stats, dweight, dbias);
        }
        for row in fours..rstd.len() {
            let span = row * width..(row + 1) * width;
            add_rows::<T, 1>(&dy[span.clone()], &x[span], [stat(row)], dweight, dbias);
        }
    }

    /// Adds the partial sums of `dweight.len()` columns from `first` on.
    fn add_partials<A: Real>(sums: &[A], width: usize, first: usize, dweight: &mut [A], dbias: &mut [A]) {
        for sums in sums.chunks_exact(2 * width) {
            for (total, &part) in dweight.iter_mut().zip(&sums[first..width]) {
                *total += part;
            }
            for (total, &part) in dbias.iter_mut().zip(&sums[width + first..]) {
                *total += part;
            }
        }
    }
}
