//! Steps of a pipeline without a flush: all of them until the pipeline is drained are one execution of its schedule.

use ferrotron_autograd::Var;
use ferrotron_nn::{Axis, Optimizer, Scope, StepConfig};
use ferrotron_parallel::collective::{Group, Reduction};
use ferrotron_parallel::data_parallel::DataParallel;
use ferrotron_parallel::mesh::Mesh;
use ferrotron_parallel::pipeline::{PipelineModel, WeightVersions, execute};
use ferrotron_tensor::ops::step::DeviceStepParams;
use ferrotron_tensor::{DType, Device, Error, Result, Tensor};
use std::time::Instant;
use tracing::trace_span;

use super::begin::StepBatch;
use super::outcome::Outcome;
use super::report::InFlightStep;
use super::{Microbatch, Model, Trainer, TrainerConfig};
use crate::io::data::Samples;
use crate::training::loss::LossSums;
use crate::training::stage::StageModel;

/// A step of the window.
struct WindowStep {
    batch: StepBatch,
    microbatches: Vec<Microbatch>,
    /// The host's record. Its learning rate is known at the update.
    given: InFlightStep,
    /// The loss terms of the micro-batches so far.
    losses: Option<LossSums>,
    /// Sums of this rank's loss terms, once the step is applied.
    sums: Vec<f64>,
    /// The square of the norm of this stage's gradients.
    sq_norm: f64,
}

/// A rank's part of the model and its weights during a window.
struct Window<'a, M> {
    parts: &'a [M],
    scope: &'a Scope,
    mesh: &'a Mesh,
    config: &'a TrainerConfig,
    data_parallel: &'a DataParallel,
    optimizer: &'a mut Optimizer,
    versions: &'a mut WeightVersions,
    params: &'a mut DeviceStepParams,
    steps: Vec<WindowStep>,
    /// Micro-batches of a step.
    microbatches: usize,
}

impl<M: Model> Trainer<M> {
    /// The number of steps that [`Trainer::step_async`] takes at once: 1, or without a flush those until the pipeline is
    /// drained, which is after each step whose number is a multiple of
    /// [`ParallelConfig::drain_interval`](super::ParallelConfig::drain_interval).
    pub fn steps_at_once(&self) -> u64 {
        match self.config.parallel.pipeline_schedule.flushes() {
            true => 1,
            false => {
                let every = self.config.parallel.drain_interval as u64;
                every - self.progress.step % every
            }
        }
    }

    /// Takes all steps until the pipeline is drained, with `versions` of the weights, and reads their results.
    ///
    /// Errors on all ranks if a loss or gradient norm is not finite: the weights have had later updates by then. Behind an
    /// error that comes after the samples are read, a checkpoint must be loaded.
    pub(super) fn train_window(
        &mut self,
        versions: &mut WeightVersions,
        samples: &dyn Samples,
        started: Instant,
    ) -> Result<()> {
        let before = self.progress.clone();
        let read = (0..self.steps_at_once()).map(|_| self.read_step(samples, started));
        let steps = read.collect::<Result<Vec<_>>>().inspect_err(|_| self.progress = before)?;
        let microbatches = steps[0].microbatches.len();
        let schedule = self.schedule(microbatches, steps.len())?;
        self.window_failed = true; // until all has gone well
        versions.restart(self.data_parallel.buffers())?;
        self.data_parallel.begin_step(microbatches);
        let mut window = Window {
            parts: &self.parts,
            scope: &self.scope,
            mesh: &self.mesh,
            config: &self.config,
            data_parallel: &self.data_parallel,
            optimizer: &mut self.optimizer,
            versions,
            params: &mut self.step,
            steps,
            microbatches,
        };
        execute(&schedule, &mut window, &self.mesh, 1.0)?;
        let steps = window.steps;
        self.schedule = Some((schedule.microbatches(), schedule));
        self.report_window(steps, started)?;
        self.window_failed = false;
        Ok(())
    }

    /// Errors, for `operation`, while ranks do not hold one state: updates are outstanding, or steps have failed.
    pub(super) fn check_state(&self, operation: &'static str) -> Result<()> {
        self.check_drained(operation)?;
        self.check_window(operation)
    }

    /// Errors, for `operation`, if steps without a flush have failed and no checkpoint was loaded since.
    pub(super) fn check_window(&self, operation: &'static str) -> Result<()> {
        if !self.window_failed {
            return Ok(());
        }
        let kind = self.config.parallel.pipeline_schedule;
        let message = format!(
            "steps of {kind} have failed, and the weights may be those of any of them: load the last checkpoint first"
        );
        Err(Error::config(operation, message))
    }

    /// Fetches the next step's samples, and counts it: those behind it are fetched before it is taken.
    fn read_step(&mut self, samples: &dyn Samples, started: Instant) -> Result<WindowStep> {
        let batch = self.next_batch(samples)?;
        self.times.add_data(batch.data_seconds);
        let (given, microbatches) = (self.in_flight(&batch, started), self.upload(&batch)?);
        self.advance(batch.global_batch_size as u64, Outcome::Applied);
        Ok(WindowStep { batch, microbatches, given, losses: None, sums: Vec::new(), sq_norm: 0.0 })
    }

    /// Sums losses and norms over ranks, and makes the reports.
    fn report_window(&mut self, steps: Vec<WindowStep>, started: Instant) -> Result<()> {
        let (world, pipeline) = (self.mesh.world(), self.mesh.axis(Axis::Pipeline));
        if let Some(WindowStep { batch, losses: Some(losses), .. }) = steps.last() {
            batch.loss.check_returned(losses, &mut self.returned_terms, world)?;
        }
        let host = Device::cpu(1)?;
        let over = |ranks: &Group, own: Vec<f64>| {
            let own = Tensor::from_slice(&host, &own, &[own.len()])?;
            ranks.all_reduce(own, Reduction::Sum)?.wait()?.to_vec::<f64>()
        };
        let terms = steps[0].sums.len();
        let sums = over(world, steps.iter().flat_map(|step| step.sums.iter().copied()).collect())?;
        let norms = over(pipeline, steps.iter().map(|step| step.sq_norm).collect())?;
        world.check()?;
        let seconds = started.elapsed().as_secs_f64() / steps.len() as f64;
        for ((step, sums), sq_norm) in steps.into_iter().zip(sums.chunks_exact(terms)).zip(norms) {
            let (loss, norm) =
                (step.batch.loss.total(sums), sq_norm.sqrt() / step.given.loss_scale);
            if !(loss.is_finite() && norm.is_finite()) {
                let number = step.given.before.step + 1;
                let message = format!(
                    "step {number}: loss {loss}, gradient norm {norm}; without a flush the weights have had later updates: \
                     resume from the last checkpoint with a lower --lr"
                );
                return Err(Error::value("train", message));
            }
            let sums = match terms {
                1 => None,
                _ => Some(Tensor::from_slice(&host, sums, &[terms])?),
            };
            self.reports.push_read(InFlightStep { sums, ..step.given }, loss, norm, seconds)?;
        }
        Ok(())
    }
}

impl<M: Model> PipelineModel for Window<'_, M> {
    fn activation(&self, microbatch: usize) -> (Vec<usize>, DType, Device) {
        let step = &self.steps[microbatch / self.microbatches];
        let dims =
            self.parts[0].activation_dims(&step.microbatches[microbatch % self.microbatches]);
        (dims, self.scope.dtype(), self.scope.device().clone())
    }

    fn forward(&mut self, microbatch: usize, chunk: usize, input: Option<Var>) -> Result<Var> {
        let WindowStep { batch, microbatches, given, losses, .. } =
            &mut self.steps[microbatch / self.microbatches];
        let mut stage =
            StageModel::new(self.parts, self.scope, self.mesh, microbatches, &batch.loss)?;
        let gradient = batch.loss.cotangent * given.loss_scale;
        stage = stage.with_loss_gradient(gradient.into());
        if let Some(losses) = losses.take() {
            stage = stage.adding_to(losses);
        }
        let output = stage.forward(microbatch % self.microbatches, chunk, input)?;
        *losses = Some(stage.into_sums()?);
        let pipeline = self.mesh.axis(Axis::Pipeline);
        // Steps may count different numbers of tokens: each loss has its own factor.
        match pipeline.rank() + 1 == pipeline.size() {
            true => output.mul_scalar(gradient),
            false => Ok(output),
        }
    }

    fn end_backward(&mut self, _microbatch: usize, _chunk: usize) -> Result<()> {
        self.data_parallel.end_backward()
    }

    fn use_weights(&mut self, version: usize) -> Result<()> {
        self.versions.select(self.data_parallel.buffers(), version)
    }

    fn update(&mut self, step: usize) -> Result<()> {
        let Window { data_parallel, optimizer, params, .. } = self;
        let now = &mut self.steps[step];
        data_parallel.finish_step()?;
        now.sq_norm = data_parallel.stage_sq_norm()?.item()?;
        let losses = now.losses.as_ref().map_or(&[][..], |losses| &losses.sums);
        now.sums = losses.iter().map(Tensor::item).collect::<Result<_>>()?;
        let lr = self.config.lr(&now.given.before, optimizer.steps());
        let numbers = optimizer.numbers(&StepConfig { lr, grad_scale: 1.0 / now.given.loss_scale });
        now.given.lr = numbers.lr;
        params.set(&numbers)?;
        self.versions.update(data_parallel.buffers(), || {
            let _span = trace_span!("optimizer").entered();
            data_parallel.update_with(optimizer, params)
        })?;
        if step + 1 < self.steps.len() {
            self.steps[step].losses = None;
            data_parallel.begin_step(self.microbatches);
        }
        Ok(())
    }
}
