//! The layout of a run's ranks along the four axes, and the resulting groups.

mod scope;
mod stages;
mod threads;

use ferrotron_nn::{Axis, AxisSet, Context};
use ferrotron_tensor::{Device, Error, Result};
use std::convert::Infallible;
use std::sync::Arc;

use crate::collective::{Collective, Group, NcclConfig, NcclGroups, World};
use crate::context_parallel::ContextParallel;
use crate::tensor_parallel::{SequenceParallel, TensorParallel};
use stages::MakeGroup;
pub use stages::PipelineGroups;

/// The sizes of the axes. Ranks are numbered with tensor fastest, then context, data and pipeline, as in
/// Megatron-LM's order "tp-cp-dp-pp", so that ranks which communicate most are adjacent.
///
/// ```
/// use ferrotron_nn::{Axis, AxisSet, Context};
/// use ferrotron_parallel::mesh::ParallelDims;
/// let layout = ParallelDims::new(16, 2, 1, 4)?; // 16 ranks: tp 2, cp 1, pp 4, and what remains is dp 2
/// assert_eq!(layout.size(Axis::Data), 2);
/// assert_eq!(layout.ranks(0, AxisSet::from([Axis::Pipeline])), [0, 4, 8, 12]);
/// assert_eq!(layout.ranks(3, AxisSet::from([Axis::Data])), [1, 3]);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParallelDims {
    sizes: [usize; 4],
}

impl ParallelDims {
    /// The layout of `world` ranks with these sizes of the tensor, context and pipeline axes; the data axis gets the
    /// remaining factor.
    ///
    /// Errors if a size is 0 or their product does not divide `world`.
    pub fn new(
        world: usize,
        tensor: usize,
        context: usize,
        pipeline: usize,
    ) -> Result<ParallelDims> {
        let model =
            [tensor, context, pipeline].iter().try_fold(1_usize, |n, &size| n.checked_mul(size));
        match model {
            Some(model) if model > 0 && world > 0 && world.is_multiple_of(model) => {
                Ok(ParallelDims { sizes: [tensor, context, world / model, pipeline] })
            }
            _ => Err(Error::config(
                "layout",
                format!(
                    "{world} ranks cannot be laid out: tensor-model-parallel-size {tensor} x context-parallel-size \
                     {context} x pipeline-model-parallel-size {pipeline} must divide them"
                ),
            )),
        }
    }

    /// The layout of one rank.
    pub fn single() -> ParallelDims {
        ParallelDims { sizes: [1; 4] }
    }

    /// Number of ranks.
    pub fn world(&self) -> usize {
        self.sizes.iter().product()
    }

    /// Number of ranks along an axis.
    pub fn size(&self, axis: Axis) -> usize {
        self.sizes[axis as usize]
    }

    /// The coordinate of `rank` on an axis.
    pub fn coordinate(&self, rank: usize, axis: Axis) -> usize {
        rank / self.stride(axis) % self.size(axis)
    }

    /// The ranks that differ from `rank` along `axes` only, itself included, in ascending order.
    pub fn ranks(&self, rank: usize, axes: AxisSet) -> Vec<usize> {
        let same = |other: usize, axis: Axis| {
            axes.contains(axis) || self.coordinate(other, axis) == self.coordinate(rank, axis)
        };
        (0..self.world()).filter(|&other| Axis::ALL.iter().all(|&axis| same(other, axis))).collect()
    }

    fn stride(&self, axis: Axis) -> usize {
        self.sizes[..axis as usize].iter().product()
    }
}

/// Name of the group of all ranks.
const WORLD: &str = "world";

/// Name of the group of the ranks over which gradients are summed.
const DP_CP: &str = "dp-cp";

/// The groups of one rank in a layout.
#[derive(Debug, Clone)]
pub struct Mesh {
    layout: ParallelDims,
    rank: usize,
    sequence: SequenceParallel,
    axes: [Group; 4],
    dp_cp: Group,
    world: Group,
    pipeline_groups: PipelineGroups,
}

impl Mesh {
    /// The mesh of a single rank.
    pub fn single() -> Mesh {
        Mesh {
            layout: ParallelDims::single(),
            rank: 0,
            sequence: SequenceParallel::Off,
            axes: std::array::from_fn(|_| Group::single()),
            dp_cp: Group::single(),
            world: Group::single(),
            pipeline_groups: PipelineGroups::single(),
        }
    }

    /// Creates the groups of this rank of `world`. All ranks must call this with the same arguments.
    ///
    /// Errors if the layout has another number of ranks.
    pub fn new(world: &World, layout: ParallelDims, sequence: SequenceParallel) -> Result<Mesh> {
        if layout.world() != world.size() {
            let message = format!("{layout:?} is not of {} ranks", world.size());
            return Err(Error::config("mesh", message));
        }
        let group = |name: &str, ranks: &[usize]| match name {
            WORLD => world.everyone(),
            _ => world.group(name, ranks),
        };
        Self::with_groups(layout, world.rank(), sequence, &group)
    }

    /// Creates fake groups of rank `rank` of a layout without other ranks: every call completes immediately and
    /// leaves its memory unchanged. For [fake devices](ferrotron_tensor::Device::fake), which estimate the rank's
    /// memory.
    ///
    /// Errors if there is no such rank.
    pub fn fake(layout: ParallelDims, rank: usize, sequence: SequenceParallel) -> Result<Mesh> {
        if rank >= layout.world() {
            let message = format!("{layout:?} has no rank {rank}");
            return Err(Error::config("mesh", message));
        }
        let group = |name: &str, ranks: &[usize]| {
            let own = ranks.iter().position(|&other| other == rank).unwrap_or(0);
            Ok(Group::fake(name, own, ranks.len()))
        };
        Self::with_groups(layout, rank, sequence, &group)
    }

    fn with_groups(
        layout: ParallelDims,
        rank: usize,
        sequence: SequenceParallel,
        group: MakeGroup<'_>,
    ) -> Result<Mesh> {
        // Axes of the same ranks share a group, and so the queue of their calls. Calls within layers and small ones of a
        // step would wait there for gradients and weights: `tp`, `cp` and `dp-cp` have queues of their own.
        let mut shared: Vec<(Vec<usize>, Group)> = Vec::new();
        let mut along = |name: &str, axes: AxisSet| {
            let ranks = layout.ranks(rank, axes);
            if ["tp", "cp", DP_CP].contains(&name) {
                return group(name, &ranks);
            }
            if let Some((_, known)) = shared.iter().find(|(known, _)| *known == ranks) {
                return Ok(known.named(name));
            }
            let new = group(name, &ranks)?;
            shared.push((ranks, new.clone()));
            Ok::<_, Error>(new)
        };
        Ok(Mesh {
            world: along(WORLD, AxisSet::from(Axis::ALL))?,
            layout,
            rank,
            sequence,
            axes: [
                along("tp", AxisSet::from([Axis::Tensor]))?,
                along("cp", AxisSet::from([Axis::Context]))?,
                along("dp", AxisSet::from([Axis::Data]))?,
                along("pp", AxisSet::from([Axis::Pipeline]))?,
            ],
            dp_cp: along(DP_CP, AxisSet::from([Axis::Context, Axis::Data]))?,
            pipeline_groups: PipelineGroups::new(
                &layout.ranks(rank, AxisSet::from([Axis::Pipeline])),
                layout.coordinate(rank, Axis::Pipeline),
                group,
            )?,
        })
    }

    /// The sizes of the axes.
    pub fn layout(&self) -> &ParallelDims {
        &self.layout
    }

    /// This rank's global number.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The ranks along one axis.
    pub fn axis(&self, axis: Axis) -> &Group {
        &self.axes[axis as usize]
    }

    /// The ranks along data and context, which have other samples or positions: gradients are summed over them.
    pub fn dp_cp(&self) -> &Group {
        &self.dp_cp
    }

    /// All ranks.
    pub fn world(&self) -> &Group {
        &self.world
    }

    /// The channels between pipeline stages.
    pub fn stages(&self) -> &PipelineGroups {
        &self.pipeline_groups
    }

    /// Whether activations on the residual stream are sharded along the sequence.
    pub fn sequence(&self) -> SequenceParallel {
        self.sequence
    }

    /// The sharding of sequences along the context axis.
    pub fn context_parallel(&self) -> ContextParallel {
        ContextParallel::new(self.axis(Axis::Context).clone())
    }

    /// Restricts the context of a pass over whole sequences to this rank's positions in attention and on the residual
    /// stream.
    ///
    /// Errors if they cannot be sharded evenly.
    pub fn context(&self, mut whole: Context) -> Result<Context> {
        whole.sequence = self.context_parallel().sequence(whole.sequence.global)?;
        whole.residual = self.tensor_parallel().residual(&whole.sequence)?;
        Ok(whole)
    }

    /// The same mesh with every collective replaced by the result of `wrap`, for example to trace it.
    #[must_use]
    pub fn map_collectives(
        &self,
        wrap: &dyn Fn(Arc<dyn Collective>) -> Arc<dyn Collective>,
    ) -> Mesh {
        let Ok(mesh) =
            self.map_groups(|group, _, _| Ok::<_, Infallible>(group.map_collectives(wrap)));
        mesh
    }

    /// The same mesh, whose calls on tensors of `device`, a GPU that no other rank has, NCCL carries out: one after another, in
    /// the order in which this rank makes them. All ranks must call this, each with its device. Groups of the same ranks
    /// share a communicator, and the channels between stages have that of all stages.
    ///
    /// Errors, naming the remedy, if NCCL is missing; if the others do not come within the timeout.
    pub fn with_nccl(&self, device: &Device, config: &NcclConfig) -> Result<Mesh> {
        if self.layout.world() == 1 {
            return Ok(self.clone());
        }
        let mut nccl = NcclGroups::new(device, config)?;
        self.map_groups(|group, members, all| nccl.group(group, members, all))
    }

    /// The same mesh with every group replaced by the result of `one`, in an order in which the ranks of each group can make
    /// the new one together. `one` gets a group, its ranks, and those of an earlier group or this one that contain them: for
    /// a channel between two stages those of all stages.
    ///
    /// Errors as `one` does.
    pub fn map_groups<E>(
        &self,
        mut one: impl FnMut(&Group, &[usize], &[usize]) -> std::result::Result<Group, E>,
    ) -> std::result::Result<Mesh, E> {
        let ranks = |axes: AxisSet| self.layout.ranks(self.rank, axes);
        let mut along = |group: &Group, ranks: &[usize]| one(group, ranks, ranks);
        let [tensor, context, data, pipeline] = &self.axes;
        let column = ranks(AxisSet::from([Axis::Pipeline]));
        let axes = [
            along(tensor, &ranks(AxisSet::from([Axis::Tensor])))?,
            along(context, &ranks(AxisSet::from([Axis::Context])))?,
            along(data, &ranks(AxisSet::from([Axis::Data])))?,
            along(pipeline, &column)?,
        ];
        let dp_cp = along(&self.dp_cp, &ranks(AxisSet::from([Axis::Context, Axis::Data])))?;
        let world = along(&self.world, &ranks(AxisSet::from(Axis::ALL)))?;
        // Link by link around the ring, in the order of creation.
        let mut stages = self.pipeline_groups.clone();
        let (own, count) = (self.layout.coordinate(self.rank, Axis::Pipeline), column.len());
        for out in [own == 0, own != 0] {
            let (from, [forward, backward]) = match out {
                true => (own, [&mut stages.forward_out, &mut stages.backward_in]),
                false => (own + count - 1, [&mut stages.forward_in, &mut stages.backward_out]),
            };
            let link = [from, from + 1].map(|stage| column[stage % count]);
            *forward = one(forward, &link, &column)?;
            *backward = one(backward, &link, &column)?;
        }
        let ends = [column[0], column[count - 1]];
        stages.embedding_group = one(&stages.embedding_group, &ends, &ends)?;
        let (layout, rank, sequence) = (self.layout, self.rank, self.sequence);
        Ok(Mesh { layout, rank, sequence, axes, dp_cp, world, pipeline_groups: stages })
    }

    /// The sharding of layers along the tensor axis.
    pub fn tensor_parallel(&self) -> TensorParallel {
        TensorParallel::new(self.axis(Axis::Tensor).clone(), self.sequence)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks every group of every axis set against the definition: ranks as digits in the mixed radix of the sizes.
    #[test]
    fn ranks_are_those_of_megatron() {
        for (tensor, context, data, pipeline) in
            [(2, 1, 2, 4), (1, 2, 3, 2), (4, 2, 1, 1), (1, 1, 1, 8), (2, 2, 2, 2)]
        {
            let world = tensor * context * data * pipeline;
            let layout = ParallelDims::new(world, tensor, context, pipeline).unwrap();
            let mut rank = 0;
            for p in 0..pipeline {
                for d in 0..data {
                    for c in 0..context {
                        for t in 0..tensor {
                            let want = [t, c, d, p];
                            let got = Axis::ALL.map(|axis| layout.coordinate(rank, axis));
                            assert_eq!(got, want, "rank {rank} of {layout:?}");
                            rank += 1;
                        }
                    }
                }
            }
            for axis in Axis::ALL {
                let mut seen = vec![0; world];
                for rank in 0..world {
                    let group = layout.ranks(rank, AxisSet::from([axis]));
                    assert_eq!(group.len(), layout.size(axis));
                    assert_eq!(group[layout.coordinate(rank, axis)], rank);
                    group.iter().for_each(|&member| seen[member] += 1);
                }
                assert!(seen.iter().all(|&count| count == layout.size(axis)));
            }
        }
    }

    #[test]
    fn sizes_that_do_not_fit_are_refused() {
        for (world, tensor, context, pipeline) in
            [(0, 1, 1, 1), (4, 3, 1, 1), (4, 0, 1, 1), (4, 2, 2, 2), (8, usize::MAX, 2, 1)]
        {
            let error =
                ParallelDims::new(world, tensor, context, pipeline).unwrap_err().to_string();
            assert!(error.contains(&format!("tensor-model-parallel-size {tensor}")), "{error}");
        }
    }

    /// A call along `dp-cp` that waits for another rank holds up none of the groups with the same ranks.
    #[test]
    fn other_calls_do_not_wait_for_gradients() {
        for (context, axis) in [(2, Axis::Context), (1, Axis::Data)] {
            let layout = ParallelDims::new(2, 1, context, 1).unwrap();
            Mesh::run_threads(layout, |mesh| {
                // Ranks compare the places of their calls: this one.
                let call = |group: &Group| group.barrier();
                let gradients = (mesh.rank() == 0).then(|| call(mesh.dp_cp()));
                for other in [mesh.axis(axis), mesh.world()] {
                    call(other).wait()?;
                }
                gradients.unwrap_or_else(|| call(mesh.dp_cp())).wait()
            })
            .unwrap();
        }
    }
}
