//! The sharding of layers along the tensor axis.

use ferrotron_autograd::Var;
use ferrotron_nn::{Axis, DimShard, Scope};
use ferrotron_tensor::{Error, Result, ShardSpec, Tensor};

use super::mappings;
use crate::collective::{Group, partition_range};

/// The dim of activations (B, T, ..) that sequence parallelism shards.
pub(super) const SEQUENCE: usize = 1;

/// Whether activations on the residual stream are sharded along the sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SequenceParallel {
    /// Every rank along the tensor axis holds some of the positions.
    On,
    /// Every rank holds all positions.
    Off,
}

/// The sharding of layers along the tensor axis.
#[derive(Debug, Clone)]
pub struct TensorParallel {
    pub(super) group: Group,
    pub(super) sequence: SequenceParallel,
}

impl TensorParallel {
    /// Layers sharded over `group`.
    pub fn new(group: Group, sequence: SequenceParallel) -> TensorParallel {
        TensorParallel { group, sequence }
    }

    /// Plain layers on one rank.
    pub fn single() -> TensorParallel {
        TensorParallel::new(Group::single(), SequenceParallel::Off)
    }

    /// The ranks along the tensor axis.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// Whether activations on the residual stream are sharded along the sequence.
    pub fn sequence(&self) -> SequenceParallel {
        self.sequence
    }

    /// The scope of parameters on the residual stream: norms, and biases added there. With sequence parallelism their
    /// gradients are partial, since each rank sees only its positions. A model whose root scope is
    /// [`Mesh::scope`](crate::mesh::Mesh::scope) has these facts everywhere.
    pub fn residual_scope(&self, scope: &Scope) -> Scope {
        match self.sequence {
            SequenceParallel::On => scope.clone().with_partial_gradients(Axis::Tensor),
            SequenceParallel::Off => scope.clone(),
        }
    }

    /// This rank's heads of a bias of attention scores that all ranks hold alike, for a layer of `heads` query heads: dims
    /// that broadcast to (B, H, T, S) -> (.., H / tp, T, S). Layers that share the bias share one call.
    ///
    /// Each rank gets the whole gradient. With sequence parallelism it gets that of its own heads, as parameters
    /// of [`residual_scope`](TensorParallel::residual_scope) expect.
    ///
    /// Errors if the bias has fewer than two dims, or heads other than 1 or `heads`.
    pub fn local_bias(&self, bias: &Var, heads: usize) -> Result<Var> {
        if self.group.size() == 1 {
            return Ok(bias.clone());
        }
        let mut dims = bias.dims().to_vec();
        if dims.len() == 2 {
            dims.insert(0, 1);
        }
        let dim = dims.len().checked_sub(3).filter(|&dim| dims[dim] == 1 || dims[dim] == heads);
        let Some(dim) = dim else {
            let message = format!(
                "a bias must be (.., {heads} heads or 1, T, S) to be cut by heads, got {:?}",
                bias.dims()
            );
            return Err(Error::shape("attention", message));
        };
        let bias = match self.sequence {
            SequenceParallel::On => bias.clone(),
            SequenceParallel::Off => mappings::copy_to_tp(bias, &self.group)?,
        };
        let own = self.group.local_range(heads);
        if dims[dim] == 1 {
            let bias = bias.reshape(&dims)?;
            dims[dim] = own.len();
            return bias.broadcast_to(&dims);
        }
        bias.narrow(dim as isize, own.start, own.len())
    }

    /// Makes consumers of a replicated residual activation (B, T, ..) save only this rank's positions and all-gather
    /// the others in backward. These are the partitioned activation checkpoints of ZeRO-R (Rajbhandari et al., arXiv
    /// 1910.02054, section 6.1).
    pub fn distribute_saved_activation(&self, x: Var) -> Result<Var> {
        if self.group.size() == 1 {
            return Ok(x);
        }
        let (group, positions) = (self.group.clone(), x.value().dim(SEQUENCE as isize)?);
        let own = mappings::local_slice(x.value(), SEQUENCE, &group)?.copy()?;
        let gather = move |own: &Tensor| {
            mappings::all_gather_dim(own, SEQUENCE, positions, &group)?.wait()?.contiguous()
        };
        Ok(x.save_as(own, gather))
    }

    /// This rank's positions on the residual stream, out of the positions of attention.
    ///
    /// Errors if, with sequence parallelism, they cannot be sharded evenly.
    pub fn residual(&self, sequence: &DimShard) -> Result<DimShard> {
        let (positions, ranks) = (sequence.len(), self.group.size());
        match self.sequence {
            SequenceParallel::Off => Ok(sequence.clone()),
            SequenceParallel::On if positions.is_multiple_of(ranks) => {
                Ok(sequence.narrow(self.group.local_range(positions)))
            }
            SequenceParallel::On => Err(Error::config(
                "sequence_parallel",
                format!(
                    "{positions} positions cannot be cut for tensor-model-parallel-size {ranks}: with \
                     sequence-parallel, seq-length / context-parallel-size must be a multiple of it"
                ),
            )),
        }
    }

    /// This rank's shard of a tensor of `dims` along `dim`. The dim consists of blocks that are sharded separately:
    /// q, k and v, or gate and up.
    pub fn shard(&self, dims: &[usize], dim: usize, blocks: &[usize]) -> Result<ShardSpec> {
        let mut start = 0;
        let own: Vec<(usize, usize)> = blocks
            .iter()
            .map(|&len| {
                let part = partition_range(len, self.group.size(), self.group.rank());
                let piece = (start + part.start, part.len());
                start += len;
                piece
            })
            .collect();
        let whole: Vec<[(usize, usize); 1]> = dims.iter().map(|&len| [(0, len)]).collect();
        let pieces: Vec<&[(usize, usize)]> =
            (0..dims.len()).map(|d| if d == dim { &own[..] } else { &whole[d][..] }).collect();
        ShardSpec::new(dims, &pieces)
    }
}
