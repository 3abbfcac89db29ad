//! Training steps as CUDA graphs: one step is captured, and replayed for equal steps.

use ferrotron_cuda::stream::Event;
use ferrotron_parallel::collective::Group;
use ferrotron_tensor::{CudaGraph, Device, Error, Result, Tensor};
use std::collections::VecDeque;

use super::config::EAGER_STEPS;
use crate::training::loss::LossReduction;
use crate::training::microbatch::Microbatch;

/// Maximum number of replays in flight: more would only delay the end of a run.
const AHEAD: usize = 4;

/// The values that a graph freezes. Other values that change between steps are in device memory.
///
/// Ranks have the same: the numbers of elements are sums over them, and the batch size and the length of all samples belong to
/// the configuration. So they capture and replay the same steps.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Frozen {
    pub microbatches: usize,
    pub seq_length: usize,
    pub loss: LossReduction,
}

/// A graph for steps with equal frozen values.
pub(super) struct StepGraph {
    frozen: Frozen,
    /// The batches of a step, at fixed addresses.
    pub microbatches: Vec<Microbatch>,
    /// The sums of several loss terms in the last step, at a fixed address.
    pub terms: TermSums,
    /// Number of eager steps so far.
    taken: usize,
    captured: Option<CudaGraph>,
    /// Completion events of the replays in flight.
    under_way: VecDeque<Event>,
}

/// The sums of several loss terms, which each step writes to the same memory; nothing with one term.
#[derive(Default)]
pub(super) struct TermSums(Option<Tensor>);

impl TermSums {
    /// Writes the sums of a step.
    pub fn set(&mut self, sums: Option<Tensor>) -> Result<()> {
        match (&mut self.0, sums) {
            (Some(fixed), Some(sums)) => fixed.copy_from(&sums),
            (fixed, sums) => {
                *fixed = sums;
                Ok(())
            }
        }
    }

    /// Copies the sums of the last step, behind it on the stream.
    pub fn copy(&self) -> Result<Option<Tensor>> {
        self.0.as_ref().map(Tensor::copy).transpose()
    }
}

/// The way in which the host's part of a step ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Taken {
    /// The step's own code.
    Called,
    /// A replay: nothing of the host's state changed.
    Replayed,
}

impl StepGraph {
    /// A graph that is still to be captured, on the batches of its first step.
    pub fn new(frozen: Frozen, microbatches: Vec<Microbatch>) -> StepGraph {
        let under_way = VecDeque::new();
        let terms = TermSums::default();
        StepGraph { frozen, microbatches, terms, taken: 0, captured: None, under_way }
    }

    /// Whether a step with these values can be replayed.
    pub fn fits(&self, frozen: &Frozen) -> bool {
        self.frozen == *frozen
    }

    /// Enqueues step number `step`, whose parameters and batches are on the device: by calling `take`, or as a graph
    /// after enough equal steps. All ranks of `world` call this.
    pub fn run(
        &mut self,
        device: &Device,
        world: &Group,
        step: u64,
        take: impl FnOnce(&[Microbatch], &mut TermSums) -> Result<()>,
    ) -> Result<Taken> {
        if let Some(captured) = &mut self.captured {
            if self.under_way.len() == AHEAD
                && let Some(oldest) = self.under_way.pop_front()
            {
                oldest.synchronize().map_err(Error::from_gpu)?;
            }
            replay(captured, world, step)?;
            if let Some(gpu) = device.gpu() {
                self.under_way.push_back(gpu.compute().record().map_err(Error::from_gpu)?);
            }
            return Ok(Taken::Replayed);
        }
        if self.taken < EAGER_STEPS {
            take(&self.microbatches, &mut self.terms)?;
            self.taken += 1;
        } else {
            // The eager steps before have allocated the sums, outside of the graph.
            let take = || take(&self.microbatches, &mut self.terms);
            let (mut captured, ()) = CudaGraph::capture(device, take)?;
            replay(&mut captured, world, step)?;
            self.captured = Some(captured);
        }
        Ok(Taken::Called)
    }
}

/// Enqueues a replay, unless a rank is gone, whose part would be waited for.
fn replay(captured: &mut CudaGraph, world: &Group, step: u64) -> Result<()> {
    world.check()?;
    captured.replay(step)?;
    world.watch_replay()
}
