//! The blocks of all groups with one rule, before the first update of a step.

use ferrotron_tensor::{Result, Tensor};
use std::ops::Range;

use super::block::Block;
use super::group_state::GroupState;
use super::rule::StepTensors;
use crate::ParamAndGradBucket;

/// The blocks of some groups, in their order.
pub(super) struct GroupTensors<'a> {
    groups: &'a [ParamAndGradBucket],
    unused: &'a [Vec<String>],
    states: &'a mut [GroupState],
    /// The group of each block, its index there, and its elements among those that this rank updates.
    blocks: Vec<(usize, usize, Range<usize>)>,
}

impl<'a> GroupTensors<'a> {
    /// The blocks of the groups `which`.
    pub fn new(
        groups: &'a [ParamAndGradBucket],
        unused: &'a [Vec<String>],
        states: &'a mut [GroupState],
        which: &[usize],
    ) -> GroupTensors<'a> {
        let mut blocks = Vec::new();
        for &group in which {
            let mut start = 0;
            for (index, piece) in states[group].pieces.iter().enumerate() {
                blocks.push((group, index, start..start + piece.numel()));
                start += piece.numel();
            }
        }
        GroupTensors { groups, unused, states, blocks }
    }

    /// The groups of the blocks.
    pub fn groups(&self) -> impl Iterator<Item = usize> {
        self.blocks.iter().map(|(group, ..)| *group)
    }
}

impl StepTensors for GroupTensors<'_> {
    fn len(&self) -> usize {
        self.blocks.len()
    }

    fn block(&self, index: usize) -> &Block {
        let (group, block, _) = &self.blocks[index];
        &self.states[*group].blocks[*block]
    }

    fn is_unused(&self, index: usize) -> bool {
        let name = self.block(index).name();
        self.unused[self.blocks[index].0].iter().any(|unused| unused == name)
    }

    fn gradient(&self, index: usize) -> Result<Tensor> {
        let (group, _, elements) = &self.blocks[index];
        self.groups[*group].with_owned(|_, (gradients, owned)| {
            gradients.slice(owned.start + elements.start..owned.start + elements.end)
        })
    }

    fn weights(&self, index: usize) -> Result<Tensor> {
        let (group, _, elements) = &self.blocks[index];
        match &self.states[*group].master {
            Some(master) => master.flat.slice(elements.clone()),
            None => self.groups[*group].with_owned(|(weights, owned), _| {
                weights.slice(owned.start + elements.start..owned.start + elements.end)
            }),
        }
    }

    fn with_states(
        &mut self,
        index: usize,
        f: &mut dyn FnMut(&mut [&mut Tensor]) -> Result<()>,
    ) -> Result<()> {
        let (group, block, _) = &self.blocks[index];
        self.states[*group].with_states(*block, f)
    }
}
