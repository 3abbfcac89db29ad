//! Lion: one fused pass over weights, gradients and the momentum.
//!
//! Chen et al., "Symbolic Discovery of Optimization Algorithms", arXiv 2302.06675, algorithm 2:
//! g = grad_scale * gradient
//! w = w (1 - lr * weight_decay) - lr * sign(beta1 m + (1 - beta1) g)
//! m = beta2 m + (1 - beta2) g
//!
//! sign(0) is 0. Computed in `Element::Acc`, from coefficients computed in f64.

pub use super::config::Lion;
use crate::kernel_span::{bytes, kernel_span};
use crate::numeric::disjoint::Disjoint;
use crate::numeric::prefetch::Stream;
use crate::numeric::simd::vectorized;
use crate::ops::optim::adamw::CHUNK;
use crate::ops::optim::rounded::{Rounded, SharedRounded};
use crate::ops::optim::step::{DeviceStepParams, StepParams, check_vectors, dispatch_update};
use crate::{Element, Error, Real, Result, Tensor, cuda};
use std::ops::Range;

/// Coefficients of one step, in the accumulator type.
#[derive(Clone, Copy)]
struct Coefficients<A> {
    grad_scale: A,
    beta1: A,
    one_minus_beta1: A,
    beta2: A,
    one_minus_beta2: A,
    keep: A,
    lr: A,
}

/// Updates `weights` from `grads`, and the momentum `m`, which is in the accumulator type. If the weights are too, `copy`
/// receives them rounded.
///
/// Errors if the lengths differ, or the dtypes are not supported.
///
/// ```
/// use ferrotron_tensor::ops::lion::{Lion, lion};
/// use ferrotron_tensor::ops::step::{DeviceStepParams, StepParams};
/// use ferrotron_tensor::{DType, Device, Tensor};
/// let device = Device::cpu(1)?;
/// let step = DeviceStepParams::new(&device, &StepParams { update: 1, lr: 0.5, grad_scale: 1.0 })?;
/// let number = |x| Tensor::full(&device, DType::F64, &[1], x);
/// let (mut w, mut m) = (number(1.0)?, number(0.0)?);
/// lion(&Lion { weight_decay: 0.0, ..Lion::default() }, &step, &mut w, &number(-3.0)?, &mut m, None)?;
/// assert_eq!(w.item()?, 1.5); // a step has the size of the learning rate, whatever the gradient
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub fn lion(
    config: &Lion,
    step: &DeviceStepParams,
    weights: &mut Tensor,
    grads: &Tensor,
    m: &mut Tensor,
    copy: Option<Rounded>,
) -> Result<()> {
    check_vectors("lion", &[weights, grads, m])?;
    let n = weights.numel();
    if [grads.numel(), m.numel()] != [n; 2] {
        let (grads, m) = (grads.numel(), m.numel());
        let message = format!("{n} weights, {grads} gradients, a momentum of {m}");
        return Err(Error::shape("lion", message));
    }
    if let Some(copy) = &copy {
        copy.check("lion", weights)?;
    }
    if weights.device().gpu().is_some() {
        cuda::lion::lion(config, step.gpu()?, weights, grads, m)?;
        return copy.map_or(Ok(()), |copy| copy.round(weights));
    }
    let Some(numbers) = step.host()? else { return Ok(()) };
    let copied = copy.as_ref().map_or(0, |copy| bytes(copy.target));
    let _span =
        kernel_span!("lion", weights.dtype(), 0, [weights, grads, m] => [weights, m], copied);
    match copy {
        None => dispatch_update!("lion", weights, grads, (T, G) => {
            step_all::<T, G, T>(config, &numbers, weights, grads.as_slice()?, m, None)
        }),
        Some(copy) => dispatch_update!("lion", copy.target, grads, (D, G) => {
            let (grads, copy) = (grads.as_slice()?, Some(copy.shared(numbers.update)?));
            step_all::<<D as Element>::Acc, G, D>(config, &numbers, weights, grads, m, copy)
        }),
    }
}

fn step_all<T: Element, G: Element<Acc = T::Acc>, D: Element<Acc = T::Acc>>(
    config: &Lion,
    numbers: &StepParams,
    weights: &mut Tensor,
    grads: &[G],
    m: &mut Tensor,
    copy: Option<SharedRounded<D>>,
) -> Result<()> {
    let Lion { beta1, beta2, weight_decay } = *config;
    let StepParams { lr, grad_scale, .. } = *numbers;
    let a = T::Acc::from_f64;
    let coefficients = Coefficients {
        grad_scale: a(grad_scale),
        beta1: a(beta1),
        one_minus_beta1: a(1.0 - beta1),
        beta2: a(beta2),
        one_minus_beta2: a(1.0 - beta2),
        keep: a(1.0 - lr * weight_decay),
        lr: a(lr),
    };
    let (n, device) = (grads.len(), weights.device().clone());
    let weights = Disjoint::new(weights.as_mut_slice::<T>()?);
    let m = Disjoint::new(m.as_mut_slice()?);
    device.for_each(n.div_ceil(CHUNK), n, &|task| {
        let start = task * CHUNK;
        let len = CHUNK.min(n - start);
        // SAFETY: tasks take consecutive chunks.
        let (w, m) = unsafe { (weights.part(start, len), m.part(start, len)) };
        let grads = &grads[start..start + len];
        let read = [Stream::new(grads), Stream::new(m)];
        let mut step = |at: Range<usize>, w: &mut [T]| {
            step_chunk(w, &grads[at.clone()], &mut m[at], &coefficients);
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
    fn step_chunk<T: Element, G: Element<Acc = T::Acc>>(
        weights: &mut [T], grads: &[G], m: &mut [T::Acc], c: &Coefficients<T::Acc>,
    ) {
        let c = *c;
        for ((w, g), m) in weights.iter_mut().zip(grads).zip(m) {
            let g = g.acc() * c.grad_scale;
            let direction = sign(*m * c.beta1 + g * c.one_minus_beta1);
            *m = *m * c.beta2 + g * c.one_minus_beta2;
            *w = T::from_acc(w.acc() * c.keep - c.lr * direction);
        }
    }
}

/// 1, -1, or 0 for 0.
#[inline(always)]
fn sign<A: Real>(x: A) -> A {
    let positive = if x > A::ZERO { A::ONE } else { A::ZERO };
    if x < A::ZERO { -A::ONE } else { positive }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{message, tensor, values};
    use crate::{DType, Device};

    #[test]
    fn steps_follow_the_formula_on_any_number_of_threads() {
        let n = 2 * CHUNK + 5;
        let (start, mut grads) = (values(n, 1), values(n, 2));
        grads[3] = 0.0; // neither up nor down in the first step
        let config = Lion { beta1: 0.9, beta2: 0.75, weight_decay: 0.01 };
        let numbers = StepParams { update: 1, lr: 0.125, grad_scale: 0.5 };
        let (mut want, mut momentum) = (start.clone(), vec![0.0; n]);
        for _ in 0..2 {
            for ((w, g), m) in want.iter_mut().zip(&grads).zip(&mut momentum) {
                let mixed: f64 = *m * 0.9 + 0.5 * g * (1.0 - 0.9);
                let direction = if mixed == 0.0 { 0.0 } else { mixed.signum() };
                *w = *w * (1.0 - 0.125 * 0.01) - 0.125 * direction;
                *m = *m * 0.75 + 0.5 * g * (1.0 - 0.75);
            }
        }
        for threads in [1, 2, 3] {
            let device = Device::cpu(threads).unwrap();
            let step = DeviceStepParams::new(&device, &numbers).unwrap();
            let of = |x: &[f64]| tensor(&device, DType::F64, &[x.len()], x);
            let (mut w, mut m, grads) = (of(&start), of(&vec![0.0; n]), of(&grads));
            lion(&config, &step, &mut w, &grads, &mut m, None).unwrap();
            lion(&config, &step, &mut w, &grads, &mut m, None).unwrap();
            let same = w.to_f64().unwrap() == want && m.to_f64().unwrap() == momentum;
            assert!(same, "{threads} threads");
        }
    }

    #[test]
    fn errors_name_the_lengths() {
        let device = Device::cpu(1).unwrap();
        let zeros = |n| Tensor::zeros(&device, DType::F32, &[n]).unwrap();
        let step = StepParams { update: 1, lr: 0.1, grad_scale: 1.0 };
        let step = DeviceStepParams::new(&device, &step).unwrap();
        assert_eq!(
            message(lion(&Lion::default(), &step, &mut zeros(1), &zeros(1), &mut zeros(0), None)),
            "lion: 1 weights, 1 gradients, a momentum of 0"
        );
    }
}
