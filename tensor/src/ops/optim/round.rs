//! Rounds values from the accumulator type to the storage type.
//!
//! - nearest: the nearest representable number, ties to even.
//! - stochastic: of the two representable neighbours low <= x <= high, high with probability (x - low) / (high -
//!   low). The expectation is x, so updates far below the spacing still contribute to the mean (Gupta et al., "Deep
//!   Learning with Limited Numerical Precision", arXiv 1502.02551, section 3.1). Numbers beyond the largest are
//!   rounded to nearest.
//!
//! An element's random number depends on the key and on its index in the global, unsharded tensor: 16 bits for bf16, which
//! are as many as rounding from f32 discards, and 32 for f16, whose subnormal numbers discard more. A representable x is
//! unchanged. No gradient: weights are rounded after the optimizer step, and widened before it if no copy of them
//! is kept in the accumulator type.

use super::at_random::at_random;
use crate::kernel_span::kernel_span;
use crate::numeric::simd::vectorized;
use crate::ops::optim::step::{DeviceStepParams, check_vectors};
use crate::ops::random::for_stretches;
use crate::ops::rows::{CHEAP, for_rows};
use crate::{
    DType, Device, Element, Error, RandomKey, Result, ShardSpec, Tensor, cuda, dispatch_float,
};

/// The source of random numbers for stochastic rounding.
#[derive(Debug, Clone, Copy)]
pub struct Stochastic<'a> {
    /// Seed, step and site.
    pub key: &'a RandomKey,
    /// The shard of the global tensor that is rounded.
    pub place: &'a ShardSpec,
    /// The optimizer step that produced the values, if any. If that step was skipped, nothing is rounded. Its number
    /// replaces the key's step.
    pub step: Option<&'a DeviceStepParams>,
}

/// Rounds `source`, in the accumulator type of `target`, into `target`: to nearest, or stochastically.
///
/// Errors if the lengths differ, or the dtypes are not a pair of storage and accumulator type.
///
/// ```
/// use ferrotron_tensor::ops::round::{Stochastic, round};
/// use ferrotron_tensor::{DType, Device, ShardSpec, RandomKey, Tensor};
/// let device = Device::cpu(1)?;
/// let x = Tensor::full(&device, DType::F32, &[10_000], 1.001)?;
/// let mut y = Tensor::zeros(&device, DType::BF16, &[10_000])?;
/// round(&mut y, &x, None)?;
/// assert!(y.to_f64()?.iter().all(|&y| y == 1.0)); // bf16 has nothing between 1 and 1.0078125
/// let stochastic = Stochastic { key: &RandomKey::new(1, 0, "weight"), place: &ShardSpec::unsharded(&[10_000]), step: None };
/// round(&mut y, &x, Some(stochastic))?;
/// let mean = y.to_f64()?.iter().sum::<f64>() / 10_000.0;
/// assert!((mean - 1.001).abs() < 1e-4);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub fn round(target: &mut Tensor, source: &Tensor, stochastic: Option<Stochastic>) -> Result<()> {
    check_vectors("round", &[target, source])?;
    let numel = stochastic.map_or(source.numel(), |it| it.place.dims().iter().product());
    if [target.numel(), numel] != [source.numel(); 2] {
        let (to, from) = (target.numel(), source.numel());
        let message = format!("{to} elements from {from}, of a place of {numel}");
        return Err(Error::shape("round", message));
    }
    check_pair("round", target.dtype(), source.dtype())?;
    if target.device().gpu().is_some() {
        let Some(Stochastic { key, place, step }) = stochastic else {
            return cuda::round::convert(source, target);
        };
        let step = step.map(DeviceStepParams::gpu).transpose()?;
        return cuda::round::round(target, source, (key, place), step);
    }
    let own; // the key of the optimizer's step
    let stochastic = match stochastic {
        Some(it @ Stochastic { step: Some(step), .. }) => {
            let Some(numbers) = step.host()? else { return Ok(()) };
            own = it.key.at_step(numbers.update);
            Some(Stochastic { key: &own, ..it })
        }
        other => other,
    };
    let _span = kernel_span!("round", source.dtype(), 0, [source] => [target]);
    dispatch_float!("round", target.dtype(), T => {
        let device = target.device().clone();
        round_all::<T>(&device, target.as_mut_slice()?, source.as_slice()?, stochastic);
    });
    Ok(())
}

/// Errors unless `wide` is the accumulator type of `narrow`.
pub(in crate::ops) fn check_pair(op: &'static str, narrow: DType, wide: DType) -> Result<()> {
    let accumulator = narrow.accumulator();
    match wide == accumulator {
        true => Ok(()),
        false => Err(Error::dtype(op, format!("{narrow} goes with {accumulator}, got {wide}"))),
    }
}

fn round_all<T: Element>(
    device: &Device,
    target: &mut [T],
    source: &[T::Acc],
    stochastic: Option<Stochastic>,
) {
    let (width, work) = match stochastic {
        Some(it) => (it.place.dims().last().copied().unwrap_or(1), target.len()),
        None => (1, target.len() / CHEAP),
    };
    for_rows(device, (target, width), work, |first, out| {
        let source = &source[first * width..][..out.len()];
        match stochastic {
            None => to_nearest(out, source),
            Some(Stochastic { key, place, .. }) => {
                for_stretches(place, first, out.len() / width, |global, range| {
                    at_random(key, global, &mut out[range.clone()], &source[range]);
                });
            }
        }
    });
}

/// Widens `source` into `target`, exactly.
///
/// Errors if the lengths differ, or the dtypes are not a pair of storage and accumulator type.
///
/// ```
/// use ferrotron_tensor::{DType, Device, Tensor, ops::round::widen};
/// let device = Device::cpu(1)?;
/// let x = Tensor::full(&device, DType::BF16, &[2], -0.5)?;
/// let mut y = Tensor::zeros(&device, DType::F32, &[2])?;
/// widen(&mut y, &x)?;
/// assert_eq!(y.to_vec::<f32>()?, [-0.5, -0.5]);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub fn widen(target: &mut Tensor, source: &Tensor) -> Result<()> {
    check_vectors("widen", &[target, source])?;
    if target.numel() != source.numel() {
        let message = format!("{} elements from {}", target.numel(), source.numel());
        return Err(Error::shape("widen", message));
    }
    check_pair("widen", source.dtype(), target.dtype())?;
    if target.device().gpu().is_some() {
        return cuda::round::convert(source, target);
    }
    let device = target.device().clone();
    let _span = kernel_span!("widen", source.dtype(), 0, [source] => [target]);
    dispatch_float!("widen", source.dtype(), T => {
        let (target, source) = (target.as_mut_slice()?, source.as_slice::<T>()?);
        for_rows(&device, (target, 1), source.len() / CHEAP, |first, out| {
            to_wide(out, &source[first..][..out.len()]);
        });
    });
    Ok(())
}

vectorized! {
    fn to_wide<T: Element>(target: &mut [T::Acc], source: &[T]) {
        for (target, x) in target.iter_mut().zip(source) {
            *target = x.acc();
        }
    }

    pub(super) fn to_nearest<T: Element, S: Element<Acc = T::Acc>>(target: &mut [T], source: &[S]) {
        for (target, x) in target.iter_mut().zip(source) {
            *target = T::from_acc(x.acc());
        }
    }

}

#[cfg(test)]
mod tests {
    use super::super::at_random::{carried, neighbour};
    use super::*;
    use crate::ops::testing::message;
    use crate::{Scalar, bf16, f16};

    fn vector<T: Scalar>(device: &Device, x: &[T]) -> Tensor {
        Tensor::from_slice(device, x, &[x.len()]).unwrap()
    }

    /// `source` rounded.
    fn rounded<T: Element<Acc = f32>>(
        device: &Device,
        source: &[f32],
        stochastic: Option<Stochastic>,
    ) -> Vec<T> {
        let mut target = Tensor::zeros(device, T::DTYPE, &[source.len()]).unwrap();
        round(&mut target, &vector(device, source), stochastic).unwrap();
        target.to_vec().unwrap()
    }

    fn check<T: Element<Acc = f32> + PartialEq + std::fmt::Debug>() {
        let device = Device::cpu(2).unwrap();
        let key = RandomKey::new(3, 1, "round");
        let epsilon = T::DTYPE.epsilon() as f32;
        // Subnormal to large, of both signs, with zero and representable numbers.
        let smallest = neighbour(T::from_acc(0.0), true).acc();
        for x in [1.0 + 0.3 * epsilon, -3.7 * smallest, 0.25 * smallest, -1.0, 0.0, -300.123, 1e-3]
        {
            let n = 40_000;
            let stochastic =
                Stochastic { key: &key, place: &ShardSpec::unsharded(&[n]), step: None };
            let target: Vec<T> = rounded(&device, &vec![x; n], Some(stochastic));
            let nearest = T::from_acc(x).acc();
            let spacing = (neighbour(T::from_acc(x), true).acc() - nearest).abs();
            let mean = target.iter().map(|y| f64::from(y.acc())).sum::<f64>() / n as f64;
            // Five standard deviations of the mean of numbers that are `spacing` apart.
            let tolerance = 5.0 * 0.5 * f64::from(spacing) / (n as f64).sqrt();
            assert!(
                (mean - f64::from(x)).abs() <= tolerance,
                "{:?}: {x} has mean {mean}",
                T::DTYPE
            );
            assert!(target.iter().all(|y| (y.acc() - x).abs() <= spacing), "{:?}: {x}", T::DTYPE);
            if nearest == x {
                assert!(target.iter().all(|y| y.acc() == x), "{:?}: {x} is storable", T::DTYPE);
            }
        }
    }

    #[test]
    fn the_mean_of_random_roundings_is_the_number() {
        check::<bf16>();
        check::<f16>();
    }

    #[test]
    fn what_is_beyond_all_numbers_is_rounded_to_nearest() {
        fn check<T: Element<Acc = f32>>(beyond: [f32; 4]) {
            let device = Device::cpu(1).unwrap();
            let special = [f32::INFINITY, f32::NAN, f32::from_bits(0x7FFF_FFFF)];
            let positive = beyond.into_iter().chain(special);
            let source: Vec<f32> = positive.flat_map(|x| [x, -x]).collect();
            let place = &ShardSpec::unsharded(&[source.len()]);
            for seed in 0..50 {
                let key = &RandomKey::new(seed, 0, "");
                let target: Vec<T> =
                    rounded(&device, &source, Some(Stochastic { key, place, step: None }));
                for (&x, got) in source.iter().zip(target) {
                    let want = T::from_acc(x);
                    let same = bytemuck::bytes_of(&got) == bytemuck::bytes_of(&want);
                    assert!(same, "{:?}: {x:e} becomes {got}, not {want}", T::DTYPE);
                }
            }
        }
        let largest = bf16::MAX.acc();
        check::<bf16>([largest, 1.001 * largest, 1.003 * largest, f32::MAX]);
        check::<f16>([65_504.0, 65_519.0, 65_521.0, 1e9]);
    }

    #[test]
    fn a_part_is_rounded_as_in_the_whole() {
        let device = Device::cpu(3).unwrap();
        let source: Vec<f32> = (0..70 * 31).map(|i| 1.0 + i as f32 * 1e-5).collect();
        let key = RandomKey::new(9, 4, "blocks.0.weight");
        let all = ShardSpec::unsharded(&[70, 31]);
        let last = ShardSpec::new(&[70, 31], &[&[(50, 20)], &[(0, 31)]]).unwrap();
        let stochastic = |place| Some(Stochastic { key: &key, place, step: None });
        let whole: Vec<bf16> = rounded(&device, &source, stochastic(&all));
        let part: Vec<bf16> = rounded(&device, &source[50 * 31..], stochastic(&last));
        assert_eq!(part, whole[50 * 31..]);
        for (i, (&x, y)) in source.iter().zip(whole).enumerate() {
            assert_eq!(y, carried(x, key.half(i as u64)), "element {i}");
        }
    }

    #[test]
    fn lengths_and_types_must_agree() {
        let device = Device::cpu(1).unwrap();
        let zeros = |dtype, n| Tensor::zeros(&device, dtype, &[n]).unwrap();
        let (mut narrow, mut wide) = (zeros(DType::BF16, 2), zeros(DType::F32, 2));
        let error = round(&mut narrow, &zeros(DType::F32, 1), None);
        assert_eq!(message(error), "round: 2 elements from 1, of a place of 1");
        let error = round(&mut narrow, &zeros(DType::F64, 2), None);
        assert_eq!(message(error), "round: bf16 goes with f32, got f64");
        let error = widen(&mut wide, &zeros(DType::BF16, 1));
        assert_eq!(message(error), "widen: 2 elements from 1");
        let error = widen(&mut wide, &zeros(DType::F64, 2));
        assert_eq!(message(error), "widen: f64 goes with f64, got f32");
    }

    #[test]
    fn what_was_widened_and_rounded_is_what_it_was() {
        let numbers: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
        let source: Vec<bf16> = (0..5).flat_map(|_| numbers.clone()).collect(); // several tasks
        for threads in [1, 3] {
            let device = Device::cpu(threads).unwrap();
            let mut wide = Tensor::zeros(&device, DType::F32, &[source.len()]).unwrap();
            widen(&mut wide, &vector(&device, &source)).unwrap();
            let back: Vec<bf16> = rounded(&device, &wide.to_vec::<f32>().unwrap(), None);
            for (i, (got, want)) in back.iter().zip(&source).enumerate() {
                let same = got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan());
                assert!(same, "{threads} threads, {i}: {got} is not {want}");
            }
        }
    }
}
