//! Local kernels of gradient clipping and loss scaling: the sum of squares of a flat buffer, and a test for finite
//! elements.
//!
//! sq_norm = sum_i x_i^2, accumulated in f64 (squares of any f32 are exact, so fused multiply-adds change no bit) in 16
//! lanes within blocks of 16384 elements, which are added in order. The result does not depend on the number of threads. No gradient.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use crate::kernel_span::kernel_span;
use crate::numeric::prefetch;
use crate::numeric::simd::vectorized;
use crate::ops::optim::step::check_vectors;
use crate::ops::rows::for_rows;
use crate::{DType, Device, Element, Error, Real, Result, Tensor, cuda, dispatch_float};

const BLOCK: usize = 16 * 1024;
const LANES: usize = 16;

#[inline(always)]
fn add_squares<T: Element>(lanes: &mut [f64; LANES], x: &[T]) {
    for (lane, x) in lanes.iter_mut().zip(x) {
        let x = x.acc().f64();
        *lane = x.mul_add(x, *lane);
    }
}

vectorized! {
    fn sq_norm_block<T: Element>(x: &[T]) -> f64 {
        let mut lanes = [0.0_f64; LANES];
        let (blocks, rest) = x.as_chunks::<{ 2 * LANES }>();
        for block in blocks {
            prefetch::fetch_ahead(block);
            for x in block.as_chunks::<LANES>().0 {
                add_squares(&mut lanes, x);
            }
        }
        for x in rest.chunks(LANES) {
            add_squares(&mut lanes, x);
        }
        lanes.into_iter().sum()
    }

    /// Visits every element: an early exit would put a branch into the loop.
    fn all_finite_block<T: Element>(x: &[T]) -> bool {
        let mut finite = true;
        for x in x {
            finite &= x.acc().is_finite();
        }
        finite
    }
}

/// Adds the sum of squares of a contiguous tensor to `total`, an f64 tensor of one element on the same device.
///
/// Errors if `total` has another dtype or size, or if `x` is not contiguous.
///
/// ```
/// use ferrotron_tensor::{DType, Device, Tensor, ops::sq_norm::add_sq_norm};
/// let device = Device::cpu(1)?;
/// let mut total = Tensor::zeros(&device, DType::F64, &[1])?;
/// add_sq_norm(&mut total, &Tensor::from_slice(&device, &[3.0_f32, 4.0], &[2])?)?;
/// assert_eq!(total.item()?, 25.0);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub fn add_sq_norm(total: &mut Tensor, x: &Tensor) -> Result<()> {
    check_vectors("sq_norm", &[total, x])?;
    if (total.dtype(), total.numel()) != (DType::F64, 1) {
        return Err(Error::shape("sq_norm", format!("{total:?} is no number of f64")));
    }
    if x.device().gpu().is_some() {
        return cuda::sq_norm::add_sq_norm(total, x);
    }
    let _span = kernel_span!("sq_norm", x.dtype(), 0, [x] => []);
    dispatch_float!("sq_norm", x.dtype(), T => {
        total.as_mut_slice::<f64>()?[0] += sq_norm(x.device(), x.as_slice::<T>()?);
    });
    Ok(())
}

fn sq_norm<T: Element>(device: &Device, x: &[T]) -> f64 {
    if device.is_fake() {
        return 0.0; // the sums of blocks would take memory that grows with the model
    }
    let mut blocks = vec![0.0; x.len().div_ceil(BLOCK)];
    for_rows(device, (&mut blocks, 1), x.len(), |first, blocks| {
        for (block, x) in blocks.iter_mut().zip(x[first * BLOCK..].chunks(BLOCK)) {
            *block = sq_norm_block(x);
        }
    });
    blocks.iter().sum()
}

/// Returns whether all elements of a contiguous tensor are finite.
pub fn all_finite(x: &Tensor) -> Result<bool> {
    check_vectors("all_finite", &[x])?;
    if x.device().gpu().is_some() {
        return cuda::sq_norm::all_finite(x);
    }
    dispatch_float!("all_finite", x.dtype(), T => {
        let (device, x) = (x.device(), x.as_slice::<T>()?);
        let finite = AtomicBool::new(true);
        device.for_each(x.len().div_ceil(BLOCK), x.len(), &|block| {
            let end = x.len().min((block + 1) * BLOCK);
            if finite.load(Relaxed) && !all_finite_block(&x[block * BLOCK..end]) {
                finite.store(false, Relaxed);
            }
        });
        Ok(finite.into_inner())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{FLOATS, tensor, values};
    use crate::{Scalar, bf16};

    fn of<T: Scalar>(device: &Device, x: &[T]) -> Tensor {
        Tensor::from_slice(device, x, &[x.len()]).unwrap()
    }

    fn total(x: &Tensor) -> f64 {
        let mut total = Tensor::zeros(x.device(), DType::F64, &[1]).unwrap();
        add_sq_norm(&mut total, x).unwrap();
        total.item().unwrap()
    }

    #[test]
    fn squares_are_summed_in_every_dtype_and_on_any_number_of_threads() {
        for n in [0, 1, 15, BLOCK - 1, 3 * BLOCK + 100] {
            let x = values(n, 1);
            let want: f64 = x.iter().map(|x| x * x).sum(); // exact: multiples of 2^-12
            for threads in [1, 2, 3] {
                let device = Device::cpu(threads).unwrap();
                for dtype in FLOATS {
                    assert_eq!(total(&tensor(&device, dtype, &[n], &x)), want, "{dtype}");
                }
            }
        }
        let device = Device::cpu(1).unwrap();
        assert!((total(&of(&device, &[1e30_f32, 1e-30])) / 1e60 - 1.0).abs() < 1e-7);
        let mut sum = of(&device, &[1.5]);
        add_sq_norm(&mut sum, &of(&device, &[2.0_f32])).unwrap();
        assert_eq!(sum.item().unwrap(), 5.5);
    }

    #[test]
    fn one_bad_element_shows_wherever_it_is() {
        let device = Device::cpu(2).unwrap();
        let mut x = vec![bf16::ONE; 2 * BLOCK + 3];
        assert!(all_finite(&of(&device, &x)).unwrap());
        assert!(all_finite(&of::<f32>(&device, &[])).unwrap());
        for at in [0, 100, BLOCK, 2 * BLOCK + 2] {
            for bad in [bf16::NAN, bf16::INFINITY, bf16::NEG_INFINITY] {
                let good = std::mem::replace(&mut x[at], bad);
                assert!(!all_finite(&of(&device, &x)).unwrap());
                x[at] = good;
            }
        }
    }
}
