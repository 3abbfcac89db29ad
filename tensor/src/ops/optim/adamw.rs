//! AdamW: one fused pass over weights, gradients and moments.
//!
//! As `torch.optim.AdamW` (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019):
//! g = grad_scale * gradient
//! m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g^2
//! w = w (1 - lr * weight_decay) - lr / (1 - beta1^step) * m / (sqrt(v / (1 - beta2^step)) + eps)
//!
//! Computed in `Element::Acc`, from coefficients computed in f64. The update is elementwise, so it does not depend on
//! the number of threads.

pub use super::config::AdamW;
use crate::kernel_span::{bytes, kernel_span};
use crate::numeric::disjoint::Disjoint;
use crate::numeric::prefetch::Stream;
use crate::numeric::simd::vectorized;
use crate::ops::optim::rounded::{Rounded, SharedRounded};
use crate::ops::optim::step::{DeviceStepParams, StepParams, check_vectors, dispatch_update};
use crate::{Element, Error, Real, Result, Tensor, cuda};
use std::ops::Range;

/// Elements per task.
pub(crate) const CHUNK: usize = 16 * 1024;

/// Coefficients of one step, in the accumulator type.
#[derive(Clone, Copy)]
struct Coefficients<A> {
    grad_scale: A,
    beta1: A,
    one_minus_beta1: A,
    beta2: A,
    one_minus_beta2: A,
    keep: A,
    step_size: A,
    inverse_root: A,
    eps: A,
}

/// Updates `weights` from `grads`, and the moments `m` and `v`, which are in the accumulator type. If the weights are
/// too, `copy` receives them rounded.
///
/// Errors if the lengths differ, the dtypes are not supported, or a beta is outside [0, 1).
///
/// ```
/// use ferrotron_tensor::ops::adamw::{AdamW, adamw};
/// use ferrotron_tensor::ops::step::{DeviceStepParams, StepParams};
/// use ferrotron_tensor::{DType, Device, Tensor};
/// let device = Device::cpu(1)?;
/// let config = AdamW { weight_decay: 0.0, ..AdamW::default() };
/// let step = DeviceStepParams::new(&device, &StepParams { update: 1, lr: 0.1, grad_scale: 1.0 })?;
/// let number = |x| Tensor::full(&device, DType::F64, &[1], x);
/// let (mut w, mut m, mut v) = (number(1.0)?, number(0.0)?, number(0.0)?);
/// adamw(&config, &step, &mut w, &number(3.0)?, &mut m, &mut v, None)?;
/// assert!((w.item()? - 0.9).abs() < 1e-8); // the first step is the learning rate, whatever the gradient
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub fn adamw(
    config: &AdamW,
    step: &DeviceStepParams,
    weights: &mut Tensor,
    grads: &Tensor,
    m: &mut Tensor,
    v: &mut Tensor,
    copy: Option<Rounded>,
) -> Result<()> {
    check_vectors("adamw", &[weights, grads, m, v])?;
    let n = weights.numel();
    if [grads.numel(), m.numel(), v.numel()] != [n; 3] {
        let lens = (grads.numel(), m.numel(), v.numel());
        let message =
            format!("{n} weights, {} gradients, moments of {} and {}", lens.0, lens.1, lens.2);
        return Err(Error::shape("adamw", message));
    }
    if let Some(copy) = &copy {
        copy.check("adamw", weights)?;
    }
    let (AdamW { beta1, beta2, .. }, decay) = (*config, 0.0..1.0);
    if !decay.contains(&beta1) || !decay.contains(&beta2) {
        let message = format!("needs betas on [0, 1), got {beta1} and {beta2}");
        return Err(Error::value("adamw", message));
    }
    if weights.device().gpu().is_some() {
        let (nearest, random) = match copy {
            Some(Rounded { target, stochastic: None }) => (Some(target), None),
            other => (None, other),
        };
        cuda::adamw::adamw(config, step.gpu()?, weights, grads, [m, v], nearest)?;
        return random.map_or(Ok(()), |copy| copy.round(weights));
    }
    let Some(numbers) = step.host()? else { return Ok(()) };
    let copied = copy.as_ref().map_or(0, |copy| bytes(copy.target));
    let _span = kernel_span!("adamw", weights.dtype(), 0, [weights, grads, m, v] => [weights, m, v], copied);
    match copy {
        None => dispatch_update!("adamw", weights, grads, (T, G) => {
            step_all::<T, G, T>(config, &numbers, weights, grads.as_slice()?, [m, v], None)
        }),
        Some(copy) => dispatch_update!("adamw", copy.target, grads, (D, G) => {
            let (grads, copy) = (grads.as_slice()?, Some(copy.shared(numbers.update)?));
            step_all::<<D as Element>::Acc, G, D>(config, &numbers, weights, grads, [m, v], copy)
        }),
    }
}

fn step_all<T: Element, G: Element<Acc = T::Acc>, D: Element<Acc = T::Acc>>(
    config: &AdamW,
    numbers: &StepParams,
    weights: &mut Tensor,
    grads: &[G],
    [m, v]: [&mut Tensor; 2],
    copy: Option<SharedRounded<D>>,
) -> Result<()> {
    let AdamW { beta1, beta2, eps, weight_decay } = *config;
    let StepParams { update, lr, grad_scale } = *numbers;
    let power = |beta: f64| beta.powf(update as f64);
    let a = T::Acc::from_f64;
    let coefficients = Coefficients {
        grad_scale: a(grad_scale),
        beta1: a(beta1),
        one_minus_beta1: a(1.0 - beta1),
        beta2: a(beta2),
        one_minus_beta2: a(1.0 - beta2),
        keep: a(1.0 - lr * weight_decay),
        step_size: a(lr / (1.0 - power(beta1))),
        inverse_root: a(1.0 / (1.0 - power(beta2)).sqrt()),
        eps: a(eps),
    };
    let (n, device) = (grads.len(), weights.device().clone());
    let weights = Disjoint::new(weights.as_mut_slice::<T>()?);
    let (m, v) = (Disjoint::new(m.as_mut_slice()?), Disjoint::new(v.as_mut_slice()?));
    device.for_each(n.div_ceil(CHUNK), n, &|task| {
        let start = task * CHUNK;
        let len = CHUNK.min(n - start);
        // SAFETY: tasks take consecutive chunks.
        let (w, m, v) =
            unsafe { (weights.part(start, len), m.part(start, len), v.part(start, len)) };
        let grads = &grads[start..start + len];
        let read = [Stream::new(grads), Stream::new(m), Stream::new(v)];
        let mut step = |at: Range<usize>, w: &mut [T]| {
            step_chunk(w, &grads[at.clone()], &mut m[at.clone()], &mut v[at], &coefficients);
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
        weights: &mut [T],
        grads: &[G],
        m: &mut [T::Acc],
        v: &mut [T::Acc],
        c: &Coefficients<T::Acc>,
    ) {
        let c = *c;
        for (((w, g), m), v) in weights.iter_mut().zip(grads).zip(m).zip(v) {
            *w = T::from_acc(step_element(w.acc(), g.acc(), m, v, &c));
        }
    }
}

/// Updates the moments and returns the updated weight.
#[inline(always)]
fn step_element<A: Real>(w: A, g: A, m: &mut A, v: &mut A, c: &Coefficients<A>) -> A {
    let g = g * c.grad_scale;
    *m = *m * c.beta1 + g * c.one_minus_beta1;
    *v = *v * c.beta2 + g * g * c.one_minus_beta2;
    let root = v.sqrt() * c.inverse_root + c.eps;
    w * c.keep - c.step_size * *m / root
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{bits, message, tensor, values};
    use crate::{DType, Device};

    fn step(device: &Device, update: u64, lr: f64, grad_scale: f64) -> DeviceStepParams {
        DeviceStepParams::new(device, &StepParams { update, lr, grad_scale }).unwrap()
    }

    #[test]
    fn steps_equal_the_loop_of_pytorch() {
        // The loop of torch/optim/adam.py (_single_tensor_adam, decoupled), written out.
        let reference = |w: f64, g: f64| {
            let (mut w, mut m, mut v) = (w, 0.0, 0.0);
            for t in 1..=3 {
                let g = g * t as f64;
                w *= 1.0 - 0.1 * 0.1;
                m += (g - m) * (1.0 - 0.9); // lerp, as torch
                v = v * 0.99 + g * g * (1.0 - 0.99);
                let denominator = f64::sqrt(v) / (1.0 - 0.99_f64.powi(t)).sqrt() + 1e-8;
                w -= 0.1 / (1.0 - 0.9_f64.powi(t)) * (m / denominator);
            }
            w
        };
        let device = Device::cpu(1).unwrap();
        let f64s = |x: &[f64]| tensor(&device, DType::F64, &[x.len()], x);
        let (start, g) = ([1.0, -2.0, 0.5], [0.5, -1.0, 2.0]);
        let want: Vec<f64> = start.iter().zip(&g).map(|(&w, &g)| reference(w, g)).collect();
        let (mut w, mut m, mut v) = (f64s(&start), f64s(&[0.0; 3]), f64s(&[0.0; 3]));
        let config = AdamW { beta2: 0.99, weight_decay: 0.1, ..AdamW::default() };
        for update in 1..=3 {
            // The gradients are doubled at half the scale.
            let g = f64s(&g.map(|g| 2.0 * g * update as f64));
            let step = step(&device, update, 0.1, 0.5);
            adamw(&config, &step, &mut w, &g, &mut m, &mut v, None).unwrap();
        }
        for (w, want) in w.to_f64().unwrap().iter().zip(&want) {
            assert!((w - want).abs() <= 16.0 * f64::EPSILON, "got {w}, want {want}");
        }
    }

    #[test]
    fn sixteen_bit_weights_and_threads_do_not_change_the_moments() {
        let n = 3 * CHUNK + 17;
        let grads = values(n, 1); // multiples of 1/64 that bf16 holds
        let run = |threads| {
            let device = &Device::cpu(threads).unwrap();
            let step = step(device, 2, 0.01, 1.0);
            let full = |dtype, x| Tensor::full(device, dtype, &[n], x).unwrap();
            let updated = |weights, gradients, has_copy: &[DType]| {
                let g = tensor(device, gradients, &[n], &grads);
                let (mut m, mut v) = (full(DType::F32, 0.5), full(DType::F32, 0.25));
                let mut w = full(weights, 1.0);
                let mut copies: Vec<_> = has_copy.iter().map(|&dtype| full(dtype, 7.0)).collect();
                let copy = copies.first_mut().map(Rounded::nearest);
                adamw(&AdamW::default(), &step, &mut w, &g, &mut m, &mut v, copy).unwrap();
                (w, m, v, copies.pop())
            };
            let (w, m, v, _) = updated(DType::F32, DType::F32, &[]);
            for dtype in [DType::BF16, DType::F16] {
                let want = bits(&w.cast(dtype).unwrap());
                for gradients in [dtype, DType::F32] {
                    let (w16, m16, v16, _) = updated(dtype, gradients, &[]);
                    assert!(bits(&m16) == bits(&m) && bits(&v16) == bits(&v) && bits(&w16) == want);
                    let (master, m16, v16, copy) = updated(DType::F32, gradients, &[dtype]);
                    assert!(bits(&m16) == bits(&m) && bits(&v16) == bits(&v));
                    assert!(bits(&master) == bits(&w) && bits(&copy.unwrap()) == want);
                }
            }
            (bits(&w), bits(&m), bits(&v))
        };
        assert!(run(1) == run(2) && run(1) == run(3));
    }

    #[test]
    fn errors_name_the_values() {
        let device = &Device::cpu(1).unwrap();
        let zeros = |n, dtype| Tensor::zeros(device, dtype, &[n]).unwrap();
        let attempt = |config: &AdamW, n: usize, dtype| {
            let (mut w, mut m, mut v) =
                (zeros(2, DType::F32), zeros(2, DType::F32), zeros(2, DType::F32));
            let step = step(device, 1, 0.1, 1.0);
            message(adamw(config, &step, &mut w, &zeros(n, dtype), &mut m, &mut v, None))
        };
        assert_eq!(
            attempt(&AdamW::default(), 3, DType::F32),
            "adamw: 2 weights, 3 gradients, moments of 2 and 2"
        );
        assert_eq!(
            attempt(&AdamW { beta2: 1.0, ..AdamW::default() }, 2, DType::F32),
            "adamw: needs betas on [0, 1), got 0.9 and 1"
        );
        assert_eq!(
            attempt(&AdamW::default(), 2, DType::F64),
            "adamw: f32 weights cannot be updated from f64 gradients"
        );
        let with_copy = |weights, mut copy| {
            let mut w = zeros(2, weights);
            let accumulators = || zeros(2, weights.accumulator());
            let (g, mut m, mut v) = (accumulators(), accumulators(), accumulators());
            let (config, step) = (AdamW::default(), step(device, 1, 0.1, 1.0));
            let result = adamw(
                &config,
                &step,
                &mut w,
                &g,
                &mut m,
                &mut v,
                Some(Rounded::nearest(&mut copy)),
            );
            assert_eq!(m.to_f64().unwrap(), [0.0; 2], "nothing has been updated");
            message(result)
        };
        assert_eq!(with_copy(DType::F32, zeros(1, DType::BF16)), "adamw: 2 weights, copies of 1");
        assert_eq!(
            with_copy(DType::BF16, zeros(2, DType::BF16)),
            "adamw: bf16 goes with f32, got bf16"
        );
        assert_eq!(
            with_copy(DType::F64, zeros(2, DType::F32)),
            "adamw: f32 goes with f32, got f64"
        );
    }
}
