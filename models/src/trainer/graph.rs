//! Steps as CUDA graphs: what the device does in one is captured once, and replayed for those that are like it.

use ferrotron_cuda::stream::Event;
use ferrotron_tensor::{CudaGraph, Error, Result};
use std::collections::VecDeque;

use super::Trainer;
use super::config::EAGER_STEPS;
use super::step::Prepared;
use crate::stage::Microbatch;

/// Replays that a GPU has before it at most: more would only make a run's end come later.
const AHEAD: usize = 4;

/// Every number of a step that a graph keeps. What else changes from step to step lies in memory of the device.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Frozen {
    microbatches: usize,
    seq_length: usize,
    scale: f64,
    loss_scale: f64,
    tokens: f64,
}

/// Steps that are alike.
pub(super) struct StepGraph {
    frozen: Frozen,
    /// Each step's batches, in the same memory.
    microbatches: Vec<Microbatch>,
    /// Steps that were taken as they are.
    taken: usize,
    captured: Option<CudaGraph>,
    /// When the last replays are done.
    under_way: VecDeque<Event>,
}

impl Trainer {
    /// Gives the device a step whose numbers it has already: as it is, or as a graph if enough were like it.
    pub(super) fn take_as_graph(&mut self, prepared: &Prepared) -> Result<()> {
        let frozen = Frozen {
            microbatches: prepared.batches.len(),
            seq_length: prepared.batches.first().map_or(0, |batch| batch.seq_length),
            scale: prepared.scale,
            loss_scale: prepared.loss_scale,
            tokens: prepared.tokens,
        };
        let mut graph = match self.graph.take().filter(|graph| graph.frozen == frozen) {
            Some(mut graph) => {
                for (microbatch, batch) in graph.microbatches.iter_mut().zip(&prepared.batches) {
                    microbatch.set(&self.mesh, batch, self.context(prepared, batch))?;
                }
                graph
            }
            None => {
                let microbatches = self.microbatches(prepared)?;
                StepGraph {
                    frozen,
                    microbatches,
                    taken: 0,
                    captured: None,
                    under_way: VecDeque::new(),
                }
            }
        };
        let step = self.progress.step; // of the random numbers
        match &mut graph.captured {
            Some(captured) => {
                if graph.under_way.len() == AHEAD
                    && let Some(oldest) = graph.under_way.pop_front()
                {
                    oldest.synchronize().map_err(Error::of_gpu)?;
                }
                captured.replay(step)?;
                if let Some(gpu) = self.scope.device().gpu() {
                    let done = gpu.compute().record().map_err(Error::of_gpu)?;
                    graph.under_way.push_back(done);
                }
                self.optimizer.count_step(self.data_parallel.buffers());
            }
            None if graph.taken < EAGER_STEPS => {
                self.take(prepared, &graph.microbatches)?;
                graph.taken += 1;
            }
            None => {
                let device = self.scope.device().clone();
                let take = || self.take(prepared, &graph.microbatches);
                let (mut captured, ()) = CudaGraph::capture(&device, take)?;
                captured.replay(step)?;
                graph.captured = Some(captured);
            }
        }
        self.graph = Some(graph);
        Ok(())
    }

    /// All of a step that the device does.
    fn take(&mut self, prepared: &Prepared, microbatches: &[Microbatch]) -> Result<()> {
        self.compute(prepared, microbatches)?;
        self.update()
    }
}
