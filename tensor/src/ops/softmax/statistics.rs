//! Maximum, sum of exponentials and sum of a row, in one pass.

use crate::numeric::prefetch;
use crate::numeric::real::fold_lanes;
use crate::numeric::simd::vectorized;
use crate::{Element, Real};

/// Lanes of the sums, whose blocks of [`BLOCK`] elements are combined in f64.
const LANES: usize = 32;
const BLOCK: usize = 1024;

/// Statistics of a row of logits, computed in one pass.
#[derive(Clone, Copy)]
pub(crate) struct RowStatistics<A> {
    /// max_j x_j.
    pub max: A,
    /// sum_j e^(x_j - max).
    pub sum_exp: f64,
    /// sum_j x_j, or 0 without [`WithSum`].
    pub sum: f64,
}

impl<A: Real> RowStatistics<A> {
    /// ln sum_j e^x_j.
    pub(crate) fn log_sum_exp(&self) -> f64 {
        self.max.f64() + self.sum_exp.ln()
    }
}

/// Whether [`row_statistics`] sums the elements: only label smoothing needs that.
pub(crate) trait Summing: 'static {
    const SUMS: bool;
}

/// Sums the elements.
pub(crate) struct WithSum;
impl Summing for WithSum {
    const SUMS: bool = true;
}

/// Leaves the sum at 0.
pub(crate) struct WithoutSum;
impl Summing for WithoutSum {
    const SUMS: bool = false;
}

/// The most by which an element may exceed the shift of the exponentials that are summed. A difference of this size is
/// rounded by 2^-22 at most in f32, and a sum of 32 exponentials is far from the largest number.
const HEADROOM: f64 = 8.0;

/// Statistics of the elements of each lane of a block.
struct LaneStatistics<A> {
    maxima: [A; LANES],
    exps: [A; LANES],
    sums: [A; LANES],
}

impl<A: Real> LaneStatistics<A> {
    #[inline(always)]
    fn add<T: Element<Acc = A>, S: Summing>(&mut self, elements: &[T], shift: A) {
        for (lane, x) in elements.iter().enumerate() {
            let x = x.acc();
            self.maxima[lane] = self.maxima[lane].max(x);
            self.exps[lane] += (x - shift).exp_bounded();
            if S::SUMS {
                self.sums[lane] += x;
            }
        }
    }
}

/// The statistics of a block, with the sum of e^(x_j - shift).
#[inline(always)]
fn block_statistics<T: Element, S: Summing>(block: &[T], shift: T::Acc) -> RowStatistics<T::Acc> {
    let zeros = [T::Acc::ZERO; LANES];
    let maxima = [T::Acc::NEG_INFINITY; LANES];
    let mut lanes = LaneStatistics { maxima, exps: zeros, sums: zeros };
    let (chunks, rest) = block.as_chunks::<LANES>();
    for chunk in chunks {
        prefetch::fetch_ahead(chunk);
        lanes.add::<T, S>(chunk, shift);
    }
    lanes.add::<T, S>(rest, shift);
    RowStatistics {
        max: fold_lanes(lanes.maxima, Real::max),
        sum_exp: fold_lanes(lanes.exps.map(Real::f64), |a, b| a + b),
        sum: fold_lanes(lanes.sums.map(Real::f64), |a, b| a + b),
    }
}

/// The largest element of a block.
#[inline(always)]
fn block_maximum<T: Element>(block: &[T]) -> T::Acc {
    let mut maxima = [T::Acc::NEG_INFINITY; LANES];
    for chunk in block.chunks(LANES) {
        for (max, x) in maxima.iter_mut().zip(chunk) {
            *max = max.max(x.acc());
        }
    }
    fold_lanes(maxima, Real::max)
}

vectorized! {
    /// Reads a row from memory once. The shift is the maximum of an early block. A block whose maximum exceeds it by more than
    /// [`HEADROOM`] sets it anew and is read again.
    pub(crate) fn row_statistics<T: Element, S: Summing>(row: &[T]) -> RowStatistics<T::Acc> {
        let mut all = RowStatistics { max: T::Acc::NEG_INFINITY, sum_exp: 0.0, sum: 0.0 };
        let mut shift = T::Acc::NEG_INFINITY;
        for block in row.chunks(BLOCK) {
            if all.max == T::Acc::NEG_INFINITY {
                shift = block_maximum(block);
            }
            // Where all elements so far are minus infinity, their differences would be NaN.
            let subtracted = if shift == T::Acc::NEG_INFINITY { T::Acc::ZERO } else { shift };
            // The sum of a block far above it is arbitrary.
            let mut found = block_statistics::<T, S>(block, subtracted);
            if (found.max - shift).f64() > HEADROOM {
                all.sum_exp *= (shift - found.max).f64().exp();
                shift = found.max;
                found = block_statistics::<T, S>(block, shift);
            }
            all.max = all.max.max(found.max);
            all.sum_exp += found.sum_exp;
            all.sum += found.sum;
        }
        if all.max > T::Acc::NEG_INFINITY {
            all.sum_exp *= (shift - all.max).f64().exp();
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::softmax::softmax;
    use crate::ops::testing::{FLOATS, assert_close, tensor};
    use crate::{DType, Device, Result, dispatch_float};

    /// Two blocks and a part of one; the last two are `step` and 2 `step` above the first. No number has few digits.
    fn steps(step: f64) -> Vec<f64> {
        let digits = |i: usize| (i as f64 * 0.618_033_988_749).fract() * 2.0 - 1.0;
        (0..2 * BLOCK + 77).map(|i| digits(i) + step * (i / BLOCK) as f64 - 0.123_456_7).collect()
    }

    #[test]
    fn blocks_may_be_far_above_or_below_those_before() -> Result<()> {
        let device = Device::cpu(1)?;
        for step in [0.5, 3.9, 5.9, 7.9, 59.0, 61.0, 5000.0, -5.9, -59.0, -5000.0] {
            for dtype in FLOATS {
                let row = steps(step);
                let x = tensor(&device, dtype, &[row.len()], &row);
                let rounded = x.to_f64().unwrap();
                let max = rounded.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = rounded.iter().map(|x| (x - max).exp()).sum();
                let total: f64 = rounded.iter().sum();
                dispatch_float!("test", dtype, T => {
                    let found = row_statistics::<T, WithSum>(x.as_slice::<T>().unwrap());
                    assert_eq!(found.max.f64(), max, "{dtype} {step}");
                    // The sums of the test are in f64 themselves.
                    let eps = 4.0 * dtype.accumulator().epsilon() + 1e-14;
                    let error = (found.sum_exp - sum).abs() / sum;
                    assert!(error < eps, "{dtype} {step}: got {}, want {sum}", found.sum_exp);
                    let error = (found.sum - total).abs();
                    assert!(error < 32.0 * eps * total.abs(), "{dtype} {step}: {} {total}", found.sum);
                });
                let want: Vec<f64> = rounded.iter().map(|x| (x - max).exp() / sum).collect();
                assert_close("softmax", &softmax(&x, 0).unwrap(), &want, 8.0 * dtype.epsilon());
            }
        }
        Ok(())
    }

    #[test]
    fn infinity_and_nan_show_in_every_block() {
        let device = Device::cpu(1).unwrap();
        for at in [0, BLOCK + 5, 2 * BLOCK + 70] {
            for special in [f64::INFINITY, f64::NAN] {
                let mut row = steps(1.0);
                row[at] = special;
                let y = softmax(&tensor(&device, DType::F32, &[row.len()], &row), 0).unwrap();
                assert!(y.to_f64().unwrap().iter().all(|y| y.is_nan()), "{special} at {at}");
            }
        }
    }
}
