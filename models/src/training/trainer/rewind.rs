//! Going back to a checkpoint behind a bad step.

use ferrotron_tensor::Result;

use super::{Model, OnBadStep, Trainer};
use crate::io::checkpoint::{Checkpoint, TrainState};

impl<M: Model> Trainer<M> {
    /// Whether the last step was bad and [`Trainer::rewind`] is to follow.
    pub fn must_rewind(&mut self) -> bool {
        self.config.bad_steps.on_bad_step == OnBadStep::Rewind
            && self.reports.last().is_some_and(|report| report.bad_step.is_some())
    }

    /// Takes weights, optimizer state, loss scale and running mean of the loss from a checkpoint of this run, and keeps the
    /// number of steps and of consumed samples: training goes on behind the samples that it has seen. All ranks of the
    /// mesh call this.
    ///
    /// Errors as [`Trainer::load`].
    pub fn rewind(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        let now = self.progress.clone();
        let mut reports = self.reports.take();
        let loaded = self.load(checkpoint);
        if loaded.is_ok()
            && let Some(report) = reports.last_mut()
        {
            report.rewound_to = Some(checkpoint.progress().step);
        }
        self.reports.put_back(reports);
        loaded?;
        let TrainState { consumed_samples, skipped_samples, .. } = self.progress;
        self.progress = TrainState {
            step: now.step,
            consumed_samples: now.consumed_samples,
            skipped_samples: now
                .consumed_samples
                .saturating_sub(consumed_samples - skipped_samples),
            bad_step_balance: now.bad_step_balance,
            extra: now.extra,
            ..self.progress.clone()
        };
        Ok(())
    }
}
