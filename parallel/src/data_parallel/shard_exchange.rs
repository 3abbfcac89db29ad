//! The exchanges of optimizers that need whole tensors, along the tensor axis.

use ferrotron_nn::shard_exchange::{ShardExchange, ShardedSum};
use ferrotron_tensor::{Result, Tensor};
use std::ops::Range;

use crate::collective::{Group, Reduction};
use crate::tensor_parallel::mappings::all_gather_dim;

/// The ranks along the tensor axis.
pub(super) struct TensorAxis<'a>(pub &'a Group);

impl ShardExchange for TensorAxis<'_> {
    fn sum(&self, what: ShardedSum, tensor: Tensor) -> Result<Tensor> {
        match what {
            // Separate call sites: error messages and tests identify collectives by their line.
            ShardedSum::Squares => self.0.all_reduce(tensor, Reduction::Sum)?.wait(),
            ShardedSum::Updates => self.0.all_reduce(tensor, Reduction::Sum)?.wait(),
        }
    }

    fn all_gather(&self, own: &Tensor, dim: usize, len: usize) -> Result<(Tensor, Range<usize>)> {
        Ok((all_gather_dim(own, dim, len, self.0)?.wait()?, self.0.local_range(len)))
    }
}
