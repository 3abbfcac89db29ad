//! Activation recomputation: the layers and modules that backward recomputes instead of saving.
//!
//! The choices and their names are Megatron-LM's; `docs/memory.md` derives the memory of each.

use std::ops::Range;

/// The recomputation of a model's blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Recompute {
    /// Nothing is recomputed: blocks save all activations that backward needs.
    #[default]
    None,
    /// Modules of every block: Korthikanti et al., arXiv 2205.05198, section 5.
    Selective(RecomputeModules),
    /// Whole blocks, which save only inputs of regions: Chen et al., arXiv 1604.06174.
    Full {
        /// The grouping of blocks into regions.
        method: RecomputeMethod,
        /// Blocks per region, or recomputed blocks per model chunk, depending on the method.
        layers: usize,
        /// Storage of a region's input on tensor-parallel ranks.
        inputs: RegionInputs,
    },
}

/// Storage of a region's input, which is replicated over tensor-parallel ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RegionInputs {
    /// Every rank saves all of it.
    Whole,
    /// Every rank saves a shard of the positions, which backward gathers: ZeRO-R, arXiv 1910.02054, section 6.1. The
    /// input of a pipeline stage, received from the previous stage, is not sharded.
    Distributed,
}

/// The grouping of blocks into recomputed regions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecomputeMethod {
    /// Every `layers` consecutive blocks form a region; the last of a chunk may be shorter.
    Uniform,
    /// The first `layers` blocks of each model chunk are a region each; the others save all activations.
    Block,
}

/// Modules of a block that save only their input and are recomputed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecomputeModules {
    /// Recomputation of attention.
    pub attention: RecomputedAttention,
    /// Recomputation of the MLP.
    pub mlp: RecomputedMlp,
}

/// The recomputed part of attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecomputedAttention {
    /// No part of it.
    None,
    /// Attention between the two linear layers: queries, keys and values are saved; the result and the log-sum-exp
    /// are not.
    Core,
    /// The norm before it, both linear layers, and attention between them.
    Layer,
}

/// The recomputed part of the MLP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecomputedMlp {
    /// No part of it.
    None,
    /// The norm before it, and all of the MLP.
    Layer,
}

/// Number of blocks that recompute each module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RecomputeCount {
    /// Attention between the linear layers.
    pub core: usize,
    /// The linear layers around it.
    pub attention: usize,
    /// The MLP.
    pub mlp: usize,
}

impl RecomputeModules {
    /// No modules.
    pub const NONE: RecomputeModules =
        RecomputeModules { attention: RecomputedAttention::None, mlp: RecomputedMlp::None };
}

impl Recompute {
    /// Full recomputation: every block saves only its input.
    pub const FULL: Recompute = Recompute::Full {
        method: RecomputeMethod::Uniform,
        layers: 1,
        inputs: RegionInputs::Whole,
    };

    /// Selective recomputation of the core of attention only, the default of "selective".
    pub const SELECTIVE: Recompute = Recompute::Selective(RecomputeModules {
        attention: RecomputedAttention::Core,
        mlp: RecomputedMlp::None,
    });

    /// The reason why chunks of at most `blocks` blocks cannot be recomputed like this, in one line; `None` if they
    /// can.
    pub fn unsupported_reason(&self, blocks: usize) -> Option<String> {
        match *self {
            Recompute::Full { layers, .. } if !(1..=blocks).contains(&layers) => Some(format!(
                "recompute-num-layers {layers} is not between 1 and the {blocks} layers of a pipeline stage's chunk"
            )),
            Recompute::Selective(RecomputeModules::NONE) => {
                Some("recompute-granularity selective needs recompute-modules".into())
            }
            _ => None,
        }
    }

    /// The recomputed regions of consecutive blocks, in a chunk of `blocks`.
    pub fn regions(&self, blocks: usize) -> Vec<Range<usize>> {
        let (size, end) = match *self {
            Recompute::Full { method: RecomputeMethod::Uniform, layers, .. } => (layers, blocks),
            Recompute::Full { method: RecomputeMethod::Block, layers, .. } => {
                (1, blocks.min(layers))
            }
            _ => return Vec::new(),
        };
        (0..end).step_by(size).map(|start| start..end.min(start + size)).collect()
    }

    /// Storage of the inputs of regions.
    pub fn inputs(&self) -> RegionInputs {
        match *self {
            Recompute::Full { inputs, .. } => inputs,
            _ => RegionInputs::Whole,
        }
    }

    /// The modules that are regions of their own in every block.
    pub fn modules(&self) -> RecomputeModules {
        match *self {
            Recompute::Selective(modules) => modules,
            _ => RecomputeModules::NONE,
        }
    }

    /// Number of blocks of a chunk of `blocks` that recompute each module.
    pub(crate) fn recompute_count(&self, blocks: usize) -> RecomputeCount {
        let whole = self.regions(blocks).iter().map(ExactSizeIterator::len).sum();
        let counted = |yes: bool| if yes { blocks } else { whole };
        let RecomputeModules { attention, mlp } = self.modules();
        RecomputeCount {
            core: counted(attention != RecomputedAttention::None),
            attention: counted(attention == RecomputedAttention::Layer),
            mlp: counted(mlp == RecomputedMlp::Layer),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_cover_what_they_should_once() {
        let full = |method, layers| Recompute::Full { method, layers, inputs: RegionInputs::Whole };
        let uniform = full(RecomputeMethod::Uniform, 2);
        assert_eq!(uniform.regions(5), [0..2, 2..4, 4..5]);
        assert_eq!(uniform.recompute_count(5), RecomputeCount { core: 5, attention: 5, mlp: 5 });
        let block = full(RecomputeMethod::Block, 2);
        assert_eq!(block.regions(5), [0..1, 1..2]);
        assert_eq!(block.regions(1).len(), 1);
        assert_eq!(block.recompute_count(5), RecomputeCount { core: 2, attention: 2, mlp: 2 });
        assert!(Recompute::SELECTIVE.regions(5).is_empty());
        assert_eq!(
            Recompute::SELECTIVE.recompute_count(5),
            RecomputeCount { core: 5, attention: 0, mlp: 0 }
        );
    }
}
