//! Stochastic gradient descent with momentum: one fused pass.
//!
//! As `torch.optim.SGD` without dampening or Nesterov's variant:
//! g = grad_scale * gradient + weight_decay * w, m = momentum * m + g, w = w - lr m.
//! The momentum buffer begins at 0, which makes the first step the plain gradient as in PyTorch.
//!
//! Computed in `Element::Acc`.

use super::adamw::CHUNK;
use crate::disjoint::Disjoint;
use crate::simd::vectorized;
use crate::{Device, Element, Error, Real, Result};

/// One step of SGD.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sgd {
    /// Learning rate of this step.
    pub lr: f64,
    /// Share of the past step that goes on.
    pub momentum: f64,
    /// Weight of the L2 penalty, which enters through the gradient.
    pub weight_decay: f64,
    /// What the gradients are multiplied with: clip coefficient x inverse loss scale.
    pub grad_scale: f64,
}

/// Steps `weights` along `grads`, updating `buffer`, the momentum. Without momentum the buffer may be empty.
///
/// Errors if the lengths differ.
pub fn sgd<T: Element, G: Element<Acc = T::Acc>>(
    device: &Device,
    config: &Sgd,
    weights: &mut [T],
    grads: &[G],
    buffer: &mut [T::Acc],
) -> Result<()> {
    let n = weights.len();
    let plain = config.momentum == 0.0 && buffer.is_empty();
    if grads.len() != n || !(buffer.len() == n || plain) {
        let message =
            format!("{n} weights, {} gradients, a buffer of {}", grads.len(), buffer.len());
        return Err(Error::shape("sgd", message));
    }
    let Sgd { lr, momentum, weight_decay, grad_scale } = *config;
    let [lr, momentum, decay, scale] = [lr, momentum, weight_decay, grad_scale].map(T::Acc::of);
    // Without momentum the buffer is empty, and so is each of its parts.
    let kept = if plain { 0 } else { CHUNK };
    let (weights, buffer) = (Disjoint::new(weights), Disjoint::new(buffer));
    device.for_each(n.div_ceil(CHUNK), n, |task| {
        let start = task * CHUNK;
        let len = CHUNK.min(n - start);
        let grads = &grads[start..start + len];
        // SAFETY: tasks take consecutive chunks.
        let (w, m) = unsafe { (weights.part(start, len), buffer.part(task * kept, len.min(kept))) };
        if plain {
            plain_chunk(w, grads, lr, decay, scale);
        } else {
            momentum_chunk(w, grads, m, lr, momentum, decay, scale);
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{message, values};

    #[test]
    fn steps_follow_the_formula_on_any_number_of_threads() {
        let n = 2 * CHUNK + 5;
        let (start, grads) = (values(n, 1), values(n, 2));
        let config = Sgd { lr: 0.1, momentum: 0.9, weight_decay: 0.01, grad_scale: 0.5 };
        let (mut want, mut velocity) = (start.clone(), vec![0.0; n]);
        for _ in 0..2 {
            for ((w, g), m) in want.iter_mut().zip(&grads).zip(&mut velocity) {
                *m = 0.9 * *m + (0.5 * g + 0.01 * *w);
                *w -= 0.1 * *m;
            }
        }
        for threads in [1, 2, 3] {
            let device = Device::cpu(threads).unwrap();
            let (mut w, mut m) = (start.clone(), vec![0.0; n]);
            sgd(&device, &config, &mut w, &grads, &mut m).unwrap();
            sgd(&device, &config, &mut w, &grads, &mut m).unwrap();
            assert!(w == want && m == velocity, "{threads} threads");
            let plain = Sgd { momentum: 0.0, ..config };
            let (mut a, mut b, mut m) = (start.clone(), start.clone(), vec![0.0; n]);
            sgd(&device, &plain, &mut a, &grads, &mut m).unwrap();
            sgd(&device, &plain, &mut b, &grads, &mut []).unwrap();
            assert!(a == b);
        }
    }

    #[test]
    fn errors_name_the_lengths() {
        let device = Device::cpu(1).unwrap();
        let config = Sgd { lr: 0.1, momentum: 0.9, weight_decay: 0.0, grad_scale: 1.0 };
        assert_eq!(
            message(sgd(&device, &config, &mut [0.0_f32], &[0.0_f32], &mut [])),
            "sgd: 1 weights, 1 gradients, a buffer of 0"
        );
    }
}
