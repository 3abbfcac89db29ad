//! Gradient of the linear layer fused with the cross-entropy behind it, over chunks of tokens.
//!
//! Kept are x, the head's leaf, the log-sum-exp of each token and as many logits as the bound allows;
//! the gradient of the head goes straight into its buffer.

use ferrotron_tensor::ops::cross_entropy::CrossEntropyConfig;
use ferrotron_tensor::ops::linear_cross_entropy::{self, Kept};
use ferrotron_tensor::{Result, Tensor};

use super::cross_entropy::Loss;
use crate::{Backward, Cotangents, Grads, Saved, Var};

impl Var {
    /// Cross-entropy of x W^T against `targets`, for x (.., C) and W (V, C), over chunks of tokens: at
    /// most `max_logits_bytes` of logits are kept for backward, else they are computed again.
    pub fn linear_cross_entropy(
        &self,
        weight: &Var,
        targets: &Tensor,
        config: &CrossEntropyConfig,
        max_logits_bytes: usize,
    ) -> Result<Loss> {
        let width = self.dims().last().copied().unwrap_or(1);
        let rows = self.value().numel() / width.max(1);
        let x = self.reshape(&[rows, width])?;
        let targets = targets.reshape(&[rows])?;
        let (found, kept) = linear_cross_entropy::linear_cross_entropy(
            x.value(),
            weight.value(),
            &targets,
            config,
            max_logits_bytes,
        )?;
        let sum = Var::record(&[&x, weight], found.loss, || LinearCrossEntropyBackward {
            x: x.save(),
            weight: weight.save(),
            targets,
            lse: found.lse,
            kept,
            config: *config,
        })?;
        Ok(Loss { sum, counted: found.counted })
    }
}

struct LinearCrossEntropyBackward {
    x: Saved,
    weight: Saved,
    targets: Tensor,
    lse: Tensor,
    kept: Kept,
    config: CrossEntropyConfig,
}

impl Backward for LinearCrossEntropyBackward {
    fn name(&self) -> &'static str {
        "linear_cross_entropy"
    }

    fn saved(&self) -> Vec<&Tensor> {
        let held = self.x.held().into_iter().chain(self.weight.held());
        held.chain([&self.targets, &self.lse]).chain(self.kept.logits()).collect()
    }

    fn backward(self: Box<Self>, dy: Cotangents, dx: &mut Grads) -> Result<()> {
        let LinearCrossEntropyBackward { x, weight, targets, lse, kept, config } = *self;
        let (scale, x, weight) = (dy.single()?.item()?, x.value()?, weight.value()?);
        let wants_x = dx.needs(0);
        let run = |dweight| {
            linear_cross_entropy::linear_cross_entropy_backward(
                kept, &x, &weight, &targets, &lse, &config, scale, wants_x, dweight,
            )
        };
        let mut to_x = None;
        if dx.needs(1) {
            dx.accumulate(1, |dweight, accum| {
                to_x = run(Some((dweight, accum)))?;
                Ok(())
            })?;
        } else {
            to_x = run(None)?;
        }
        to_x.map_or(Ok(()), |to_x| dx.give(0, to_x))
    }
}
