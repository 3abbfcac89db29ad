//! The groups of adjacent pipeline stages.

use ferrotron_tensor::Result;

use crate::collective::Group;

/// Creates the group with a name and these ranks as members.
pub(super) type MakeGroup<'a> = &'a dyn Fn(&str, &[usize]) -> Result<Group>;

/// The groups of adjacent pipeline stages. Each has two ranks and one direction, so that no transfer waits for
/// another. Stages form a ring, for schedules with several chunks per rank.
#[derive(Debug, Clone)]
pub struct PipelineGroups {
    /// Activations from the previous stage.
    pub forward_in: Group,
    /// Activations to the next stage.
    pub forward_out: Group,
    /// Gradients from the next stage.
    pub backward_in: Group,
    /// Gradients to the previous stage.
    pub backward_out: Group,
    /// The first and the last stage, which hold tied embeddings; this rank alone on other stages.
    pub embedding_group: Group,
}

impl PipelineGroups {
    pub(super) fn single() -> PipelineGroups {
        PipelineGroups {
            forward_in: Group::single(),
            forward_out: Group::single(),
            backward_in: Group::single(),
            backward_out: Group::single(),
            embedding_group: Group::single(),
        }
    }

    /// Those of stage `own` of `column`, the ranks of the stages.
    pub(super) fn new(
        column: &[usize],
        own: usize,
        group: MakeGroup<'_>,
    ) -> Result<PipelineGroups> {
        let count = column.len();
        let mut stages = Self::single();
        if count == 1 {
            return Ok(stages);
        }
        // Link by link around the ring, so that all ranks create groups in the same order. With two stages there are
        // two links between the same ranks, with different names.
        for from in 0..count {
            let to = (from + 1) % count;
            let link =
                |name: &str| group(&format!("{name} {from}-{to}"), &[column[from], column[to]]);
            if own == from {
                stages.forward_out = link("pp-forward")?;
                stages.backward_in = link("pp-backward")?;
            } else if own == to {
                stages.forward_in = link("pp-forward")?;
                stages.backward_out = link("pp-backward")?;
            }
        }
        if own == 0 || own == count - 1 {
            stages.embedding_group = group("pp-ends", &[column[0], column[count - 1]])?;
        }
        Ok(stages)
    }
}
