//! Steps of asynchronous data parallelism: a step is launched, and applied when the gradients of all ranks have come in,
//! up to K steps later.
//!
//! A rank does not know how many elements the others count in a step, so its gradient is of the mean over its own
//! samples, and an update is of the mean over ranks. The numbers of elements travel with the gradients: the reported loss
//! is the mean over the global batch, as always.
//!
//! Ranks find a bad step after different numbers of later ones. Before they end, each joins in the sums of all steps that
//! another may have launched: no call of a rank is left without an answer, and all end with the same reason.

use ferrotron_parallel::agreement::wait_for_all;
use ferrotron_parallel::data_parallel::UpdateSums;
use ferrotron_tensor::ops::outcome::{CheckStepConfig, OverflowPolicy, StepSums, check_step};
use ferrotron_tensor::{DType, Error, Result, Tensor};
use std::time::Instant;

use super::outstanding::OutstandingStep;
use super::{Model, Trainer};
use crate::io::data::Samples;
use crate::training::loss::LossReduction;

impl<M: Model> Trainer<M> {
    /// Whether ranks do not wait for the updates of the latest steps.
    pub fn is_async(&self) -> bool {
        self.config.parallel.data_parallel.stale_updates().is_some()
    }

    /// One step: applies the updates that have come in, computes this rank's gradients and launches their sum.
    pub(super) fn launch_step(&mut self, samples: &dyn Samples, started: Instant) -> Result<()> {
        while self.data_parallel.update_is_ready() {
            self.apply_oldest(samples)?;
        }
        let batch = self.next_batch(samples)?;
        self.times.add_data(batch.data_seconds);
        let (given, config) = (self.in_flight(&batch, started), self.step_config());
        let microbatches = self.upload(&batch)?;
        let sums = self.forward_backward(&batch, &microbatches)?;
        drop(microbatches); // so that the memory does not depend on when an update is applied
        let sums = sums.iter().map(Tensor::item).collect::<Result<Vec<f64>>>()?;
        let numbers: Vec<f64> = sums.into_iter().chain(batch.counts.numbers()).collect();
        let global_batch_size = batch.global_batch_size as u64;
        let counts = batch.counts;
        self.outstanding.push_back(OutstandingStep { given, counts, config, seconds: 0.0 });
        self.progress.step += 1;
        self.progress.consumed_samples += global_batch_size;
        if let Some(sums) = self.data_parallel.launch_update(&numbers)? {
            self.apply(&sums, samples)?;
        }
        match self.steps_to_synchronization() {
            0 => self.apply_all(samples),
            _ => Ok(()),
        }
    }

    /// Steps that are still to be taken until all replicas of the model are the same: 0 unless they take steps
    /// of their own or do not wait for updates.
    pub fn steps_to_synchronization(&self) -> u64 {
        // Steps of the run decide where all updates are applied, and updates where weights are averaged.
        let steps = if self.is_async() { self.progress.step } else { self.optimizer.steps() };
        self.data_parallel.steps_to_synchronization(steps)
    }

    /// Waits for all outstanding steps and applies their updates: every rank then has the same weights. All ranks call
    /// this, behind the same step. Does nothing without asynchronous updates.
    ///
    /// Errors as [`Trainer::drain_reports`].
    pub fn drain_updates(&mut self, samples: &dyn Samples) -> Result<()> {
        self.apply_all(samples)
    }

    /// Errors, for `operation`, if updates are outstanding: the ranks' weights differ.
    pub(super) fn check_drained(&self, operation: &'static str) -> Result<()> {
        match self.outstanding.len() {
            0 => Ok(()),
            steps => {
                let wait = self.steps_to_synchronization();
                let message = format!(
                    "the updates of {steps} steps are outstanding after step {}, and the ranks' weights differ: all are \
                     applied after step {}, or by `Trainer::drain_updates`",
                    self.progress.step,
                    self.progress.step + wait
                );
                Err(Error::config(operation, message))
            }
        }
    }

    fn apply_all(&mut self, samples: &dyn Samples) -> Result<()> {
        while !self.outstanding.is_empty() {
            self.apply_oldest(samples)?;
        }
        Ok(())
    }

    fn apply_oldest(&mut self, samples: &dyn Samples) -> Result<()> {
        match self.data_parallel.complete_update()? {
            Some(sums) => self.apply(&sums, samples),
            None => Err(Error::graph("train", "no update is outstanding")),
        }
    }

    /// Applies the update of the earliest outstanding step, whose gradients are in the buffers, and reports the step.
    fn apply(&mut self, sums: &UpdateSums, samples: &dyn Samples) -> Result<()> {
        let Some(step) = self.outstanding.pop_front() else {
            return Err(Error::graph("train", "the step of an update is not known"));
        };
        let OutstandingStep { mut given, counts, config, seconds } = step;
        let numbers = self.optimizer.numbers(&config);
        self.loss_scale.begin_step(&mut self.step, &numbers, Some(&self.loss_scaler.state()))?;
        let (terms, counted) = sums.numbers.split_at(counts.len());
        let all = counts.with_numbers(counted);
        given.loss = LossReduction::new(&all, &all);
        let device = self.scope.device();
        let loss = Tensor::full(device, DType::F64, &[1], given.loss.weighted(terms))?;
        given.sums = match terms.len() {
            1 => None,
            terms_count => Some(Tensor::from_slice(device, terms, &[terms_count])?),
        };
        (given.lr, given.updates) = (numbers.lr, self.optimizer.steps());
        given.staleness = sums.staleness.clone();
        let check = CheckStepConfig {
            tokens: given.loss.denominator,
            max_norm: self.config.clip_grad,
            overflow: OverflowPolicy::Stop,
        };
        let sq_norm = &self.data_parallel.sq_norm()?;
        let sums = StepSums { loss: &loss, sq_norm, others: None };
        let outcomes = &mut self.reports.outcomes;
        check_step(&mut self.step, &mut self.loss_scale, outcomes, &check, &sums)?;
        let (launched, number) = (self.progress.step, given.before.step + 1);
        let numbers = terms.len() + counted.len();
        let (before, updates) = (given.before.clone(), given.updates);
        self.reports.push(given);
        if let Err(error) = self.settle(samples, seconds) {
            // Weights are those before the step, also if its loss was a spike: so is the progress.
            self.take_back(&before, updates);
            self.end_together(number, launched, numbers);
            return Err(error);
        }
        self.update()
    }

    /// Reads the report of a step that took `seconds`, and decides whether it is applied: equally on all ranks, which have
    /// the same sums.
    fn settle(&mut self, samples: &dyn Samples, seconds: f64) -> Result<()> {
        self.read(samples)?;
        if let Some(report) = self.reports.last() {
            report.seconds = seconds;
        }
        self.judge().map(drop)
    }

    /// Waits until all ranks have found the bad step `number`, of `launched` ones on this rank. Another rank may have launched as
    /// many behind it as may be outstanding, but none behind the next drain.
    fn end_together(&mut self, number: u64, launched: u64, numbers: usize) {
        let config = &self.config.parallel.data_parallel;
        let most = config.stale_updates().map_or(0, |updates| updates.max_staleness as u64);
        let most = most.min(self.data_parallel.steps_to_synchronization(number));
        let missing = (number + most).saturating_sub(launched) as usize;
        self.outstanding.clear();
        // An error here is that of a rank which has failed otherwise: the bad step came first.
        if self.data_parallel.abandon_updates(missing, numbers).is_ok() {
            wait_for_all(self.mesh.world());
        }
    }
}
