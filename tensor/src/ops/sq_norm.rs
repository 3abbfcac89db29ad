//! The local halves of gradient clipping and loss scaling: the sum of squares of a flat slice, and whether
//! all of it is finite.
//!
//! sq_norm = sum_i x_i^2, accumulated in f64 (squares of any f32 fit) in 16 lanes within blocks of 16384
//! elements, which are added in order: the result does not depend on the number of threads. No gradient.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::rows::for_rows;
use crate::simd::vectorized;
use crate::{Device, Element, Real};

const BLOCK: usize = 16 * 1024;
const LANES: usize = 16;

vectorized! {
    pub(crate) fn sq_norm_block<T: Element>(x: &[T]) -> f64 {
        let mut lanes = [0.0_f64; LANES];
        let chunks = x.chunks_exact(LANES);
        let rest = chunks.remainder();
        for chunk in chunks {
            for (lane, x) in lanes.iter_mut().zip(chunk) {
                let x = x.acc().f64();
                *lane += x * x;
            }
        }
        for (lane, x) in lanes.iter_mut().zip(rest) {
            let x = x.acc().f64();
            *lane += x * x;
        }
        lanes.into_iter().sum()
    }

    /// Looks at every element: leaving early would be a branch in the loop.
    fn all_finite_block<T: Element>(x: &[T]) -> bool {
        let mut finite = true;
        for x in x {
            finite &= x.acc().is_finite();
        }
        finite
    }
}

/// Sum of the squares.
///
/// ```
/// use ferrotron_tensor::{Device, ops::sq_norm::sq_norm};
/// assert_eq!(sq_norm(&Device::cpu(1)?, &[3.0_f32, 4.0]), 25.0);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub fn sq_norm<T: Element>(device: &Device, x: &[T]) -> f64 {
    let mut blocks = vec![0.0; x.len().div_ceil(BLOCK)];
    for_rows(device, (&mut blocks, 1), x.len(), |first, blocks| {
        for (block, x) in blocks.iter_mut().zip(x[first * BLOCK..].chunks(BLOCK)) {
            *block = sq_norm_block(x);
        }
    });
    blocks.iter().sum()
}

/// Whether no element is infinite or NaN.
pub fn all_finite<T: Element>(device: &Device, x: &[T]) -> bool {
    let finite = AtomicBool::new(true);
    device.for_each(x.len().div_ceil(BLOCK), x.len(), |block| {
        let end = x.len().min((block + 1) * BLOCK);
        if finite.load(Relaxed) && !all_finite_block(&x[block * BLOCK..end]) {
            finite.store(false, Relaxed);
        }
    });
    finite.into_inner()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::values;
    use crate::{bf16, f16};

    #[test]
    fn squares_are_summed_in_every_dtype_and_on_any_number_of_threads() {
        for n in [0, 1, 15, BLOCK - 1, 3 * BLOCK + 100] {
            let x = values(n, 1);
            let want: f64 = x.iter().map(|x| x * x).sum(); // exact: multiples of 2^-12
            for threads in [1, 2, 3] {
                let device = Device::cpu(threads).unwrap();
                assert_eq!(sq_norm(&device, &x), want);
                let single: Vec<f32> = x.iter().map(|&x| x as f32).collect();
                assert_eq!(sq_norm(&device, &single), want);
                let half: Vec<f16> = x.iter().map(|&x| f16::from_f64(x)).collect();
                assert_eq!(sq_norm(&device, &half), want);
            }
        }
        let device = Device::cpu(1).unwrap();
        assert!((sq_norm(&device, &[1e30_f32, 1e-30]) / 1e60 - 1.0).abs() < 1e-7);
    }

    #[test]
    fn one_bad_element_shows_wherever_it_is() {
        let device = Device::cpu(2).unwrap();
        let mut x = vec![bf16::ONE; 2 * BLOCK + 3];
        assert!(all_finite(&device, &x) && all_finite::<f32>(&device, &[]));
        for at in [0, 100, BLOCK, 2 * BLOCK + 2] {
            for bad in [bf16::NAN, bf16::INFINITY, bf16::NEG_INFINITY] {
                let good = std::mem::replace(&mut x[at], bad);
                assert!(!all_finite(&device, &x));
                x[at] = good;
            }
        }
    }
}
