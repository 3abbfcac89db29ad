//! What is computed again in backward instead of being kept: which layers, and which parts of them.
//!
//! The choices and their names are Megatron-LM's; `docs/memory.md` derives what each keeps.

use std::ops::Range;

/// What the blocks of a model compute again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Recompute {
    /// Nothing: they keep what backward needs.
    #[default]
    None,
    /// Parts of every block: Korthikanti et al., arXiv 2205.05198, section 5.
    Selective(RecomputeModules),
    /// Whole blocks, of which only inputs are kept: Chen et al., arXiv 1604.06174.
    Full {
        /// How blocks are put into regions.
        method: RecomputeMethod,
        /// How many: of a region, or of each chunk of the model that are regions.
        layers: usize,
        /// What tensor-parallel ranks keep of a region's input.
        inputs: RegionInputs,
    },
}

/// What each tensor-parallel rank keeps of a region's input, which is the same on all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RegionInputs {
    /// All of it.
    Whole,
    /// Some positions, which are gathered in backward: ZeRO-R, arXiv 1910.02054, section 6.1. The input of a
    /// pipeline stage, which the stage before has sent, stays whole.
    Distributed,
}

/// How blocks are put into regions that keep their input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecomputeMethod {
    /// Every so many consecutive blocks are one region; the last of a chunk may be shorter.
    Uniform,
    /// The first so many blocks of each chunk of the model are a region each, the others keep everything.
    Block,
}

/// Parts of a block that keep their input and run forward again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecomputeModules {
    /// What of attention.
    pub attention: RecomputedAttention,
    /// What of the feed-forward part.
    pub mlp: RecomputedMlp,
}

/// What of attention runs forward again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecomputedAttention {
    /// Nothing.
    None,
    /// Between the two linear layers: queries, keys and values are kept, but not the result and the log-sum-exp.
    Core,
    /// The norm before it, both linear layers, and all between.
    Layer,
}

/// What of the feed-forward part runs forward again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecomputedMlp {
    /// Nothing.
    None,
    /// The norm before it, and all of it.
    Layer,
}

/// How many blocks run each part forward twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TwiceRun {
    /// Attention between the linear layers.
    pub core: usize,
    /// The linear layers around it.
    pub attention: usize,
    /// The feed-forward part.
    pub mlp: usize,
}

impl RecomputeModules {
    /// No part.
    pub const NONE: RecomputeModules =
        RecomputeModules { attention: RecomputedAttention::None, mlp: RecomputedMlp::None };
}

impl Recompute {
    /// Every block keeps its input and nothing else.
    pub const FULL: Recompute = Recompute::Full {
        method: RecomputeMethod::Uniform,
        layers: 1,
        inputs: RegionInputs::Whole,
    };

    /// The core of attention alone: what is called selective where nothing more is said.
    pub const SELECTIVE: Recompute = Recompute::Selective(RecomputeModules {
        attention: RecomputedAttention::Core,
        mlp: RecomputedMlp::None,
    });

    /// Why a chunk of `blocks` at most cannot be recomputed like this, in one line; `None` if it can.
    pub fn refusal(&self, blocks: usize) -> Option<String> {
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

    /// The regions of consecutive blocks, of a chunk of `blocks`, that keep nothing but their input.
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

    /// What is kept of the inputs of regions of blocks.
    pub fn inputs(&self) -> RegionInputs {
        match *self {
            Recompute::Full { inputs, .. } => inputs,
            _ => RegionInputs::Whole,
        }
    }

    /// The parts that are regions of their own in every block.
    pub fn modules(&self) -> RecomputeModules {
        match *self {
            Recompute::Selective(modules) => modules,
            _ => RecomputeModules::NONE,
        }
    }

    /// What runs twice of a chunk of `blocks`.
    pub(crate) fn twice_run(&self, blocks: usize) -> TwiceRun {
        let whole = self.regions(blocks).iter().map(ExactSizeIterator::len).sum();
        let counted = |yes: bool| if yes { blocks } else { whole };
        let RecomputeModules { attention, mlp } = self.modules();
        TwiceRun {
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
        assert_eq!(uniform.twice_run(5), TwiceRun { core: 5, attention: 5, mlp: 5 });
        let block = full(RecomputeMethod::Block, 2);
        assert_eq!(block.regions(5), [0..1, 1..2]);
        assert_eq!(block.regions(1).len(), 1);
        assert_eq!(block.twice_run(5), TwiceRun { core: 2, attention: 2, mlp: 2 });
        assert!(Recompute::SELECTIVE.regions(5).is_empty());
        assert_eq!(Recompute::SELECTIVE.twice_run(5), TwiceRun { core: 5, attention: 0, mlp: 0 });
    }
}
