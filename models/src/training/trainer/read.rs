//! Reading the results of steps. A device that adapts the loss scale has skipped some that the host took for applied.

use ferrotron_autograd::LossGradient;
use ferrotron_nn::Axis;
use ferrotron_parallel::collective::Group;
use ferrotron_tensor::{Error, Result};

use super::bad_step::remedy;
use super::report::{FailedStep, SkippedSteps, saved_state};
use super::{Model, ScheduleUnit, Trainer};
use crate::io::data::Samples;

impl<M: Model> Trainer<M> {
    /// Whether the host has to see a step's results before the next one.
    pub(super) fn host_decides(&self) -> bool {
        let local = self.data_parallel.loss_ranks().size() < self.mesh.axis(Axis::Data).size();
        !self.scope.device().is_gpu() || local || self.config.bad_steps.needs_host()
    }

    /// Whether the results of the steps in flight are read before a step of so many samples: if the device keeps no more of
    /// them, or if the learning rate depends on how many samples the skipped ones had.
    pub(super) fn reads_before(&self, samples: u64) -> bool {
        let by_sample = self.config.schedule_unit == ScheduleUnit::Samples;
        let other_size = self.reports.samples_in_flight().is_some_and(|known| known != samples);
        self.reports.is_full() || (by_sample && other_size && self.loss_scaler.skips())
    }

    /// Enqueues writing the optimizer's step parameters, and the loss scale if the host knows it.
    pub(super) fn write_step_params(&mut self) -> Result<()> {
        let numbers = self.optimizer.numbers(&self.step_config());
        let known = (!self.reports.is_unread()).then(|| self.loss_scaler.state());
        self.loss_scale.begin_step(&mut self.step, &numbers, known.as_ref())
    }

    /// The gradient with which backward starts. A GPU knows a dynamic loss scale before the host.
    pub(super) fn loss_gradient(&self, cotangent: f64) -> Result<LossGradient> {
        let device = self.scope.device();
        match self.loss_scaler.skips() && device.is_gpu() {
            true => self.loss_scale.gradient(device, cotangent).map(LossGradient::OnDevice),
            false => Ok(LossGradient::Number(cotangent * self.loss_scaler.scale())),
        }
    }

    /// Reads the results of all steps that are in flight, and counts those that the device has skipped; takes a failed one
    /// back.
    pub(super) fn read(&mut self, samples: &dyn Samples) -> Result<()> {
        let single = Group::single();
        let ranks = if self.is_async() { &single } else { self.mesh.world() };
        let mut skipped = SkippedSteps::new(self.loss_scaler);
        let lost = self.reports.read(ranks, &mut skipped)?;
        // A step that the host sees before its update is counted behind it.
        if !self.host_decides() {
            self.loss_scaler = skipped.scaler;
            self.progress.loss_scaler = saved_state(&self.loss_scaler);
            self.progress.skipped_samples += skipped.samples;
            self.optimizer.set_steps(self.optimizer.steps() - skipped.steps);
        }
        let Some(lost) = lost else { return Ok(()) };
        if self.config.bad_steps.continues() {
            let why = self.why_not_finite(&lost)?;
            return self.reports.push_bad(&lost, why);
        }
        self.take_back(&lost.given.before, lost.given.updates);
        self.graph = None;
        if lost.later > 0 {
            let batch = self.next_batch(samples)?;
            self.write_step_params()?;
            let sums = self.forward_backward(&batch, &self.upload(&batch)?)?;
            self.check_gradients(&batch, sums)?;
        }
        self.reports.outcomes.clear()?;
        let (step, why) = (self.progress.step + 1, self.why_not_finite(&lost)?);
        let remedy = remedy(&self.config.parallel.data_parallel);
        Err(Error::value("train", format!("step {step}: {why}; {remedy}")))
    }

    /// Says what is not finite in a step, and why as far as it is known.
    fn why_not_finite(&self, step: &FailedStep) -> Result<String> {
        let FailedStep { given, loss, grad_norm, .. } = step;
        let culprit = match (given.loss.why_empty(), self.buffers().first_non_finite()?) {
            (Some(why), _) => why,
            (_, Some(name)) => format!("first offender: {name}"),
            _ if loss.is_finite() && grad_norm.is_finite() => {
                "another replica's gradient norm is not finite".into()
            }
            _ => "every parameter of this rank is finite".into(),
        };
        Ok(format!("loss {loss}, gradient norm {grad_norm}; {culprit}"))
    }
}
