//! Running means of squared gradients for Adafactor, and the factors computed from them.
//!
//! With t the number of the step, g = grad_scale * gradient, and means over the *whole* rows, columns and matrices:
//!   beta2 = 1 - t^-decay_rate
//!   R = beta2 R + (1 - beta2) (mean_j g^2 + eps1), C the same over i; a vector keeps V, of each element
//!   the factor of g: 1 / sqrt(R C / mean(R)), or 1 / sqrt(V)
//!
//! The mean of R equals that of C; it is taken of the one that is not sharded.

use super::matrix::{MatrixBatch, RowColFactors};
use crate::ops::optim::config::{NormalizeBy, SecondMomentDecay};
use crate::ops::optim::step::{DeviceStepParams, StepParams, check_vectors};
use crate::ops::rows::for_rows;
use crate::{DType, Element, Error, Real, Result, Tensor, cuda, dispatch_float};

impl SecondMomentDecay {
    /// The update of a mean: maps its old value and a new square to its new value.
    fn mixed<A: Real>(&self, update: u64) -> impl Fn(A, f64) -> A + Send + Sync {
        let (beta2, eps1) = (1.0 - (update as f64).powf(-self.rate), self.eps1);
        let share = 1.0 - beta2;
        move |mean: A, square| A::from_f64(beta2 * mean.f64() + share * (square + eps1))
    }
}

/// Updates the running `means` with `sums`, each over the squares of `count` unscaled gradients.
///
/// Errors if the lengths differ, or the sums are not f64.
pub fn update_means(
    decay: &SecondMomentDecay,
    step: &DeviceStepParams,
    means: &mut Tensor,
    sums: &Tensor,
    count: usize,
) -> Result<()> {
    check(means, sums)?;
    if means.device().gpu().is_some() {
        return cuda::adafactor::update_means(decay, step.gpu()?, means, sums, count);
    }
    let Some(StepParams { update, grad_scale, .. }) = step.host()? else { return Ok(()) };
    let scale = grad_scale.powi(2);
    let (device, sums) = (sums.device(), sums.as_slice::<f64>()?);
    dispatch_float!("adafactor", means.dtype(), A => {
        let mixed = decay.mixed::<<A as Element>::Acc>(update);
        for_rows(device, (means.as_mut_slice::<A>()?, 1), sums.len(), |first, means| {
            for (mean, sum) in means.iter_mut().zip(&sums[first..]) {
                *mean = A::from_acc(mixed(mean.acc(), scale * sum / count as f64));
            }
        });
    });
    Ok(())
}

/// Updates the running elementwise means with the squares of `grads`.
///
/// Errors if the lengths differ, or the means are not in the accumulator type.
pub fn update_mean_squares(
    decay: &SecondMomentDecay,
    step: &DeviceStepParams,
    means: &mut Tensor,
    grads: &Tensor,
) -> Result<()> {
    check(means, grads)?;
    if means.device().gpu().is_some() {
        return cuda::adafactor::update_mean_squares(decay, step.gpu()?, means, grads);
    }
    let Some(StepParams { update, grad_scale, .. }) = step.host()? else { return Ok(()) };
    let scale = grad_scale.powi(2);
    dispatch_float!("adafactor", grads.dtype(), G => {
        let mixed = decay.mixed::<<G as Element>::Acc>(update);
        let (device, grads) = (grads.device(), grads.as_slice::<G>()?);
        let means = means.as_mut_slice::<<G as Element>::Acc>()?;
        for_rows(device, (means, 1), grads.len(), |first, means| {
            for (mean, g) in means.iter_mut().zip(&grads[first..]) {
                let g = g.acc().f64();
                *mean = mixed(*mean, scale * g * g);
            }
        });
    });
    Ok(())
}

/// Factors of the gradients of matrices, from the mean squares of their rows and columns.
///
/// Errors if the lengths do not match `shape`.
pub fn matrix_factors(
    shape: &MatrixBatch,
    rows: &Tensor,
    columns: &Tensor,
    mean_of: NormalizeBy,
) -> Result<RowColFactors> {
    check_vectors("adafactor", &[rows, columns])?;
    let want = (shape.count * shape.rows, shape.count * shape.columns);
    if (rows.numel(), columns.numel()) != want || rows.dtype() != columns.dtype() {
        let message = format!("{shape:?} for means of rows {rows:?} and of columns {columns:?}");
        return Err(Error::shape("adafactor", message));
    }
    let device = rows.device();
    if device.gpu().is_some() {
        return cuda::adafactor::matrix_factors(shape, rows, columns, mean_of);
    }
    dispatch_float!("adafactor", rows.dtype(), A => {
        let (means, other) = (rows.as_slice::<A>()?, columns.as_slice::<A>()?);
        let mean = |x: &[A]| x.iter().map(|x| x.acc().f64()).sum::<f64>() / x.len() as f64;
        let mut scaled = Vec::with_capacity(means.len());
        for matrix in 0..shape.count {
            let means = &means[matrix * shape.rows..][..shape.rows];
            let mean = match mean_of {
                NormalizeBy::Rows => mean(means),
                NormalizeBy::Columns => mean(&other[matrix * shape.columns..][..shape.columns]),
            };
            scaled.extend(means.iter().map(|row| from_f64::<A>((mean / row.acc().f64()).sqrt())));
        }
        let rows = Tensor::from_slice(device, &scaled, &[scaled.len()])?;
        Ok(RowColFactors { shape: *shape, rows, columns: inverse_roots(columns)? })
    })
}

/// Factors of the gradient of a vector, from the mean squares of its elements.
///
/// Errors if the means are not a vector of floating-point numbers.
pub fn vector_factors(means: &Tensor) -> Result<RowColFactors> {
    check_vectors("adafactor", &[means])?;
    let shape = MatrixBatch { count: 1, rows: 1, columns: means.numel() };
    let rows = Tensor::full(means.device(), means.dtype(), &[1], 1.0)?;
    Ok(RowColFactors { shape, rows, columns: inverse_roots(means)? })
}

/// 1 / sqrt(x), computed in f64.
fn inverse_roots(x: &Tensor) -> Result<Tensor> {
    if x.device().gpu().is_some() {
        return cuda::adafactor::inverse_roots(x);
    }
    let mut roots = Tensor::empty(x.device(), x.dtype(), x.dims())?;
    dispatch_float!("adafactor", x.dtype(), A => {
        let numbers = x.as_slice::<A>()?;
        for_rows(x.device(), (roots.as_mut_slice::<A>()?, 1), numbers.len(), |first, roots| {
            for (root, x) in roots.iter_mut().zip(&numbers[first..]) {
                *root = from_f64(1.0 / x.acc().f64().sqrt());
            }
        });
    });
    Ok(roots)
}

fn from_f64<A: Element>(x: f64) -> A {
    A::from_acc(Real::from_f64(x))
}

fn check(means: &Tensor, new: &Tensor) -> Result<()> {
    check_vectors("adafactor", &[means, new])?;
    if means.numel() != new.numel() {
        let message = format!("{} means, {} numbers", means.numel(), new.numel());
        return Err(Error::shape("adafactor", message));
    }
    match means.dtype() {
        DType::F64 | DType::F32 => Ok(()),
        other => Err(Error::dtype("adafactor", format!("means are f32 or f64, got {other}"))),
    }
}
