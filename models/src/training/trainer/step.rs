//! A training step, from the samples to the updated weights, and reading its results.

use ferrotron_nn::{Axis, Context, StepConfig};
use ferrotron_parallel::collective::{Group, Reduction, waited_during};
use ferrotron_parallel::pipeline::{PipelineConfig, PipelineSchedule, execute};
use ferrotron_tensor::ops::outcome::{CheckStepConfig, OverflowPolicy, StepSums, check_step};
use ferrotron_tensor::{Error, Result, Tensor};
use std::time::Instant;
use tracing::{Span, trace_span};

use super::begin::{BegunStep, StepBatch};
use super::graph::{Frozen, StepGraph, Taken};
use super::outcome::Outcome;
use super::report::InFlightStep;
use super::{ExecutionMode, Microbatch, Model, StepReport, Trainer};
use crate::io::data::{Batch, Samples};
use crate::training::stage::StageModel;

impl<M: Model> Trainer<M> {
    /// Takes one step over the next global batch of `samples`, and synchronizes.
    ///
    /// If the loss scale is dynamic and gradients overflow, weights and moments are unchanged, but the step counts
    /// and its samples are consumed.
    ///
    /// With asynchronous updates it applies all that are outstanding, so that none is missed by the next step.
    ///
    /// With [`ExecutionMode::CudaGraph`] the first steps are eager, the next one is captured, and later ones replay it.
    /// Replays need the same number of micro-batches, sample length and number of valid tokens. A step that differs
    /// starts over.
    ///
    /// # Errors
    /// Errors on every rank, without changing weights or moments, if the step is [bad](super::BadStepConfig): the loss is
    /// not finite, or, with a constant loss scale, the gradient norm of any replica. The message names the step and the
    /// first parameter that is not finite. With [`OnBadStep::Skip`](super::OnBadStep::Skip) such a step counts and is
    /// reported.
    ///
    /// Without a flush of the pipeline it takes [`Trainer::steps_at_once`] steps, and returns the report of the last one.
    pub fn step(&mut self, samples: &dyn Samples) -> Result<StepReport> {
        let started = Instant::now();
        self.step_async(samples)?;
        let waits = !self.outstanding.is_empty();
        self.drain_updates(samples)?;
        let mut reports = self.drain_reports(samples)?;
        if let Some(report) = reports.last_mut().filter(|_| waits) {
            report.seconds = started.elapsed().as_secs_f64();
        }
        reports.pop().ok_or_else(|| Error::value("train", "the step has no report"))
    }

    /// Like [`Trainer::step`], without synchronizing with a GPU: the step is enqueued after the previous ones. Its
    /// results are in [`Trainer::drain_reports`], which should be called periodically.
    ///
    /// It synchronizes if the host needs the results: if replicas take independent steps or bad steps are skipped, and
    /// whenever 1024 steps are unread. Ranks that share a GPU or have no NCCL synchronize in each collective.
    ///
    /// A GPU adapts a dynamic loss scale by itself. Until reports are read, [`Trainer::progress`] and the optimizer's number
    /// of steps count steps that it has skipped as if they were applied.
    ///
    /// Reports must be read before a checkpoint is saved: one of the steps may have failed.
    ///
    /// Errors as [`Trainer::drain_reports`], if it synchronizes, and behind steps without a flush that have failed until a
    /// checkpoint is [loaded](Trainer::load).
    pub fn step_async(&mut self, samples: &dyn Samples) -> Result<()> {
        let _span = self.span().entered();
        let begun = self.begin_step(samples, &mut [])?;
        self.take_begun(begun, samples)
    }

    /// Like [`Trainer::step_async`], with samples that [`Trainer::begin_step`] has read of `samples`.
    ///
    /// Errors as [`Trainer::step_async`], and if another step was taken or loaded since.
    pub fn take_step(&mut self, begun: BegunStep, samples: &dyn Samples) -> Result<()> {
        let _span = self.span().entered();
        self.take_begun(begun, samples)
    }

    fn span(&self) -> Span {
        trace_span!("step", step = self.progress.step + 1)
    }

    fn take_begun(&mut self, begun: BegunStep, samples: &dyn Samples) -> Result<()> {
        self.check_window("train")?;
        let BegunStep { started, batch, waited } = begun;
        let alone = !self.reports.is_unread() && self.versions.is_none();
        let (steps, data) = (self.progress.step, self.times.data);
        let (taken, waited_since) = waited_during(|| match (batch, self.versions.take()) {
            (Some(batch), _) => self.train_step(batch, samples, started),
            (None, None) => self.launch_step(samples, started),
            (None, Some(mut versions)) => {
                let taken = self.train_window(&mut versions, samples, started);
                self.versions = Some(versions);
                taken
            }
        });
        taken?;
        self.times.steps += self.progress.step.saturating_sub(steps);
        self.times.communication += waited + waited_since;
        let elsewhere = waited + waited_since + (self.times.data - data);
        self.times.compute += started.elapsed().saturating_sub(elsewhere);
        let seconds = started.elapsed().as_secs_f64();
        if let Some(step) = self.outstanding.back_mut() {
            step.seconds = seconds;
            return Ok(());
        }
        // For steps that are read together, only the mean duration is known.
        if let Some(report) = self.reports.last().filter(|_| alone) {
            report.seconds = seconds;
        }
        Ok(())
    }

    /// Synchronizes and returns the reports of the steps since the last call, in order.
    ///
    /// # Errors
    /// Errors on every rank if a step's loss or gradient norm is not finite, as [`Trainer::step`]. Later steps had no
    /// effect, and the trainer is in its state before the failed step. If there were later steps, the failed one is
    /// repeated over `samples`, without an update, to find the first parameter that is not finite. Reports of earlier
    /// steps are in [`Trainer::completed_reports`].
    pub fn drain_reports(&mut self, samples: &dyn Samples) -> Result<Vec<StepReport>> {
        self.read(samples)?;
        Ok(self.completed_reports())
    }

    /// Returns the reports already read back, without synchronizing: after an error, those of earlier steps.
    pub fn completed_reports(&mut self) -> Vec<StepReport> {
        self.reports.take()
    }

    /// One step, enqueued on the device.
    fn train_step(
        &mut self,
        batch: StepBatch,
        samples: &dyn Samples,
        started: Instant,
    ) -> Result<()> {
        // Of this rank's samples, the number of elements of each loss term over all ranks is known.
        let (begun, now) = (batch.first_sample, self.progress.consumed_samples);
        if begun != now {
            let message = format!(
                "the step was begun at sample {begun}, and the trainer is at {now}: begin it anew"
            );
            return Err(Error::graph("train", message));
        }
        self.times.add_data(batch.data_seconds);
        if self.reads_before(batch.global_batch_size as u64) {
            self.read(samples)?;
        }
        let step = self.in_flight(&batch, started);
        // Step number and learning rate, where the optimizer's kernels read them.
        self.write_step_params()?;
        let graph = self.captures_steps();
        // In memory throughout the step, as those of a graph are.
        let microbatches = if graph { Vec::new() } else { self.upload(&batch)? };
        let sums = match graph {
            // All that follows, with the update, as one graph, which the host does not read in between.
            true => self.run_graph(&batch)?,
            false => {
                // Forward and backward in the order of the pipeline schedule; gradients are reduced on the way.
                let sums = self.forward_backward(&batch, &microbatches)?;
                // The norm of all gradients decides, on the device, whether the step is applied and how it is clipped.
                self.check_gradients(&batch, sums)?
            }
        };
        self.reports.push(InFlightStep { sums, ..step });
        if self.host_decides() {
            self.read(samples)?;
        }
        let outcome = self.judge()?;
        if outcome == Outcome::Applied && !graph {
            self.update()?;
        }
        self.advance(batch.global_batch_size as u64, outcome);
        Ok(())
    }

    /// The host's record of the step.
    pub(super) fn in_flight(&self, batch: &StepBatch, started: Instant) -> InFlightStep {
        let rows = batch.batches.first().map_or(1, Batch::rows_per_sample);
        InFlightStep {
            lr: self.optimizer.numbers(&self.step_config()).lr,
            loss_scale: self.loss_scaler.scale(),
            samples: batch.global_batch_size as u64,
            tokens: (batch.global_batch_size * rows * batch.pass.sequence.global) as u64,
            started,
            data_seconds: batch.data_seconds,
            loss: batch.loss.clone(),
            sums: None,
            before: self.progress.clone(),
            updates: self.optimizer.steps(),
            staleness: Vec::new(),
        }
    }

    /// The schedule's learning rate. The gradient scale is computed on the device.
    pub(super) fn step_config(&self) -> StepConfig {
        let launched = self.optimizer.steps() + self.outstanding.len() as u64;
        StepConfig { lr: self.config.lr(&self.progress, launched), grad_scale: 1.0 }
    }

    /// The context of the pass over one of the batches.
    fn context(&self, step: &StepBatch, batch: &Batch) -> Context {
        let first = (batch.first_sample - self.progress.consumed_samples) as usize;
        step.pass.clone().micro_batch(first, self.config.batch_size.micro_batch_size())
    }

    /// Uploads the batches to the device.
    pub(super) fn upload(&self, step: &StepBatch) -> Result<Vec<Microbatch>> {
        let device = self.scope.device();
        let upload =
            |batch: &Batch| Microbatch::new(device, &self.mesh, batch, self.context(step, batch));
        step.batches.iter().map(upload).collect()
    }

    /// Enqueues forward and backward of all micro-batches and the reductions of gradients; returns the sums of this
    /// rank's loss terms.
    pub(super) fn forward_backward(
        &mut self,
        step: &StepBatch,
        microbatches: &[Microbatch],
    ) -> Result<Vec<Tensor>> {
        let schedule = self.schedule(microbatches.len(), 1)?;
        let model =
            StageModel::new(&self.parts, &self.scope, &self.mesh, microbatches, &step.loss)?;
        let gradient = self.loss_gradient(step.loss.cotangent)?;
        let mut model = model.reduced_by(&self.data_parallel).with_loss_gradient(gradient.clone());
        self.data_parallel.begin_step(microbatches.len());
        execute(&schedule, &mut model, &self.mesh, gradient)?;
        let losses = model.into_sums()?;
        self.data_parallel.reduce_unused()?; // before calls of other groups, which may have the same ranks
        // A rank that waits for no other has a whole model, and all terms.
        let single = Group::single();
        let ranks = if self.is_async() { &single } else { self.mesh.world() };
        step.loss.check_returned(&losses, &mut self.returned_terms, ranks)?;
        self.schedule = Some((microbatches.len(), schedule));
        Ok(losses.sums)
    }

    /// The pipeline schedule of `steps` steps with so many micro-batches; the last one, if it was the same.
    pub(super) fn schedule(
        &mut self,
        microbatches: usize,
        steps: usize,
    ) -> Result<PipelineSchedule> {
        match self.schedule.take().filter(|(known, _)| *known == microbatches * steps) {
            Some((_, schedule)) => Ok(schedule),
            None => {
                let config = PipelineConfig {
                    kind: self.config.parallel.pipeline_schedule,
                    stages: self.mesh.axis(Axis::Pipeline).size(),
                    microbatches,
                    chunks: self.config.parallel.chunks,
                };
                PipelineSchedule::over_steps(&config, steps)
            }
        }
    }

    /// Enqueues the reduction of the loss and the global gradient norm, and decides on the device whether the update is
    /// applied. Returns the sums of the loss terms over the world, if there are several.
    pub(super) fn check_gradients(
        &mut self,
        step: &StepBatch,
        sums: Vec<Tensor>,
    ) -> Result<Option<Tensor>> {
        let loss = step.loss.reduce(sums, self.mesh.world())?; // beside the last gradients: one wait for both
        self.data_parallel.finish_step()?;
        let (loss, terms) = loss.wait()?;
        let sq_norm = &self.data_parallel.sq_norm()?;
        // If replicas take independent steps, each has its own norm, but all must stop together.
        let data = self.mesh.axis(Axis::Data);
        let others = match self.data_parallel.loss_ranks().size() < data.size() {
            true => Some(data.all_reduce(sq_norm.copy()?, Reduction::Sum)?.wait()?),
            false => None,
        };
        let overflow = self.loss_scaler.rule().map(OverflowPolicy::SkipStep);
        let config = CheckStepConfig {
            tokens: step.loss.denominator,
            max_norm: self.config.clip_grad,
            overflow: overflow.unwrap_or(OverflowPolicy::Stop),
        };
        let sums = StepSums { loss: &loss, sq_norm, others: others.as_ref() };
        let outcomes = &mut self.reports.outcomes;
        check_step(&mut self.step, &mut self.loss_scale, outcomes, &config, &sums)?;
        Ok(terms)
    }

    /// Enqueues the update.
    pub(super) fn update(&mut self) -> Result<()> {
        let _span = trace_span!("optimizer").entered();
        self.data_parallel.update_with(&mut self.optimizer, &self.step)
    }

    /// Whether steps are captured as graphs.
    fn captures_steps(&self) -> bool {
        self.config.execution == ExecutionMode::CudaGraph && !self.scope.device().is_fake()
    }

    /// Enqueues a step with its update as a graph, or eagerly if it is one of the first equal ones. Returns the sums of
    /// the loss terms over the world, if there are several.
    fn run_graph(&mut self, step: &StepBatch) -> Result<Option<Tensor>> {
        if step.batches.iter().any(Batch::restricts_attention) {
            let message = "replays what attention saw, and the batch has key lengths or documents";
            return Err(Error::config("enable-cuda-graph", message));
        }
        let frozen = Frozen {
            microbatches: step.batches.len(),
            seq_length: step.batches.first().map_or(0, |batch| batch.seq_length),
            loss: step.loss.clone(),
        };
        let mut graph = match self.graph.take().filter(|graph| graph.fits(&frozen)) {
            Some(mut graph) => {
                for (microbatch, batch) in graph.microbatches.iter_mut().zip(&step.batches) {
                    microbatch.set(&self.mesh, batch, self.context(step, batch))?;
                }
                graph
            }
            None => StepGraph::new(frozen, self.upload(step)?),
        };
        let (device, world) = (self.scope.device().clone(), self.mesh.world().clone());
        let taken = graph.run(&device, &world, self.progress.step, |microbatches, terms| {
            let sums = self.forward_backward(step, microbatches)?;
            let sums = self.check_gradients(step, sums)?;
            terms.set(sums)?;
            self.update()?;
            // A graph ends with all that was begun in it.
            self.data_parallel.wait_for_weights()
        })?;
        if taken == Taken::Replayed {
            self.optimizer.count_step(self.data_parallel.buffers())?;
        }
        // The next replay overwrites them.
        let sums = graph.terms.copy()?;
        self.graph = Some(graph);
        Ok(sums)
    }
}
