//! Exchanges with the ranks that hold the other shards of the same parameters.

use ferrotron_tensor::{DType, Error, Result, Tensor};
use std::ops::Range;

/// A kind of sum over ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShardedSum {
    /// Sums of squared gradients by row and column, and of squared weights.
    Squares,
    /// Sums of squared updates.
    Updates,
}

/// Communicates with the ranks that hold the other shards of the same parameters. These ranks make the same calls, with
/// the same number of elements in the same order; no call is made if nothing is sharded.
pub trait ShardExchange {
    /// The sum over the ranks.
    fn sum(&self, what: ShardedSum, tensor: Tensor) -> Result<Tensor>;

    /// The tensor whose shards along `dim`, `len` long in all, the ranks hold, and the range of this rank's `own`.
    fn all_gather(&self, own: &Tensor, dim: usize, len: usize) -> Result<(Tensor, Range<usize>)>;
}

/// The exchange of a rank that knows no others: an error.
pub struct NoExchange;

impl ShardExchange for NoExchange {
    fn sum(&self, _: ShardedSum, _: Tensor) -> Result<Tensor> {
        Err(self.refusal())
    }

    fn all_gather(&self, _: &Tensor, _: usize, _: usize) -> Result<(Tensor, Range<usize>)> {
        Err(self.refusal())
    }
}

impl NoExchange {
    fn refusal(&self) -> Error {
        let message = "parameters are cut between ranks, which have to exchange numbers: use `DataParallel::update`";
        Error::config("optimizer", message)
    }
}

/// The size of one exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExchangeSize {
    /// Number of elements that every rank then has.
    pub numel: usize,
    /// Their dtype.
    pub dtype: DType,
    /// The length of the dim along which ranks hold shards, for an all-gather; `None` for a sum.
    pub gathered_dim: Option<usize>,
}
