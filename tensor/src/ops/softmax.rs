//! Softmax and log-softmax along one dim, and their gradients.
//!
//! - softmax: y_i = e^(x_i - m) / sum_j e^(x_j - m), m = max_j x_j.
//!   Gradient: dx = y (dy - sum_j dy_j y_j); needs y.
//! - log_softmax: y_i = x_i - m - ln sum_j e^(x_j - m). Gradient: dx = dy - e^y sum_j dy_j; needs y.
//!
//! Accumulates in `Element::Acc`, in 32 lanes within blocks of 1024 elements that are combined in f64.
//! A row of minus infinity gives NaN, as in PyTorch.

mod statistics;

use super::rows::{can_reuse, for_rows};
use crate::core::tensor::check_pair;
use crate::cuda;
use crate::kernel_span::kernel_span;
use crate::numeric::simd::vectorized;
use crate::{Element, Error, Real, Result, Tensor, dispatch_float};
pub(crate) use statistics::{RowStatistics, WithSum, WithoutSum, row_statistics};

const LANES: usize = 32;

vectorized! {
    fn softmax_row<T: Element>(x: &[T], y: &mut [T], max: T::Acc, inverse_sum: T::Acc) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = T::from_acc((x.acc() - max).exp_bounded() * inverse_sum);
        }
    }

    fn log_softmax_row<T: Element>(x: &[T], y: &mut [T], log_sum_exp: T::Acc) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = T::from_acc(x.acc() - log_sum_exp);
        }
    }

    /// sum_j dy_j y_j for softmax, sum_j dy_j for log-softmax.
    fn dot_row<T: Element, W: Weight>(y: &[T], dy: &[T]) -> T::Acc {
        let mut lanes = [T::Acc::ZERO; LANES];
        let (ys, dys) = (y.chunks_exact(LANES), dy.chunks_exact(LANES));
        let (y_rest, dy_rest) = (ys.remainder(), dys.remainder());
        for (y, dy) in ys.zip(dys) {
            for ((lane, y), dy) in lanes.iter_mut().zip(y).zip(dy) {
                *lane += dy.acc() * W::weight(y.acc());
            }
        }
        for ((lane, y), dy) in lanes.iter_mut().zip(y_rest).zip(dy_rest) {
            *lane += dy.acc() * W::weight(y.acc());
        }
        lanes.into_iter().sum()
    }

    /// Overwrites dy with dx.
    fn gradient_row<T: Element, W: Weight>(y: &[T], dy: &mut [T], dot: T::Acc) {
        for (dy, y) in dy.iter_mut().zip(y) {
            *dy = T::from_acc(W::gradient(y.acc(), dy.acc(), dot));
        }
    }
}

/// The difference between the two gradients.
trait Weight {
    fn weight<A: Real>(y: A) -> A;
    fn gradient<A: Real>(y: A, dy: A, dot: A) -> A;
}

struct Softmax;
impl Weight for Softmax {
    #[inline(always)]
    fn weight<A: Real>(y: A) -> A {
        y
    }
    #[inline(always)]
    fn gradient<A: Real>(y: A, dy: A, dot: A) -> A {
        y * (dy - dot)
    }
}

struct LogSoftmax;
impl Weight for LogSoftmax {
    #[inline(always)]
    fn weight<A: Real>(_: A) -> A {
        A::ONE
    }
    #[inline(always)]
    fn gradient<A: Real>(y: A, dy: A, dot: A) -> A {
        dy - y.exp() * dot
    }
}

/// e^x along `dim`, divided by its sum.
///
/// ```
/// use ferrotron_tensor::{Device, Tensor, ops::softmax::softmax};
/// let x = Tensor::from_slice(&Device::cpu(1)?, &[0.0_f64, 3.0_f64.ln()], &[2])?;
/// let y = softmax(&x, -1)?.to_vec::<f64>()?;
/// assert!((y[0] - 0.25).abs() < 1e-15 && (y[1] - 0.75).abs() < 1e-15);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub fn softmax(x: &Tensor, dim: isize) -> Result<Tensor> {
    dispatch_float!("softmax", x.dtype(), T => rows_of::<T>("softmax", x, dim, |x, y| {
        let found = row_statistics::<T, WithoutSum>(x);
        softmax_row(x, y, found.max, <T as Element>::Acc::from_f64(1.0 / found.sum_exp));
    }))
}

/// Logarithm of [`softmax`], without its underflow.
pub fn log_softmax(x: &Tensor, dim: isize) -> Result<Tensor> {
    dispatch_float!("log_softmax", x.dtype(), T => rows_of::<T>("log_softmax", x, dim, |x, y| {
        log_softmax_row(x, y, <T as Element>::Acc::from_f64(row_statistics::<T, WithoutSum>(x).log_sum_exp()));
    }))
}

/// dx of [`softmax`] from its result and dy, which is overwritten if it has no other holder.
pub fn softmax_backward(y: &Tensor, dy: Tensor, dim: isize) -> Result<Tensor> {
    backward::<Softmax>("softmax_backward", y, dy, dim)
}

/// dx of [`log_softmax`] from its result and dy, which is overwritten if it has no other holder.
pub fn log_softmax_backward(y: &Tensor, dy: Tensor, dim: isize) -> Result<Tensor> {
    backward::<LogSoftmax>("log_softmax_backward", y, dy, dim)
}

/// Applies a kernel to every row along `dim`.
fn rows_of<T: Element>(
    op: &'static str,
    x: &Tensor,
    dim: isize,
    f: impl Fn(&[T], &mut [T]) + Send + Sync,
) -> Result<Tensor> {
    let dim = x.resolve(op, dim)? as isize;
    let x = x.transpose(dim, -1)?.contiguous()?;
    let width = x.dim(-1)?;
    let mut y = Tensor::empty(x.device(), x.dtype(), x.dims())?;
    if x.device().gpu().is_some() {
        cuda::softmax::forward(op, &x, &mut y)?;
        return y.transpose(dim, -1);
    }
    let _span = kernel_span!(op, x.dtype(), 0, [&x] => [&y]);
    let elements = x.as_slice::<T>()?;
    for_rows(x.device(), (y.as_mut_slice::<T>()?, width), elements.len(), |first, rows| {
        let x = elements[first * width..].chunks_exact(width);
        rows.chunks_exact_mut(width).zip(x).for_each(|(y, x)| f(x, y));
    });
    y.transpose(dim, -1)
}

fn backward<W: Weight>(op: &'static str, y: &Tensor, dy: Tensor, dim: isize) -> Result<Tensor> {
    check_pair(op, y, &dy)?;
    if y.dims() != dy.dims() {
        return Err(Error::shape(op, format!("y is {:?}, dy {:?}", y.dims(), dy.dims())));
    }
    let dim = y.resolve(op, dim)? as isize;
    let y = y.transpose(dim, -1)?.contiguous()?;
    let moved = dy.transpose(dim, -1)?;
    drop(dy);
    let mut dx = if can_reuse(&moved) { moved } else { moved.copy()? };
    let width = y.dim(-1)?;
    if y.device().gpu().is_some() {
        cuda::softmax::backward(op, &y, &mut dx)?;
        return dx.transpose(dim, -1);
    }
    let _span = kernel_span!(op, y.dtype(), 0, [&y, &dx] => [&dx]);
    dispatch_float!(op, y.dtype(), T => {
        let elements = y.as_slice::<T>()?;
        for_rows(y.device(), (dx.as_mut_slice::<T>()?, width), elements.len(), |first, rows| {
            let y = elements[first * width..].chunks_exact(width);
            for (dy, y) in rows.chunks_exact_mut(width).zip(y) {
                let dot = dot_row::<T, W>(y, dy);
                gradient_row::<T, W>(y, dy, dot);
            }
        });
    });
    dx.transpose(dim, -1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::*;
    use crate::{DType, Device};

    fn naive(x: &[f64], width: usize) -> Vec<f64> {
        x.chunks(width.max(1))
            .flat_map(|row| {
                let sum: f64 = row.iter().map(|x| x.exp()).sum();
                row.iter().map(move |x| x.exp() / sum)
            })
            .collect()
    }

    #[test]
    fn values_equal_naive_ones_in_every_dtype_and_layout() {
        let device = Device::cpu(2).unwrap();
        for dims in [&[7][..], &[3, 1], &[2, 3, 5], &[40, 1500], &[0, 4], &[4, 0]] {
            let width = dims[dims.len() - 1];
            let values = values(dims.iter().product(), 1);
            let want = naive(&values, width);
            let logs: Vec<f64> = want.iter().map(|y| y.ln()).collect();
            for dtype in FLOATS {
                let eps = 8.0 * dtype.epsilon();
                for x in variants(&tensor(&device, dtype, dims, &values)) {
                    assert_close("softmax", &softmax(&x, -1).unwrap(), &want, eps);
                    assert_close("log_softmax", &log_softmax(&x, -1).unwrap(), &logs, eps);
                    let first = x.transpose(0, -1).unwrap();
                    let y = softmax(&first, 0).unwrap().transpose(0, -1).unwrap();
                    assert_close("softmax over dim 0", &y, &want, eps);
                }
            }
        }
    }

    #[test]
    fn infinities_and_nan_behave_as_in_pytorch() {
        let device = Device::cpu(1).unwrap();
        let (inf, nan) = (f64::INFINITY, f64::NAN);
        let rows = [[-inf, 1.0], [-inf, -inf], [nan, 1.0], [1e4, 0.0]];
        let x = tensor(&device, DType::F32, &[4, 2], &rows.concat());
        let want = [0.0, 1.0, nan, nan, nan, nan, 1.0, 0.0];
        assert_close("softmax", &softmax(&x, 1).unwrap(), &want, 0.0);
        // A block of minus infinities before one with finite values.
        let mut long = vec![-inf; 3000];
        long[2500] = 2.0;
        let y = softmax(&tensor(&device, DType::F32, &[3000], &long), 0).unwrap().to_f64().unwrap();
        assert_eq!((y[2500], y[0], y.iter().sum::<f64>()), (1.0, 0.0, 1.0));
        // NaN in every lane of a block.
        for at in 0..70 {
            let mut row = vec![1.0; 70];
            row[at] = nan;
            let y = softmax(&tensor(&device, DType::F32, &[70], &row), 0).unwrap();
            assert!(y.to_f64().unwrap().iter().all(|y| y.is_nan()), "NaN at {at}");
        }
    }

    #[test]
    fn gradients_equal_central_differences() {
        let device = Device::cpu(1).unwrap();
        let (x, dy) = (values(3 * 5, 2), values(3 * 5, 3));
        let of = |values: &[f64]| tensor(&device, DType::F64, &[3, 5], values);
        for dim in [0, 1] {
            for (forward, backward) in [
                (
                    softmax as fn(&Tensor, isize) -> Result<Tensor>,
                    softmax_backward as fn(&Tensor, Tensor, isize) -> Result<Tensor>,
                ),
                (log_softmax, log_softmax_backward),
            ] {
                let y = forward(&of(&x), dim).unwrap();
                let dx = backward(&y, of(&dy), dim).unwrap();
                assert_gradient("softmax", &x, &dx, |x| {
                    let y = forward(&of(x), dim).unwrap().to_f64().unwrap();
                    y.iter().zip(&dy).map(|(y, dy)| y * dy).sum()
                });
            }
        }
    }

    #[test]
    fn the_gradient_overwrites_a_unique_dy_and_only_that() {
        let device = Device::cpu(1).unwrap();
        let y = softmax(&tensor(&device, DType::F32, &[2, 3], &values(6, 4)), 1).unwrap();
        let dy = tensor(&device, DType::F32, &[2, 3], &values(6, 5));
        let (id, before) = (dy.buffer_id(), dy.to_f64().unwrap());
        let dx = softmax_backward(&y, dy.clone(), 1).unwrap();
        assert_eq!(dy.to_f64().unwrap(), before);
        let in_place = softmax_backward(&y, dy, 1).unwrap();
        assert_eq!(in_place.buffer_id(), id);
        assert_eq!(bits(&in_place), bits(&dx));
    }

    #[test]
    fn the_number_of_threads_does_not_show_and_errors_are_clear() {
        let values = values(90 * 1100, 6);
        assert_same_bits("softmax", |device| {
            let x = tensor(device, DType::F32, &[90, 1100], &values);
            let y = softmax(&x, 1)?;
            Ok(vec![log_softmax(&x, 1)?, softmax_backward(&y, x, 1)?, y])
        });
        let device = Device::cpu(1).unwrap();
        let x = Tensor::zeros(&device, DType::F32, &[2]).unwrap();
        assert_eq!(message(softmax(&x, 1)), "softmax: there is no dim 1 in [2]");
        let dy = Tensor::zeros(&device, DType::F32, &[3]).unwrap();
        assert_eq!(message(softmax_backward(&x, dy, 0)), "softmax_backward: y is [2], dy [3]");
    }
}
