//! A training step: preparation on the host, work enqueued on the device, and reading its results.

use ferrotron_nn::{Axis, Context, Mode, StepConfig};
use ferrotron_parallel::collective::Reduction;
use ferrotron_parallel::pipeline::{PipelineConfig, PipelineSchedule, execute};
use ferrotron_tensor::ops::outcome::{CheckStepConfig, OverflowPolicy, StepSums, check_step};
use ferrotron_tensor::{Error, Result};
use std::time::Instant;
use tracing::trace_span;

use super::report::{FailedStep, InFlightStep};
use super::{ExecutionMode, StepReport, Trainer};
use crate::io::data::{Batch, Samples};
use crate::model::stage::{Microbatch, StageModel};

/// The values of a step that are known before any device work.
pub(super) struct Prepared {
    pub batches: Vec<Batch>,
    pub pass: Context,
    schedule: PipelineSchedule,
    /// One over the number of valid tokens for this rank's gradients.
    pub scale: f64,
    pub loss_scale: f64,
    /// Number of valid tokens of the global batch.
    pub tokens: f64,
    lr: f64,
}

impl Trainer {
    /// Takes one step over the next global batch of `samples`, and synchronizes.
    ///
    /// If the loss scale is dynamic and gradients overflow, weights and moments are unchanged, but the step counts
    /// and its samples are consumed.
    ///
    /// With [`ExecutionMode::CudaGraph`] the first steps are eager, the next one is captured, and later ones replay it.
    /// Replays need the same number of micro-batches, sample length, number of valid tokens and loss scale. A step
    /// that differs starts over.
    ///
    /// # Errors
    /// Errors on every rank, without changing weights or moments, if the loss is not finite, or, with a constant loss
    /// scale, the gradient norm of any replica. The message names the step and the first parameter that is not
    /// finite.
    pub fn step(&mut self, samples: &dyn Samples) -> Result<StepReport> {
        self.step_async(samples)?;
        let reports = self.drain_reports(samples)?;
        reports.last().copied().ok_or_else(|| Error::value("train", "the step has no report"))
    }

    /// Like [`Trainer::step`], without synchronizing with a GPU: the step is enqueued after the previous ones. Its
    /// results are in [`Trainer::drain_reports`], which should be called periodically.
    ///
    /// It synchronizes if the host needs the results: with a dynamic loss scale, if replicas take independent steps,
    /// and whenever 1024 steps are unread. Ranks that share a GPU or have no NCCL synchronize in each collective.
    ///
    /// Reports must be read before a checkpoint is saved: one of the steps may have failed.
    ///
    /// Errors as [`Trainer::drain_reports`], if it synchronizes.
    pub fn step_async(&mut self, samples: &dyn Samples) -> Result<()> {
        let started = Instant::now();
        let device = self.scope.device().clone();
        let _span = trace_span!("step", step = self.progress.step + 1).entered();
        let alone = !self.reports.is_unread();
        device.run(|| self.step_on_device(samples, started))?;
        // For steps that are read together, only the mean duration is known.
        if let Some(report) = self.reports.last().filter(|_| alone) {
            report.seconds = started.elapsed().as_secs_f64();
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

    fn read(&mut self, samples: &dyn Samples) -> Result<()> {
        let Some(lost) = self.reports.read(self.mesh.world())? else { return Ok(()) };
        let FailedStep { given, loss, grad_norm, later } = lost;
        self.progress = given.before;
        self.optimizer.set_steps(given.updates);
        self.graph = None;
        if later > 0 {
            let device = self.scope.device().clone();
            device.run(|| {
                let prepared = self.prepare(samples)?;
                self.set_numbers()?;
                self.compute(&prepared, &self.microbatches(&prepared)?)
            })?;
        }
        self.reports.outcomes.clear()?;
        Err(self.not_finite(loss, grad_norm)?)
    }

    fn step_on_device(&mut self, samples: &dyn Samples, started: Instant) -> Result<()> {
        let prepared = self.prepare(samples)?;
        let Prepared { loss_scale, lr, .. } = prepared;
        let global = self.config.batch_size.global(self.progress.consumed_samples);
        let tokens = (global * samples.seq_length()) as u64;
        let (before, updates) = (self.progress.clone(), self.optimizer.steps());
        let given = InFlightStep { lr, loss_scale, tokens, started, before, updates };
        self.set_numbers()?;
        // A graph contains the whole step, so the host does not read the results before the update.
        let whole =
            self.config.execution == ExecutionMode::CudaGraph && !self.scope.device().is_fake();
        if whole {
            self.take_as_graph(&prepared)?;
        } else {
            self.compute(&prepared, &self.microbatches(&prepared)?)?;
        }
        self.reports.push(given);
        let local = self.data_parallel.loss_ranks().size() < self.mesh.axis(Axis::Data).size();
        if self.loss_scaler.skips() || local || self.reports.is_full() {
            self.read(samples)?;
        }
        let overflow = self.reports.last().is_some_and(|report| report.skipped);
        if !overflow && !whole {
            self.update()?;
        }
        self.loss_scaler.update(overflow);
        self.progress.loss_scaler = self.loss_scaler.skips().then(|| self.loss_scaler.state());
        self.progress.step += 1;
        self.progress.consumed_samples += global as u64;
        Ok(())
    }

    /// Fetches the next global batch, and computes all values that are known before its first forward.
    fn prepare(&self, samples: &dyn Samples) -> Result<Prepared> {
        let consumed = self.progress.consumed_samples;
        let sizes = self.config.batch_size;
        let (global, micro) = (sizes.global(consumed), sizes.micro());
        let data = self.mesh.axis(Axis::Data);
        let batches = (0..sizes.microbatches(consumed))
            .map(|i| samples.batch(sizes.first_sample(consumed, i, data.rank()), micro))
            .collect::<Result<Vec<Batch>>>()?;
        // Counted before the first forward, so that the loss scale does not depend on the layout.
        let counted: u64 = batches.iter().map(Batch::num_valid_tokens).sum();
        let ranks = self.data_parallel.loss_ranks();
        let own = ranks.sum(&self.host, counted as f64)?;
        // If ranks take independent steps, one of them may have no valid tokens.
        let scale = if own > 0.0 { 1.0 / own } else { 0.0 };
        let together = ranks.size() == data.size();
        let tokens = if together { own } else { data.sum(&self.host, counted as f64)? };
        let (seed, length) = (self.config.seed, samples.seq_length());
        let pass = Context::new(seed, self.progress.step, Mode::Train, global, length);
        let schedule = self.schedule(batches.len())?;
        let lr = self.optimizer.numbers(&self.step_config()).lr;
        let loss_scale = self.loss_scaler.scale();
        Ok(Prepared { batches, pass, schedule, scale, loss_scale, tokens, lr })
    }

    /// The context of a pass over one of the batches.
    pub(super) fn context(&self, prepared: &Prepared, batch: &Batch) -> Context {
        let first = (batch.first_sample - self.progress.consumed_samples) as usize;
        prepared.pass.clone().micro_batch(first, self.config.batch_size.micro())
    }

    /// Uploads the batches to the device.
    pub(super) fn microbatches(&self, prepared: &Prepared) -> Result<Vec<Microbatch>> {
        let device = self.scope.device();
        let microbatch = |batch: &Batch| {
            Microbatch::new(device, &self.mesh, batch, self.context(prepared, batch))
        };
        prepared.batches.iter().map(microbatch).collect()
    }

    /// Writes the optimizer step parameters to the device.
    pub(super) fn set_numbers(&mut self) -> Result<()> {
        let numbers = self.optimizer.numbers(&self.step_config());
        self.step.set(&numbers)
    }

    /// Enqueues a step up to the update: computes gradients, and decides on the device whether the update is applied.
    pub(super) fn compute(
        &mut self,
        prepared: &Prepared,
        microbatches: &[Microbatch],
    ) -> Result<()> {
        let Prepared { schedule, scale, loss_scale, tokens, .. } = prepared;
        let model = StageModel::new(&self.parts, &self.mesh, microbatches)?;
        let mut model = model.reduced_by(&self.data_parallel);
        self.data_parallel.begin_step(microbatches.len());
        execute(schedule, &mut model, &self.mesh, scale * loss_scale)?;
        let loss = model.into_loss()?;
        let loss = &self.mesh.world().all_reduce(loss, Reduction::Sum)?.wait()?;
        self.data_parallel.finish_step()?;
        let sq_norm = &self.data_parallel.sq_norm()?;
        // If replicas take independent steps, each has its own norm, but all must stop together.
        let data = self.mesh.axis(Axis::Data);
        let others = match self.data_parallel.loss_ranks().size() < data.size() {
            true => Some(data.all_reduce(sq_norm.copy()?, Reduction::Sum)?.wait()?),
            false => None,
        };
        let sums = StepSums { loss, sq_norm, others: others.as_ref() };
        let config = CheckStepConfig {
            tokens: *tokens,
            loss_scale: *loss_scale,
            max_norm: self.config.clip_grad,
            overflow: if self.loss_scaler.skips() {
                OverflowPolicy::SkipStep
            } else {
                OverflowPolicy::Stop
            },
        };
        check_step(&mut self.step, &mut self.reports.outcomes, &config, &sums)
    }

    /// Enqueues the update.
    pub(super) fn update(&mut self) -> Result<()> {
        let _span = trace_span!("optimizer").entered();
        self.data_parallel.update_with(&mut self.optimizer, &self.step)
    }

    /// The schedule's learning rate. The gradient scale is computed on the device.
    fn step_config(&self) -> StepConfig {
        StepConfig { lr: self.config.schedule.lr(self.optimizer.steps() + 1), grad_scale: 1.0 }
    }

    fn schedule(&self, microbatches: usize) -> Result<PipelineSchedule> {
        PipelineSchedule::new(&PipelineConfig {
            kind: self.config.parallel.pipeline_schedule,
            stages: self.mesh.axis(Axis::Pipeline).size(),
            microbatches,
            chunks: self.config.parallel.chunks,
        })
    }

    fn not_finite(&self, loss: f64, grad_norm: f64) -> Result<Error> {
        let culprit = self.buffers().first_non_finite()?;
        let culprit = match culprit {
            Some(name) => format!("first offender: {name}"),
            None if loss.is_finite() && grad_norm.is_finite() => {
                "another replica's gradient norm is not finite".into()
            }
            None => "every parameter of this rank is finite".into(),
        };
        let step = self.progress.step + 1;
        Ok(Error::value(
            "train",
            format!("step {step}: loss {loss}, gradient norm {grad_norm}; {culprit}"),
        ))
    }
}
