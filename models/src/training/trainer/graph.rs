//! Training steps as CUDA graphs: one step is captured, and replayed for equal steps.

use ferrotron_cuda::stream::Event;
use ferrotron_tensor::{CudaGraph, Error, Result};
use std::collections::VecDeque;

use super::Trainer;
use super::config::EAGER_STEPS;
use super::step::Prepared;
use crate::model::stage::Microbatch;

/// Maximum number of replays in flight: more would only delay the end of a run.
const AHEAD: usize = 4;

/// The values that a graph freezes. Other values that change between steps are in device memory.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Frozen {
    microbatches: usize,
    seq_length: usize,
    scale: f64,
    loss_scale: f64,
    tokens: f64,
}

/// A graph for steps with equal frozen values.
pub(super) struct StepGraph {
    frozen: Frozen,
    /// The batches of a step, at fixed addresses.
    microbatches: Vec<Microbatch>,
    /// Number of eager steps so far.
    taken: usize,
    captured: Option<CudaGraph>,
    /// Completion events of the replays in flight.
    under_way: VecDeque<Event>,
}

impl Trainer {
    /// Enqueues a step whose parameters are on the device: eagerly, or as a graph after enough equal steps.
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
                    oldest.synchronize().map_err(Error::from_gpu)?;
                }
                captured.replay(step)?;
                if let Some(gpu) = self.scope.device().gpu() {
                    let done = gpu.compute().record().map_err(Error::from_gpu)?;
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

    /// Enqueues all device work of a step.
    fn take(&mut self, prepared: &Prepared, microbatches: &[Microbatch]) -> Result<()> {
        self.compute(prepared, microbatches)?;
        self.update()
    }
}
