//! The end of a step: whether it is applied, and the progress of the run behind it.

use ferrotron_tensor::{Error, Result};

use super::bad_step::remedy;
use super::report::saved_state;
use super::{Model, Trainer};
use crate::io::checkpoint::TrainState;

/// The end of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Weights are updated, unless the device has decided otherwise.
    Applied,
    /// The gradients overflowed under a dynamic loss scale.
    Overflow,
    /// The step is bad, and training continues.
    Bad,
}

impl<M: Model> Trainer<M> {
    /// Decides whether the step whose report was read last is applied. A step that the host does not see before the next
    /// one is decided by the device.
    ///
    /// # Errors
    /// A bad step, if it stops training; too many in a row.
    pub(super) fn judge(&mut self) -> Result<Outcome> {
        let bad_steps = self.config.bad_steps;
        let Some(report) = self.reports.last() else { return Ok(Outcome::Applied) };
        if report.skipped {
            return Ok(Outcome::Overflow);
        }
        if report.bad_step.is_none() {
            report.bad_step = bad_steps.spike(report.loss, &self.progress);
        }
        let Some(why) = report.bad_step.clone() else {
            bad_steps.count_applied(report.loss, &mut self.progress);
            return Ok(Outcome::Applied);
        };
        if !bad_steps.continues() {
            let step = report.step;
            self.reports.drop_last();
            let remedy = remedy(&self.config.parallel.data_parallel);
            return Err(Error::value("train", format!("step {step}: {why}; {remedy}")));
        }
        bad_steps.count_bad(&why, &mut self.progress)?;
        Ok(Outcome::Bad)
    }

    /// Puts the progress back to where it was `before` a step that is not applied, behind so many `updates`.
    pub(super) fn take_back(&mut self, before: &TrainState, updates: u64) {
        // The losses that have been counted are those of applied steps: asynchronous ones are launched before those ahead
        // of them are counted.
        let loss_mean = self.progress.loss_mean;
        self.progress = TrainState { loss_mean, ..before.clone() };
        self.optimizer.set_steps(updates);
    }

    /// Counts a step of `samples` samples that ended so, and adapts the loss scale if the host has seen the step.
    pub(super) fn advance(&mut self, samples: u64, outcome: Outcome) {
        if outcome != Outcome::Bad && !self.reports.is_unread() {
            self.loss_scaler.update(outcome == Outcome::Overflow);
        }
        self.progress.loss_scaler = saved_state(&self.loss_scaler);
        self.progress.step += 1;
        self.progress.consumed_samples += samples;
        if outcome != Outcome::Applied {
            self.progress.skipped_samples += samples;
        }
    }
}
