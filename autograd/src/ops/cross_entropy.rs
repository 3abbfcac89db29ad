//! Gradient of the cross-entropy: softmax minus target, written over the logits. It saves the logits, the targets and
//! the log-sum-exp of each row.
//!
//! The value is the **sum** over the valid tokens; the cotangent contains the division by their number.

use ferrotron_tensor::ops::cross_entropy::{
    CrossEntropyConfig, cross_entropy, cross_entropy_backward, num_valid_tokens,
};
use ferrotron_tensor::{Category, Result, Tensor};

use crate::{Backward, Cotangents, InputGrads, Saved, Var, forward_span};

/// A summed loss and its targets.
#[derive(Debug, Clone)]
pub struct Loss {
    /// Sum over the valid tokens, a scalar in the accumulator dtype.
    pub sum: Var,
    pub(super) targets: Tensor,
    pub(super) config: CrossEntropyConfig,
}

impl Loss {
    /// Number of valid tokens. Reads the targets, so it synchronizes with a GPU.
    pub fn num_valid_tokens(&self) -> Result<usize> {
        num_valid_tokens(&self.targets, &self.config)
    }
}

struct CrossEntropyBackward {
    logits: Saved,
    targets: Tensor,
    lse: Tensor,
    config: CrossEntropyConfig,
}

impl Backward for CrossEntropyBackward {
    fn name(&self) -> &'static str {
        "cross_entropy"
    }

    fn saved(&self) -> Vec<Tensor> {
        self.logits
            .resident_tensor()
            .into_iter()
            .chain([&self.targets, &self.lse].map(Tensor::clone))
            .collect()
    }

    fn backward(self: Box<Self>, dy: Cotangents, dx: &mut InputGrads) -> Result<()> {
        let CrossEntropyBackward { logits, targets, lse, config } = *self;
        let value = logits.value()?;
        drop(logits); // so that the logits can be overwritten
        let scale = dy.single()?;
        dx.accumulate(0, cross_entropy_backward(value, &targets, &lse, &config, &scale)?)
    }
}

impl Var {
    /// Cross-entropy of these logits (.., V) against `targets` (..).
    pub fn cross_entropy(&self, targets: &Tensor, config: &CrossEntropyConfig) -> Result<Loss> {
        let _span = forward_span("cross_entropy");
        let found = cross_entropy(self.value(), targets, config)?;
        let sum = Var::record(&[self], found.loss, || {
            found.lse.set_category(Category::Saved);
            let (logits, targets) = (self.save(), targets.clone());
            CrossEntropyBackward { logits, targets, lse: found.lse, config: *config }
        })?;
        Ok(Loss { sum, targets: targets.clone(), config: *config })
    }
}
