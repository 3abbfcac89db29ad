//! Reductions over any dims: sum, mean, max, arg-max and log-sum-exp, and `sum_to_size`, the adjoint of a broadcast.
//!
//! - sum: y = sum_i x_i. Gradient: dy broadcast; needs only the dims. An empty sum is 0.
//! - mean: y = sum_i x_i / n. Gradient: dy / n broadcast. An empty mean is NaN (0 / 0).
//! - amax: y = max_i x_i. Gradient: dy where x = y; needs x and y. An empty maximum is an error; NaN wins.
//! - log_sum_exp: y = m + ln sum_i e^(x_i - m), m = max_i x_i. Gradient: dy e^(x_i - y); needs x and y.
//!
//! Accumulates in `Element::Acc` within fixed blocks (32 lanes of 4096 row elements, or 128 elements of a column),
//! then combines the blocks in f64 in order. The result does not depend on the number of threads.

mod fold;
mod view;

use super::rows::for_rows;
use crate::{DType, Element, Error, Real, Result, Tensor, dispatch_float};
use fold::{Max, Sum, SumExp, fold_row, reduce};
use smallvec::SmallVec;
pub use view::KeepDims;
use view::{chosen, view};

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
        reduce::<Sum, T, T>(&view, None, view.dims(keep), Real::ONE)
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
        reduce::<Sum, T, T>(&view, None, view.dims(keep), n)
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
        reduce::<Max, T, T>(&view, None, view.dims(keep), Real::ONE)
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
        let mut shift = reduce::<Max, T, Acc>(&view, None, &rows, Real::ONE)?;
        for x in shift.as_mut_slice::<Acc>()? {
            *x = if x.is_finite() { *x } else { Real::ZERO };
        }
        let shift = shift.as_slice::<Acc>()?;
        let sums = reduce::<SumExp, T, Acc>(&view, Some(shift), &rows, Real::ONE)?;
        let sums = sums.as_slice::<Acc>()?.iter().zip(shift);
        let mut out = Tensor::empty(x.device(), x.dtype(), view.dims(keep))?;
        for (y, (sum, &shift)) in out.as_mut_slice::<T>()?.iter_mut().zip(sums) {
            *y = T::from_acc(sum.ln() + shift);
        }
        Ok(out)
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
