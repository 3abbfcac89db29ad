//! Maximum, sum of exponentials and sum of a row, in one pass.

use crate::numeric::lanes::{max_lanes, sum_lanes};
use crate::numeric::prefetch;
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

/// Sums of the lanes of a block.
struct LaneSums<A> {
    exps: [A; LANES],
    sums: [A; LANES],
}

impl<A: Real> LaneSums<A> {
    #[inline(always)]
    fn add<T: Element<Acc = A>, S: Summing>(
        &mut self,
        elements: &[T],
        maxima: &mut [A; LANES],
        shift: A,
    ) {
        for (lane, x) in elements.iter().enumerate() {
            let x = x.acc();
            maxima[lane] = maxima[lane].max(x);
            self.exps[lane] += (x - shift).exp_bounded();
            if S::SUMS {
                self.sums[lane] += x;
            }
        }
    }

    /// The sums of e^(x_j - shift) and of x_j.
    #[inline(always)]
    fn of_block<T: Element<Acc = A>, S: Summing>(
        block: &[T],
        maxima: &mut [A; LANES],
        shift: A,
    ) -> Self {
        let mut lanes = LaneSums { exps: [A::ZERO; LANES], sums: [A::ZERO; LANES] };
        let (chunks, rest) = block.as_chunks::<LANES>();
        for chunk in chunks {
            prefetch::fetch_ahead(chunk);
            lanes.add::<T, S>(chunk, maxima, shift);
        }
        lanes.add::<T, S>(rest, maxima, shift);
        lanes
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
    max_lanes(maxima)
}

vectorized! {
    /// Reads a row from memory once. The shift is the maximum of an early block. A block whose maximum exceeds it by more than
    /// [`HEADROOM`] sets it anew and is read again. Lanes are combined at the end: while one block's are, the next one waits.
    pub(crate) fn row_statistics<T: Element, S: Summing>(row: &[T]) -> RowStatistics<T::Acc> {
        let mut shift = T::Acc::NEG_INFINITY;
        let mut maxima = [T::Acc::NEG_INFINITY; LANES];
        let (mut exps, mut sums) = ([0.0; LANES], [0.0; LANES]);
        for block in row.chunks(BLOCK) {
            if shift == T::Acc::NEG_INFINITY {
                shift = block_maximum(block);
            }
            // Where all elements so far are minus infinity, their differences would be NaN.
            let subtracted = if shift == T::Acc::NEG_INFINITY { T::Acc::ZERO } else { shift };
            // The sum of a block far above it is arbitrary.
            let mut found = LaneSums::of_block::<T, S>(block, &mut maxima, subtracted);
            let most = shift + T::Acc::from_f64(HEADROOM);
            if maxima.iter().fold(false, |above, &max| above | (max > most)) {
                let max = max_lanes(maxima);
                let shrink = (shift - max).f64().exp();
                exps = exps.map(|sum| sum * shrink);
                shift = max;
                found = LaneSums::of_block::<T, S>(block, &mut maxima, shift);
            }
            for lane in 0..LANES {
                exps[lane] += found.exps[lane].f64();
                sums[lane] += found.sums[lane].f64();
            }
        }
        let max = max_lanes(maxima);
        let sum_exp = sum_lanes(exps);
        let shrink = if max > T::Acc::NEG_INFINITY { (shift - max).f64().exp() } else { 1.0 };
        RowStatistics { max, sum_exp: sum_exp * shrink, sum: sum_lanes(sums) }
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

    /// Asserts the statistics of a row, sums within `ulps`, and its softmax in every dtype.
    fn assert_statistics(what: &str, row: &[f64], ulps: f64) -> Result<()> {
        let device = Device::cpu(1)?;
        for dtype in FLOATS {
            let x = tensor(&device, dtype, &[row.len()], row);
            let rounded = x.to_f64()?;
            let max = rounded.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = rounded.iter().map(|x| (x - max).exp()).sum();
            let total: f64 = rounded.iter().sum();
            dispatch_float!("test", dtype, T => {
                let found = row_statistics::<T, WithSum>(x.as_slice::<T>()?);
                assert_eq!(found.max.f64(), max, "{dtype} {what}");
                // The sums of the test are in f64 themselves.
                let eps = ulps * dtype.accumulator().epsilon() + 1e-14;
                let error = (found.sum_exp - sum).abs() / sum;
                assert!(error < eps, "{dtype} {what}: got {}, want {sum}", found.sum_exp);
                let near = found.sum == total || (found.sum - total).abs() < 32.0 * eps * total.abs();
                assert!(near, "{dtype} {what}: {} {total}", found.sum);
            });
            let want: Vec<f64> = rounded.iter().map(|x| (x - max).exp() / sum).collect();
            assert_close("softmax", &softmax(&x, 0)?, &want, 8.0 * dtype.epsilon());
        }
        Ok(())
    }

    #[test]
    fn blocks_may_be_far_above_or_below_those_before() -> Result<()> {
        for step in [0.5, 3.9, 5.9, 7.9, 59.0, 61.0, 5000.0, -5.9, -59.0, -5000.0] {
            assert_statistics(&format!("steps of {step}"), &steps(step), 4.0)?;
        }
        let mut row = steps(1.0);
        row[BLOCK..2 * BLOCK].fill(f64::NEG_INFINITY);
        assert_statistics("a block of minus infinity", &row, 4.0)
    }

    #[test]
    fn one_lane_may_be_far_above() -> Result<()> {
        for lane in 0..LANES {
            for at in [BLOCK + lane, 2 * BLOCK + lane, 2 * BLOCK + 64 + lane % 13] {
                for spike in [9.5, 61.0, 5000.0] {
                    let mut row = steps(0.0);
                    row[at] = spike;
                    // Next to the spike a lane adds 31 small numbers, each rounded by half a unit.
                    assert_statistics(&format!("{spike} at {at}"), &row, 16.0)?;
                }
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
