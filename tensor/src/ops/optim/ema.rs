//! Exponential moving average of weights: a' = decay a + (1 - decay) w. After the first step a' is w, as in
//! `torch.optim.swa_utils.AveragedModel`.
//!
//! Computed in `Element::Acc`, elementwise.

use crate::kernel_span::kernel_span;
use crate::numeric::disjoint::Disjoint;
use crate::numeric::simd::vectorized;
use crate::ops::optim::adamw::CHUNK;
use crate::ops::optim::round::check_pair;
use crate::ops::optim::step::{DeviceStepParams, check_vectors};
use crate::{Element, Error, Real, Result, Tensor, cuda, dispatch_float};

/// Updates `average`, which is in the accumulator type of `weights`; a skipped step leaves it alone.
///
/// Errors if the lengths differ, or the dtypes are not such a pair.
///
/// ```
/// use ferrotron_tensor::ops::ema::ema;
/// use ferrotron_tensor::ops::step::{DeviceStepParams, StepParams};
/// use ferrotron_tensor::{DType, Device, Tensor};
/// let device = Device::cpu(1)?;
/// let (mut average, weights) =
///     (Tensor::zeros(&device, DType::F32, &[2])?, Tensor::full(&device, DType::F32, &[2], 8.0)?);
/// let step = |update| DeviceStepParams::new(&device, &StepParams { update, lr: 0.0, grad_scale: 1.0 });
/// ema(0.75, &step(1)?, &mut average, &weights)?;
/// ema(0.75, &step(2)?, &mut average, &weights.mul_scalar(2.0)?)?;
/// assert_eq!(average.to_vec::<f32>()?, [10.0; 2]);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub fn ema(
    decay: f64,
    step: &DeviceStepParams,
    average: &mut Tensor,
    weights: &Tensor,
) -> Result<()> {
    check_vectors("ema", &[average, weights])?;
    check_pair("ema", weights.dtype(), average.dtype())?;
    if average.numel() != weights.numel() {
        let message = format!("{} weights, averages of {}", weights.numel(), average.numel());
        return Err(Error::shape("ema", message));
    }
    if weights.device().gpu().is_some() {
        return cuda::ema::ema(decay, step.gpu()?, average, weights);
    }
    let Some(numbers) = step.host()? else { return Ok(()) };
    let _span = kernel_span!("ema", weights.dtype(), 0, [weights, average] => [average]);
    let decay = if numbers.update == 1 { 0.0 } else { decay };
    dispatch_float!("ema", weights.dtype(), T => {
        let (device, n) = (weights.device().clone(), weights.numel());
        let [old, new] = [decay, 1.0 - decay].map(<T as Element>::Acc::from_f64);
        let (weights, average) = (weights.as_slice::<T>()?, Disjoint::new(average.as_mut_slice()?));
        device.for_each(n.div_ceil(CHUNK), n, &|task| {
            let start = task * CHUNK;
            let len = CHUNK.min(n - start);
            // SAFETY: tasks take consecutive chunks.
            let average = unsafe { average.part(start, len) };
            average_chunk::<T>(average, &weights[start..start + len], old, new);
        });
    });
    Ok(())
}

vectorized! {
    fn average_chunk<T: Element>(average: &mut [T::Acc], weights: &[T], old: T::Acc, new: T::Acc) {
        for (average, w) in average.iter_mut().zip(weights) {
            *average = *average * old + w.acc() * new;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::optim::step::StepParams;
    use crate::ops::testing::{bits, message, tensor, values};
    use crate::{DType, Device};

    fn step(device: &Device, update: u64) -> DeviceStepParams {
        DeviceStepParams::new(device, &StepParams { update, lr: 0.0, grad_scale: 1.0 }).unwrap()
    }

    #[test]
    fn averages_do_not_depend_on_threads_and_are_exact_for_narrow_weights() {
        let n = 2 * CHUNK + 5;
        let run = |threads, dtype| {
            let device = Device::cpu(threads).unwrap();
            let mut average = Tensor::zeros(&device, DType::F32, &[n]).unwrap();
            for update in 1..=3 {
                let weights = tensor(&device, dtype, &[n], &values(n, update));
                ema(0.9, &step(&device, update), &mut average, &weights).unwrap();
            }
            bits(&average)
        };
        let want = run(1, DType::F32);
        for threads in [1, 2, 3] {
            for dtype in [DType::F32, DType::BF16, DType::F16] {
                assert!(run(threads, dtype) == want, "{dtype}, {threads} threads");
            }
        }
    }

    #[test]
    fn errors_name_the_values() {
        let device = Device::cpu(1).unwrap();
        let zeros = |n, dtype| Tensor::zeros(&device, dtype, &[n]).unwrap();
        let attempt = |n, dtype| {
            message(ema(0.9, &step(&device, 1), &mut zeros(n, dtype), &zeros(2, DType::BF16)))
        };
        assert_eq!(attempt(3, DType::F32), "ema: 2 weights, averages of 3");
        assert_eq!(attempt(2, DType::F64), "ema: bf16 goes with f32, got f64");
    }
}
