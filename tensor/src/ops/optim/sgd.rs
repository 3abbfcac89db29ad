//! Stochastic gradient descent with momentum: one fused pass.
//!
//! As `torch.optim.SGD` without dampening:
//! g = grad_scale * gradient + weight_decay * w, m = momentum * m + g, w = w - lr m,
//! or, in Nesterov's form, w = w - lr (g + momentum * m).
//! The momentum buffer starts at 0, so the first step is the plain gradient, as in PyTorch.
//!
//! Computed in `Element::Acc`.

pub use super::config::{Nesterov, Sgd};
use crate::kernel_span::{bytes, kernel_span};
use crate::numeric::disjoint::Disjoint;
use crate::numeric::prefetch::Stream;
use crate::numeric::simd::vectorized;
use crate::ops::optim::adamw::CHUNK;
use crate::ops::optim::rounded::{Rounded, SharedRounded};
use crate::ops::optim::step::{DeviceStepParams, StepParams, check_vectors, dispatch_update};
use crate::{Element, Error, Real, Result, Tensor, cuda};
use std::ops::Range;

/// Updates `weights` from `grads`, and the momentum `buffer`, which is in the accumulator type. Without momentum the
/// buffer may be empty. If the weights are in the accumulator type too, `copy` receives them rounded.
///
/// Errors if the lengths differ, or the dtypes are not supported.
pub fn sgd(
    config: &Sgd,
    step: &DeviceStepParams,
    weights: &mut Tensor,
    grads: &Tensor,
    buffer: &mut Tensor,
    copy: Option<Rounded>,
) -> Result<()> {
    check_vectors("sgd", &[weights, grads, buffer])?;
    let n = weights.numel();
    let plain = config.momentum == 0.0 && buffer.numel() == 0;
    if grads.numel() != n || !(buffer.numel() == n || plain) {
        let message =
            format!("{n} weights, {} gradients, a buffer of {}", grads.numel(), buffer.numel());
        return Err(Error::shape("sgd", message));
    }
    if let Some(copy) = &copy {
        copy.check("sgd", weights)?;
    }
    if weights.device().gpu().is_some() {
        cuda::sgd::sgd(config, step.gpu()?, weights, grads, buffer)?;
        return copy.map_or(Ok(()), |copy| copy.round(weights));
    }
    let Some(numbers) = step.host()? else { return Ok(()) };
    let copied = copy.as_ref().map_or(0, |copy| bytes(copy.target));
    let _span = kernel_span!("sgd", weights.dtype(), 0, [weights, grads, buffer] => [weights, buffer], copied);
    match copy {
        None => dispatch_update!("sgd", weights, grads, (T, G) => {
            step_all::<T, G, T>(config, &numbers, weights, grads.as_slice()?, buffer, None)
        }),
        Some(copy) => dispatch_update!("sgd", copy.target, grads, (D, G) => {
            let (grads, copy) = (grads.as_slice()?, Some(copy.shared(numbers.update)?));
            step_all::<<D as Element>::Acc, G, D>(config, &numbers, weights, grads, buffer, copy)
        }),
    }
}

fn step_all<T: Element, G: Element<Acc = T::Acc>, D: Element<Acc = T::Acc>>(
    config: &Sgd,
    numbers: &StepParams,
    weights: &mut Tensor,
    grads: &[G],
    buffer: &mut Tensor,
    copy: Option<SharedRounded<D>>,
) -> Result<()> {
    let (n, plain, device) = (grads.len(), buffer.numel() == 0, weights.device().clone());
    let StepParams { lr, grad_scale, .. } = *numbers;
    let Sgd { momentum, weight_decay, nesterov } = *config;
    let [lr, momentum, decay, scale] =
        [lr, momentum, weight_decay, grad_scale].map(T::Acc::from_f64);
    let weights = weights.as_mut_slice::<T>()?;
    let buffer = buffer.as_mut_slice()?;
    // Without momentum the buffer and each chunk of it are empty.
    let kept = if plain { 0 } else { CHUNK };
    let (weights, buffer) = (Disjoint::new(weights), Disjoint::new(buffer));
    device.for_each(n.div_ceil(CHUNK), n, &|task| {
        let start = task * CHUNK;
        let len = CHUNK.min(n - start);
        let grads = &grads[start..start + len];
        // SAFETY: tasks take consecutive chunks.
        let (w, m) = unsafe { (weights.part(start, len), buffer.part(task * kept, len.min(kept))) };
        let read = [Stream::new(grads), Stream::new(m)];
        let mut step = |at: Range<usize>, w: &mut [T]| {
            let g = &grads[at.clone()];
            if plain {
                plain_chunk(w, g, lr, decay, scale);
            } else if nesterov == Nesterov::On {
                nesterov_chunk(w, g, &mut m[at], lr, momentum, decay, scale);
            } else {
                momentum_chunk(w, g, &mut m[at], lr, momentum, decay, scale);
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
    fn plain_chunk<T: Element, G: Element<Acc = T::Acc>>(
        weights: &mut [T], grads: &[G], lr: T::Acc, decay: T::Acc, scale: T::Acc,
    ) {
        for (w, g) in weights.iter_mut().zip(grads) {
            let g = g.acc() * scale + w.acc() * decay;
            *w = T::from_acc(w.acc() - lr * g);
        }
    }

    fn momentum_chunk<T: Element, G: Element<Acc = T::Acc>>(
        weights: &mut [T], grads: &[G], buffer: &mut [T::Acc],
        lr: T::Acc, momentum: T::Acc, decay: T::Acc, scale: T::Acc,
    ) {
        for ((w, g), m) in weights.iter_mut().zip(grads).zip(buffer) {
            *m = *m * momentum + (g.acc() * scale + w.acc() * decay);
            *w = T::from_acc(w.acc() - lr * *m);
        }
    }

    fn nesterov_chunk<T: Element, G: Element<Acc = T::Acc>>(
        weights: &mut [T], grads: &[G], buffer: &mut [T::Acc],
        lr: T::Acc, momentum: T::Acc, decay: T::Acc, scale: T::Acc,
    ) {
        for ((w, g), m) in weights.iter_mut().zip(grads).zip(buffer) {
            let g = g.acc() * scale + w.acc() * decay;
            *m = *m * momentum + g;
            *w = T::from_acc(w.acc() - lr * (g + *m * momentum));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{message, tensor, values};
    use crate::{DType, Device};

    #[test]
    fn steps_follow_the_formula_on_any_number_of_threads() {
        let n = 2 * CHUNK + 5;
        let (start, grads) = (values(n, 1), values(n, 2));
        let numbers = StepParams { update: 1, lr: 0.1, grad_scale: 0.5 };
        let (off, on) = (Nesterov::Off, Nesterov::On);
        for (threads, nesterov) in [(1, off), (2, off), (3, off), (1, on), (2, on), (3, on)] {
            let config = Sgd { momentum: 0.9, weight_decay: 0.01, nesterov };
            let (mut want, mut velocity) = (start.clone(), vec![0.0; n]);
            for _ in 0..2 {
                for ((w, g), m) in want.iter_mut().zip(&grads).zip(&mut velocity) {
                    let g = 0.5 * g + 0.01 * *w;
                    *m = 0.9 * *m + g;
                    *w -= 0.1 * if nesterov == Nesterov::On { g + *m * 0.9 } else { *m };
                }
            }
            let device = Device::cpu(threads).unwrap();
            let step = DeviceStepParams::new(&device, &numbers).unwrap();
            let of = |x: &[f64]| tensor(&device, DType::F64, &[x.len()], x);
            let (mut w, mut m, grads) = (of(&start), of(&vec![0.0; n]), of(&grads));
            sgd(&config, &step, &mut w, &grads, &mut m, None).unwrap();
            sgd(&config, &step, &mut w, &grads, &mut m, None).unwrap();
            let same = w.to_f64().unwrap() == want && m.to_f64().unwrap() == velocity;
            assert!(same, "{threads} threads, Nesterov {nesterov:?}");
            let plain = Sgd { momentum: 0.0, ..config };
            let (mut a, mut b, mut m) = (of(&start), of(&start), of(&vec![0.0; n]));
            sgd(&plain, &step, &mut a, &grads, &mut m, None).unwrap();
            sgd(&plain, &step, &mut b, &grads, &mut of(&[]), None).unwrap();
            assert_eq!(a.to_f64().unwrap(), b.to_f64().unwrap());
        }
    }

    #[test]
    fn errors_name_the_lengths() {
        let device = Device::cpu(1).unwrap();
        let zeros = |n| Tensor::zeros(&device, DType::F32, &[n]).unwrap();
        let step = StepParams { update: 1, lr: 0.1, grad_scale: 1.0 };
        let step = DeviceStepParams::new(&device, &step).unwrap();
        let config = Sgd { momentum: 0.9, weight_decay: 0.0, nesterov: Nesterov::Off };
        assert_eq!(
            message(sgd(&config, &step, &mut zeros(1), &zeros(1), &mut zeros(0), None)),
            "sgd: 1 weights, 1 gradients, a buffer of 0"
        );
    }
}
