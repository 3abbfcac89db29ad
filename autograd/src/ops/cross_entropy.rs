//! Gradient of the cross-entropy: softmax minus target, written over the logits.
//!
//! The value is the **sum** over the counted tokens; one over their number enters as the cotangent.

use ferrotron_tensor::ops::cross_entropy::{self, CrossEntropyConfig};
use ferrotron_tensor::{Result, Tensor};

use crate::{Grads, Var};

/// A summed loss and how many tokens it counts.
#[derive(Debug, Clone)]
pub struct Loss {
    /// Sum over the counted tokens, a scalar in the accumulation dtype.
    pub sum: Var,
    /// How many tokens count.
    pub counted: usize,
}

impl Var {
    /// Cross-entropy of these logits (.., V) against `targets` (..).
    pub fn cross_entropy(&self, targets: &Tensor, config: &CrossEntropyConfig) -> Result<Loss> {
        let found = cross_entropy::cross_entropy(self.value(), targets, config)?;
        let sum = Var::record(&[self], found.loss, || {
            let (logits, targets, lse, config) = (self.save(), targets.clone(), found.lse, *config);
            move |dy: Tensor, dx: &mut Grads| {
                let value = logits.value()?;
                drop(logits); // so that the logits can be overwritten
                dx.give(
                    0,
                    cross_entropy::cross_entropy_backward(
                        value,
                        &targets,
                        &lse,
                        &config,
                        dy.item()?,
                    )?,
                )
            }
        })?;
        Ok(Loss { sum, counted: found.counted })
    }
}
