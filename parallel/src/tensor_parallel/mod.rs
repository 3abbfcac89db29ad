//! Tensor and sequence parallelism: layers of which every rank along the tensor axis holds a part.
//!
//! Shoeybi et al., arXiv 1909.08053, section 3 (tensor parallel); Korthikanti et al., arXiv 2205.05198,
//! section 4.2 (sequence parallel). A layer in a group of one is the plain layer.
//!
//! ```text
//!               x whole on every rank                        x: every rank has some positions
//!                       |                                                |
//!     copy_to_tp (backward: all-reduce)             gather_from_sp (backward: reduce-scatter)
//!                       |                                                |
//!   ColumnParallelLinear: some outputs                     ColumnParallelLinear
//!                       |                                                |
//!     attention heads, or an activation                   heads, or an activation
//!                       |                                                |
//!    RowParallelLinear: some inputs                          RowParallelLinear
//!                       |                                                |
//!   reduce_from_tp (forward: all-reduce)         reduce_scatter_to_sp (backward: all-gather)
//! ```

mod attention;
mod cross_entropy;
mod embedding;
mod linear;
pub mod mappings;
mod mlp;

pub use attention::ParallelAttention;
pub use embedding::VocabParallelEmbedding;
pub use linear::{ColumnParallelLinear, RowParallelLinear};
pub use mlp::ParallelMlp;

use ferrotron_autograd::Var;
use ferrotron_nn::{Axis, Extent, Scope};
use ferrotron_tensor::{Error, Place, Result, Tensor};
use linear::SEQUENCE;

use crate::collective::{Group, balanced};

/// Whether activations between the parallel layers are cut along the sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SequenceParallel {
    /// Every rank along the tensor axis has a part of the positions.
    On,
    /// Every rank has all of them.
    Off,
}

/// How a layer is spread along the tensor axis.
#[derive(Debug, Clone)]
pub struct TensorParallel {
    group: Group,
    sequence: SequenceParallel,
}

impl TensorParallel {
    /// Layers spread over `group`.
    pub fn new(group: Group, sequence: SequenceParallel) -> TensorParallel {
        TensorParallel { group, sequence }
    }

    /// Plain layers, all on this rank.
    pub fn single() -> TensorParallel {
        TensorParallel::new(Group::single(), SequenceParallel::Off)
    }

    /// The ranks along the tensor axis.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// Whether activations between the layers are cut along the sequence.
    pub fn sequence(&self) -> SequenceParallel {
        self.sequence
    }

    /// The scope of parameters that act on the residual stream: norms, and biases added there. Under
    /// sequence parallelism each rank's gradient is that of its positions.
    pub fn residual_scope(&self, scope: &Scope) -> Scope {
        match self.sequence {
            SequenceParallel::On => scope.clone().with_partial_gradients(Axis::Tensor),
            SequenceParallel::Off => scope.clone(),
        }
    }

    /// The same activation (B, T, ..) of the residual stream, of which those who keep it for backward keep this
    /// rank's positions and gather the others when they need them: partitioned activation checkpoints of ZeRO-R
    /// (Rajbhandari et al., arXiv 1910.02054, section 6.1). For activations that every rank has whole.
    pub fn kept_in_parts(&self, x: Var) -> Result<Var> {
        if self.group.size() == 1 {
            return Ok(x);
        }
        let (group, positions) = (self.group.clone(), x.value().dim(SEQUENCE as isize)?);
        let own = mappings::part(x.value(), SEQUENCE, &group)?.copy()?;
        let gather = move |own: &Tensor| {
            mappings::all_gather_dim(own, SEQUENCE, positions, &group)?.wait()?.contiguous()
        };
        Ok(x.kept_as(own, gather))
    }

    /// The positions of the residual stream that this rank has, of those that attention sees.
    ///
    /// Errors unless, under sequence parallelism, they can be cut evenly.
    pub fn residual(&self, sequence: &Extent) -> Result<Extent> {
        let (positions, ranks) = (sequence.len(), self.group.size());
        match self.sequence {
            SequenceParallel::Off => Ok(sequence.clone()),
            SequenceParallel::On if positions.is_multiple_of(ranks) => {
                Ok(sequence.narrow(self.group.part(positions)))
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

    /// The part of a tensor of `dims` that this rank holds if `dim` is cut. The dim consists of blocks that
    /// are cut each by itself: q, k and v; or gate and up.
    pub fn shard(&self, dims: &[usize], dim: usize, blocks: &[usize]) -> Result<Place> {
        let mut start = 0;
        let own: Vec<(usize, usize)> = blocks
            .iter()
            .map(|&len| {
                let part = balanced(len, self.group.size(), self.group.rank());
                let piece = (start + part.start, part.len());
                start += len;
                piece
            })
            .collect();
        let whole: Vec<[(usize, usize); 1]> = dims.iter().map(|&len| [(0, len)]).collect();
        let pieces: Vec<&[(usize, usize)]> =
            (0..dims.len()).map(|d| if d == dim { &own[..] } else { &whole[d][..] }).collect();
        Place::new(dims, &pieces)
    }
}
