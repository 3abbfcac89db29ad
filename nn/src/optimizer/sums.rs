//! Sums over the ranks that hold the other shards of the same parameters.

use ferrotron_tensor::{DType, Result, Tensor};

/// A kind of sum over ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShardedSum {
    /// Sums of squared gradients by row and column, and of squared weights.
    Squares,
    /// Sums of squared updates.
    Updates,
    /// Shards of a tensor among zeros: their sum is the whole tensor.
    Shards,
}

/// All-reduces a sum over the ranks that hold the other shards of the same parameters: see
/// [`Optimizer::step_with`](super::Optimizer::step_with).
pub type ReduceSums<'a> = dyn FnMut(ShardedSum, Tensor) -> Result<Tensor> + 'a;

/// The size of one sum over ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartSum {
    /// Number of elements.
    pub numel: usize,
    /// Their dtype.
    pub dtype: DType,
}
