//! Gradient of the linear layer fused with the cross-entropy behind it, over chunks of tokens.
//!
//! Kept are x, the head's leaf, the log-sum-exp of each token and as many logits as the bound allows;
//! the gradient of the head goes straight into its buffer.

use ferrotron_tensor::ops::cross_entropy::CrossEntropyConfig;
use ferrotron_tensor::ops::linear_cross_entropy::{
    Gradients, InputGradient, KeptLogits, linear_cross_entropy, linear_cross_entropy_backward,
};
use ferrotron_tensor::{Category, Result, Tensor};

use super::cross_entropy::Loss;
use crate::{Accum, Backward, Cotangents, Grads, Saved, Var};

impl Var {
    /// Cross-entropy of x W^T against `targets` (..), for x (.., C) and W (V, C), over chunks of tokens.
    /// Logits of all tokens are kept for backward if they fit into `max_logits_bytes`, else each chunk's
    /// are computed again.
    pub fn linear_cross_entropy(
        &self,
        weight: &Var,
        targets: &Tensor,
        config: &CrossEntropyConfig,
        max_logits_bytes: usize,
    ) -> Result<Loss> {
        let found =
            linear_cross_entropy(self.value(), weight.value(), targets, config, max_logits_bytes)?;
        let sum = Var::record(&[self, weight], found.loss, || {
            found
                .kept
                .logits()
                .into_iter()
                .chain([&found.lse])
                .for_each(|kept| kept.set_category(Category::Saved));
            LinearCrossEntropyBackward {
                x: self.save(),
                weight: weight.save(),
                targets: targets.clone(),
                lse: found.lse,
                kept: found.kept,
                config: *config,
            }
        })?;
        Ok(Loss { sum, counted: found.counted })
    }
}

struct LinearCrossEntropyBackward {
    x: Saved,
    weight: Saved,
    targets: Tensor,
    lse: Tensor,
    kept: KeptLogits,
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
        let input = if dx.needs(0) { InputGradient::Wanted } else { InputGradient::Unwanted };
        let run = |to_weight: Option<(&mut Tensor, Accum)>| {
            let wanted = Gradients { scale, input, weight: to_weight };
            linear_cross_entropy_backward(kept, &x, &weight, &targets, &lse, &config, wanted)
        };
        let to_x = if dx.needs(1) {
            let mut to_x = None;
            dx.accumulate(1, |to_weight, accum| {
                to_x = run(Some((to_weight, accum)))?;
                Ok(())
            })?;
            to_x
        } else {
            run(None)?
        };
        to_x.map_or(Ok(()), |to_x| dx.give(0, to_x))
    }
}
