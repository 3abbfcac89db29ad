//! AdamW: one fused pass over weights, gradients and moments.
//!
//! As `torch.optim.AdamW` (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019):
//! g = grad_scale * gradient
//! m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g^2
//! w = w (1 - lr * weight_decay) - lr / (1 - beta1^step) * m / (sqrt(v / (1 - beta2^step)) + eps)
//!
//! Computed in `Element::Acc`; the coefficients in f64 before. Elements do not depend on one another, so
//! nothing depends on the number of threads.

use crate::disjoint::Disjoint;
use crate::simd::vectorized;
use crate::{Device, Element, Error, Real, Result};

/// Elements a task takes.
pub(crate) const CHUNK: usize = 16 * 1024;

/// One step of AdamW.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// Learning rate of this step.
    pub lr: f64,
    /// Decay of the mean of the gradients.
    pub beta1: f64,
    /// Decay of the mean of their squares.
    pub beta2: f64,
    /// Keeps the quotient finite.
    pub eps: f64,
    /// Share of a weight that is taken off at learning rate 1.
    pub weight_decay: f64,
    /// Number of this step, from 1: the moments begin at 0, and early ones are scaled up.
    pub step: u64,
    /// What the gradients are multiplied with: clip coefficient x inverse loss scale.
    pub grad_scale: f64,
}

impl Default for AdamW {
    /// PyTorch's.
    fn default() -> Self {
        AdamW {
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 1e-2,
            step: 1,
            grad_scale: 1.0,
        }
    }
}

/// The numbers of one step, in the arithmetic of the pass.
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

/// Steps `weights` along `grads`, updating the moments `m` and `v`.
///
/// ```
/// use ferrotron_tensor::{Device, ops::adamw::{AdamW, adamw}};
/// let config = AdamW { lr: 0.1, weight_decay: 0.0, ..AdamW::default() };
/// let (mut w, mut m, mut v) = ([1.0_f64], [0.0], [0.0]);
/// adamw(&Device::cpu(1)?, &config, &mut w, &[3.0], &mut m, &mut v)?;
/// assert!((w[0] - 0.9).abs() < 1e-8); // the first step is the learning rate, whatever the gradient
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
///
/// Errors if the lengths differ, `step` is 0, or a beta is outside of [0, 1).
pub fn adamw<T: Element, G: Element<Acc = T::Acc>>(
    device: &Device,
    config: &AdamW,
    weights: &mut [T],
    grads: &[G],
    m: &mut [T::Acc],
    v: &mut [T::Acc],
) -> Result<()> {
    let AdamW { lr, beta1, beta2, eps, weight_decay, step, grad_scale } = *config;
    let n = weights.len();
    if [grads.len(), m.len(), v.len()] != [n; 3] {
        let message = format!(
            "{n} weights, {} gradients, moments of {} and {}",
            grads.len(),
            m.len(),
            v.len()
        );
        return Err(Error::shape("adamw", message));
    }
    let decay = 0.0..1.0;
    if step == 0 || !decay.contains(&beta1) || !decay.contains(&beta2) {
        let message = format!("needs step >= 1 and betas on [0, 1), got {step}, {beta1}, {beta2}");
        return Err(Error::value("adamw", message));
    }
    let power = |beta: f64| beta.powf(step as f64);
    let a = T::Acc::of;
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
    let (weights, m, v) = (Disjoint::new(weights), Disjoint::new(m), Disjoint::new(v));
    device.for_each(n.div_ceil(CHUNK), n, |task| {
        let start = task * CHUNK;
        let len = CHUNK.min(n - start);
        // SAFETY: tasks take consecutive chunks.
        let (w, m, v) =
            unsafe { (weights.part(start, len), m.part(start, len), v.part(start, len)) };
        step_chunk(w, &grads[start..start + len], m, v, &coefficients);
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
            let g = g.acc() * c.grad_scale;
            *m = *m * c.beta1 + g * c.one_minus_beta1;
            *v = *v * c.beta2 + g * g * c.one_minus_beta2;
            let root = v.sqrt() * c.inverse_root + c.eps;
            *w = T::from_acc(w.acc() * c.keep - c.step_size * *m / root);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bf16;
    use crate::ops::testing::{message, values};

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
        let (mut w, g) = ([1.0, -2.0, 0.5], [0.5, -1.0, 2.0]);
        let want: Vec<f64> = w.iter().zip(&g).map(|(&w, &g)| reference(w, g)).collect();
        let (mut m, mut v) = ([0.0; 3], [0.0; 3]);
        for step in 1..=3 {
            // Twice the gradients at half the scale.
            let g = g.map(|g| 2.0 * g * step as f64);
            let config = AdamW {
                lr: 0.1,
                beta2: 0.99,
                weight_decay: 0.1,
                step,
                grad_scale: 0.5,
                ..AdamW::default()
            };
            adamw(&device, &config, &mut w, &g, &mut m, &mut v).unwrap();
        }
        for (w, want) in w.iter().zip(&want) {
            assert!((w - want).abs() <= 16.0 * f64::EPSILON, "got {w}, want {want}");
        }
    }

    #[test]
    fn sixteen_bit_weights_and_threads_do_not_change_the_moments() {
        let n = 3 * CHUNK + 17;
        let config = AdamW { lr: 0.01, step: 2, ..AdamW::default() };
        let grads: Vec<f32> = values(n, 1).iter().map(|&x| x as f32).collect();
        let halves: Vec<bf16> = grads.iter().map(|&g| bf16::from_f32(g)).collect();
        let run = |threads| {
            let device = Device::cpu(threads).unwrap();
            let (mut w, mut m, mut v) = (vec![1.0_f32; n], vec![0.5; n], vec![0.25; n]);
            adamw(&device, &config, &mut w, &grads, &mut m, &mut v).unwrap();
            let (mut w16, mut m16, mut v16) = (vec![bf16::ONE; n], vec![0.5; n], vec![0.25; n]);
            adamw(&device, &config, &mut w16, &halves, &mut m16, &mut v16).unwrap();
            // The gradients are multiples of 1/64 that bf16 holds.
            assert!(m == m16 && v == v16);
            assert!(w.iter().zip(&w16).all(|(&w, &w16)| bf16::from_f32(w) == w16));
            (w, m, v)
        };
        assert!(run(1) == run(2) && run(1) == run(3));
    }

    #[test]
    fn errors_name_the_values() {
        let device = Device::cpu(1).unwrap();
        let step = |config: &AdamW, n: usize| {
            adamw(&device, config, &mut [0.0; 2], &vec![0.0; n], &mut [0.0; 2], &mut [0.0; 2])
        };
        assert_eq!(
            message(step(&AdamW::default(), 3)),
            "adamw: 2 weights, 3 gradients, moments of 2 and 2"
        );
        assert_eq!(
            message(step(&AdamW { step: 0, beta2: 1.0, ..AdamW::default() }, 2)),
            "adamw: needs step >= 1 and betas on [0, 1), got 0, 0.9, 1"
        );
    }
}
