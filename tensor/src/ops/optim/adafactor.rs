//! The passes of Adafactor over one parameter: Shazeer and Stern, arXiv 1804.04235, algorithms 4 and 5.
//!
//! For the gradient g = grad_scale * gradient of a matrix, or of each of several matrices, with i its rows and j
//! its columns:
//!
//! ```text
//! R_i = mean_j g_ij^2, C_j = mean_i g_ij^2                         square_sums, means
//! u_ij = g_ij * r_i * c_j, and its RMS, by which it is clipped     update_sq_norm
//!     r = 1 / sqrt(R / mean(R)), c = 1 / sqrt(C), of running means     means
//! w = keep * w - step * u, or with a mean of updates               adafactor
//!     step = alpha / max(1, RMS(u) / clip_threshold), alpha = lr or, relative, lr * max(eps2, RMS(w))
//!     keep = 1 - alpha * weight_decay
//! ```
//!
//! Sums may cover one shard of the parameter; the other shards' sums are added before use. A vector is a matrix of
//! one row.
//!
//! Sums are accumulated in f64, in an order that depends on the shape only. Updates are computed elementwise in
//! `Element::Acc`. Nothing depends on the number of threads.

pub(crate) mod matrix;
mod means;
mod sums;
#[cfg(test)]
mod tests;

pub use super::config::{Adafactor, NormalizeBy, SecondMomentDecay};
pub use matrix::{MatrixBatch, RowColFactors, SquareSums};
pub use means::{matrix_factors, update_mean_squares, update_means, vector_factors};

use crate::kernel_span::{bytes, kernel_span};
use crate::numeric::disjoint::Disjoint;
use crate::numeric::prefetch::Stream;
use crate::numeric::simd::vectorized;
use crate::ops::optim::rounded::{Rounded, SharedRounded};
use crate::ops::optim::step::{DeviceStepParams, StepParams, dispatch_update};
use crate::ops::rows::for_rows;
use crate::{DType, Device, Element, Error, Real, Result, Tensor, cuda, dispatch_float};
use std::ops::Range;

/// Sums of squares of `grads` over every row and every column, in f64.
///
/// Errors if the lengths do not match `shape`.
///
/// ```
/// use ferrotron_tensor::ops::adafactor::{MatrixBatch, square_sums};
/// use ferrotron_tensor::{DType, Device, Tensor};
/// let device = Device::cpu(1)?;
/// let grads = Tensor::from_slice(&device, &[1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0], &[6])?;
/// let mut rows = Tensor::empty(&device, DType::F64, &[2])?;
/// let mut columns = Tensor::empty(&device, DType::F64, &[3])?;
/// square_sums(&MatrixBatch::from_dims(&[2, 3]), &grads, &mut rows, &mut columns)?;
/// assert_eq!(rows.to_f64()?, [14.0, 77.0]);
/// assert_eq!(columns.to_f64()?, [17.0, 29.0, 45.0]);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub fn square_sums(
    shape: &MatrixBatch,
    grads: &Tensor,
    rows: &mut Tensor,
    columns: &mut Tensor,
) -> Result<()> {
    shape.check(grads, rows, columns)?;
    if grads.device().gpu().is_some() {
        return cuda::adafactor::square_sums(shape, grads, rows, columns);
    }
    let _span = kernel_span!("adafactor_sums", grads.dtype(), 0, [grads, grads] => [rows, columns]);
    let (rows, columns) = (rows.as_mut_slice()?, columns.as_mut_slice()?);
    dispatch_float!("adafactor", grads.dtype(), G => {
        sums::sum_squares(grads.device(), shape, grads.as_slice::<G>()?, rows, columns);
    });
    Ok(())
}

/// The sum of squares of the unclipped update, as one f64 element.
///
/// Errors if the lengths do not match the factors' shape.
pub fn update_sq_norm(
    step: &DeviceStepParams,
    grads: &Tensor,
    factors: &RowColFactors,
) -> Result<Tensor> {
    let RowColFactors { shape, rows, columns } = factors;
    shape.check(grads, rows, columns)?;
    if grads.device().gpu().is_some() {
        return cuda::adafactor::update_sq_norm(step.gpu()?, grads, factors);
    }
    // A skipped step never reads this sum, so any value will do.
    let (device, scale) = (grads.device(), step.host()?.map_or(0.0, |numbers| numbers.grad_scale));
    let _span = kernel_span!("adafactor_sums", grads.dtype(), 0, [grads] => []);
    let sum = dispatch_float!("adafactor", grads.dtype(), G => {
        let (rows, columns) = (rows.as_slice()?, columns.as_slice()?);
        sum_updates::<G>(device, shape, grads.as_slice()?, scale, rows, columns)
    });
    Tensor::from_slice(device, &[sum], &[1])
}

fn sum_updates<G: Element>(
    device: &Device,
    shape: &MatrixBatch,
    grads: &[G],
    grad_scale: f64,
    rows: &[G::Acc],
    columns: &[G::Acc],
) -> f64 {
    let width = shape.columns;
    let mut sums = vec![0.0; rows.len()];
    for_rows(device, (&mut sums, 1), grads.len(), |first, sums| {
        for (i, sum) in sums.iter_mut().enumerate() {
            let row = first + i;
            let columns = &columns[row / shape.rows * width..][..width];
            let scale = rows[row].f64() * grad_scale;
            *sum = scale * scale * sums::weighted_sq_norm(&grads[row * width..][..width], columns);
        }
    });
    sums.iter().sum()
}

/// Updates `weights` by the clipped update or, with a `mean`, by its running mean. The mean accumulates updates
/// already multiplied by the step size (as in Hugging Face's Adafactor). If the weights are in the accumulator type,
/// `copy` receives them rounded.
///
/// Errors if the lengths do not match the factors' shape, or the dtypes are not supported.
pub fn adafactor(
    config: &Adafactor,
    step: &DeviceStepParams,
    weights: &mut Tensor,
    grads: &Tensor,
    (factors, sums): (&RowColFactors, &SquareSums),
    mean: Option<&mut Tensor>,
    copy: Option<Rounded>,
) -> Result<()> {
    let RowColFactors { shape, rows, columns } = factors;
    shape.check(grads, rows, columns)?;
    shape.check(weights, rows, columns)?;
    if let Some(mean) = mean.as_ref().filter(|mean| mean.numel() != weights.numel()) {
        let message = format!("{} weights, a mean of {}", weights.numel(), mean.numel());
        return Err(Error::shape("adafactor", message));
    }
    let numbers = sums.weights.iter().chain([&sums.update]);
    if let Some(x) = numbers.into_iter().find(|x| (x.dtype(), x.numel()) != (DType::F64, 1)) {
        return Err(Error::shape("adafactor", format!("{x:?} is no sum of f64")));
    }
    if let Some(copy) = &copy {
        copy.check("adafactor", weights)?;
    }
    if weights.device().gpu().is_some() {
        let step = step.gpu()?;
        cuda::adafactor::adafactor(config, step, weights, grads, factors, sums, mean)?;
        return copy.map_or(Ok(()), |copy| copy.round(weights));
    }
    let Some(numbers) = step.host()? else { return Ok(()) };
    let of_weights = sums.weights.as_ref().map(Tensor::item).transpose()?;
    let size = Size::new(config, &numbers, of_weights, sums.update.item()?, sums.numel);
    let copied = copy.as_ref().map_or(0, |copy| bytes(copy.target));
    let more = 2 * mean.as_deref().map_or(0, bytes) + copied;
    let _span = kernel_span!("adafactor", weights.dtype(), 0, [weights, grads] => [weights], more);
    match copy {
        None => dispatch_update!("adafactor", weights, grads, (T, G) => {
            let mean = mean.map_or(Ok(&mut [][..]), |mean| mean.as_mut_slice())?;
            step_all::<T, G, T>(config.beta1, size, weights, grads, factors, mean, None)
        }),
        Some(copy) => dispatch_update!("adafactor", copy.target, grads, (D, G) => {
            let mean = mean.map_or(Ok(&mut [][..]), |mean| mean.as_mut_slice())?;
            let (beta1, copy) = (config.beta1, Some(copy.shared(numbers.update)?));
            step_all::<<D as Element>::Acc, G, D>(beta1, size, weights, grads, factors, mean, copy)
        }),
    }
}

/// The factors of weights and updates in a step.
#[derive(Clone, Copy)]
struct Size {
    keep: f64,
    step: f64,
}

impl Size {
    /// The factors from the sums of squares of weights and update, each over `numel` elements.
    fn new(
        config: &Adafactor,
        numbers: &StepParams,
        weights: Option<f64>,
        update: f64,
        numel: usize,
    ) -> Size {
        let rms = |sum: f64| (sum / numel.max(1) as f64).sqrt();
        let alpha = numbers.lr * weights.map_or(1.0, |sum| rms(sum).max(config.eps2));
        let step = alpha / (rms(update) / config.clip_threshold).max(1.0);
        Size { keep: 1.0 - alpha * config.weight_decay, step: step * numbers.grad_scale }
    }
}

fn step_all<T: Element, G: Element<Acc = T::Acc>, D: Element<Acc = T::Acc>>(
    beta1: f64,
    size: Size,
    weights: &mut Tensor,
    grads: &Tensor,
    factors: &RowColFactors,
    mean: &mut [T::Acc],
    copy: Option<SharedRounded<D>>,
) -> Result<()> {
    let a = T::Acc::from_f64;
    let (keep, beta1, one_minus_beta1) = (a(size.keep), a(beta1), a(1.0 - beta1));
    let (shape, has_mean, device) = (&factors.shape, !mean.is_empty(), grads.device());
    let (factor_rows, columns) = (factors.rows.as_slice::<T::Acc>()?, factors.columns.as_slice()?);
    let (width, rows, per_task) = (shape.columns, shape.count * shape.rows, shape.rows_per_task());
    let grads = grads.as_slice::<G>()?;
    let (weights, mean) = (Disjoint::new(weights.as_mut_slice::<T>()?), Disjoint::new(mean));
    device.for_each(rows.div_ceil(per_task), shape.numel(), &|task| {
        let (start, end) = (task * per_task * width, rows.min((task + 1) * per_task) * width);
        let len = end - start;
        let (from, kept) = if has_mean { (start, len) } else { (0, 0) };
        // SAFETY: tasks take consecutive rows. Without means all of them take none.
        let (w, mean) = unsafe { (weights.part(start, len), mean.part(from, kept)) };
        let grads = &grads[start..end];
        let (mut row, mut column) = (task * per_task, 0); // where the next range begins
        let read = [Stream::new(grads), Stream::new(mean)];
        let mut step = |at: Range<usize>, w: &mut [T]| {
            let mut done = at.start;
            while done < at.end {
                let part = done..at.end.min(done + width - column);
                let w = &mut w[part.start - at.start..part.end - at.start];
                let columns = &columns[row / shape.rows * width + column..][..part.len()];
                let factor = a(factor_rows[row].f64() * size.step);
                (done, column) = (part.end, column + part.len());
                if column == width {
                    (row, column) = (row + 1, 0);
                }
                if has_mean {
                    let (g, mean) = (&grads[part.clone()], &mut mean[part]);
                    step_row_of_means(w, g, columns, mean, factor, keep, beta1, one_minus_beta1);
                } else {
                    step_row(w, &grads[part], columns, factor, keep);
                }
            }
        };
        match &copy {
            None => step(0..len, w),
            // SAFETY: as above.
            Some(copy) => unsafe { copy.update(start, w, &read, step) },
        }
    });
    Ok(())
}

vectorized! {
    fn step_row<T: Element, G: Element<Acc = T::Acc>>(
        weights: &mut [T],
        grads: &[G],
        columns: &[T::Acc],
        factor: T::Acc,
        keep: T::Acc,
    ) {
        for ((w, g), &c) in weights.iter_mut().zip(grads).zip(columns) {
            *w = T::from_acc(w.acc() * keep - g.acc() * c * factor);
        }
    }

    fn step_row_of_means<T: Element, G: Element<Acc = T::Acc>>(
        weights: &mut [T],
        grads: &[G],
        columns: &[T::Acc],
        mean: &mut [T::Acc],
        factor: T::Acc,
        keep: T::Acc,
        beta1: T::Acc,
        one_minus_beta1: T::Acc,
    ) {
        for (((w, g), &c), mean) in weights.iter_mut().zip(grads).zip(columns).zip(mean) {
            *mean = *mean * beta1 + g.acc() * c * factor * one_minus_beta1;
            *w = T::from_acc(w.acc() * keep - *mean);
        }
    }
}
