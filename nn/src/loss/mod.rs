//! Losses: cross-entropy per token, squared error, binary cross-entropy and Kullback-Leibler divergence.
//!
//! Values and reductions are those of `torch.nn.functional`. For a language model's head
//! [`Var::linear_cross_entropy`](ferrotron_autograd::Var::linear_cross_entropy) is the fused form: it never has all
//! logits, and returns one sum.

mod cross_entropy;
mod pointwise;

pub use cross_entropy::CrossEntropyLoss;
pub use pointwise::{binary_cross_entropy_with_logits, kl_divergence, mean_squared_error};

use ferrotron_autograd::Var;
use ferrotron_tensor::Result;

/// The reduction of the losses of single elements or tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Reduction {
    /// Keeps each loss.
    None,
    /// The mean, a scalar.
    #[default]
    Mean,
    /// The sum, a scalar: for a trainer, which divides by the number of elements in the
    /// global batch.
    Sum,
}

impl Reduction {
    fn apply(self, losses: Var) -> Result<Var> {
        match self {
            Reduction::None => Ok(losses),
            Reduction::Mean => losses.mean_all(),
            Reduction::Sum => losses.sum_all(),
        }
    }
}
