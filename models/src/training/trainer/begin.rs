//! The beginning of a step: reading its samples, and the small call by which ranks count them.

use ferrotron_nn::{Axis, Context, Mode};
use ferrotron_parallel::collective::waited_during;
use ferrotron_tensor::{Error, Result};
use std::time::{Duration, Instant};

use super::times::RankTimes;
use super::{Model, Trainer};
use crate::io::data::{Batch, Samples};
use crate::training::loss::{LossCounts, LossReduction};

/// A rank's samples of a step, and what is known of the step before any device work.
pub(super) struct StepBatch {
    pub batches: Vec<Batch>,
    /// The number of the first one of all ranks.
    pub first_sample: u64,
    /// Seconds until they were there.
    pub data_seconds: f64,
    /// Samples of all ranks.
    pub global_batch_size: usize,
    pub pass: Context,
    /// The elements of the loss terms in `batches`.
    pub counts: LossCounts,
    pub loss: LossReduction,
}

/// A step whose samples are read and counted, for [`Trainer::take_step`].
#[must_use = "the samples that are read belong to a step"]
pub struct BegunStep {
    pub(super) started: Instant,
    /// None where the trainer reads several steps at once, or waits for no other rank.
    pub(super) batch: Option<StepBatch>,
    /// The time for which this rank has waited for others so far.
    pub(super) waited: Duration,
}

/// This rank's samples of a step.
struct ReadBatches {
    batches: Vec<Batch>,
    /// Seconds until they were there.
    seconds: f64,
    counts: LossCounts,
}

impl<M: Model> Trainer<M> {
    /// The time that this rank has spent since the last call, in steps.
    pub fn take_times(&mut self) -> RankTimes {
        std::mem::take(&mut self.times)
    }

    /// Reads this rank's samples of the next step, and sums over all ranks what they have and, in the same small call,
    /// `flags` of the caller. All ranks call this, with as many flags; without any, only ranks along the data axis call one
    /// another. The step is then [taken](Trainer::take_step), or left out: nothing is changed yet.
    ///
    /// Errors as `samples` and the communication do.
    pub fn begin_step(&self, samples: &dyn Samples, flags: &mut [f64]) -> Result<BegunStep> {
        let started = Instant::now();
        let (batch, waited) = waited_during(|| match self.versions.is_some() || self.is_async() {
            true => {
                let sums = self.mesh.world().sums(&self.host, flags)?;
                flags.copy_from_slice(&sums);
                Ok::<_, Error>(None)
            }
            false => {
                let read = self.read_batches(samples)?;
                let (own, all) = self.sum_counts(&read.counts, flags)?;
                Ok(Some(self.step_batch(read, samples.seq_length(), (&own, &all))))
            }
        });
        Ok(BegunStep { started, batch: batch?, waited })
    }

    /// Fetches this rank's samples of the next global batch and announces those behind it. Counts the elements of the loss
    /// terms before the first forward, so that the scale of gradients does not depend on the layout.
    pub(super) fn next_batch(&self, samples: &dyn Samples) -> Result<StepBatch> {
        let read = self.read_batches(samples)?;
        let (own, all) = self.sum_counts(&read.counts, &mut [])?;
        Ok(self.step_batch(read, samples.seq_length(), (&own, &all)))
    }

    fn read_batches(&self, samples: &dyn Samples) -> Result<ReadBatches> {
        let consumed = self.progress.consumed_samples;
        let sizes = self.config.batch_size;
        let rank = self.mesh.axis(Axis::Data).rank();
        let reading = Instant::now();
        let batches = sizes.read(samples, consumed, rank)?;
        let seconds = reading.elapsed().as_secs_f64();
        let next = consumed + sizes.global_batch_size(consumed) as u64;
        samples.prefetch(&sizes.batches(next, rank));
        let counts = LossCounts::new::<M>(&self.model, &batches)?;
        Ok(ReadBatches { batches, seconds, counts })
    }

    /// The elements of the loss terms over the ranks whose gradients are summed, and over all; `flags` become their sums over
    /// all ranks.
    fn sum_counts(
        &self,
        counts: &LossCounts,
        flags: &mut [f64],
    ) -> Result<(LossCounts, LossCounts)> {
        let data = self.mesh.axis(Axis::Data);
        if self.is_async() {
            // Of a mean over ranks, this one's share; nobody waits for the numbers of others.
            let numbers: Vec<f64> =
                counts.numbers().iter().map(|count| count * data.size() as f64).collect();
            let own = counts.with_numbers(&numbers);
            return Ok((own.clone(), own));
        }
        let all = match flags.is_empty() {
            true => counts.over(data, &self.host)?,
            false => {
                // Ranks that differ along other axes have the same samples.
                let others = [Axis::Tensor, Axis::Context, Axis::Pipeline];
                let counts_them = others.iter().all(|&axis| self.mesh.axis(axis).rank() == 0);
                let share = |count: f64| if counts_them { count } else { 0.0 };
                let own = counts.numbers().into_iter().map(share);
                let own: Vec<f64> = flags.iter().copied().chain(own).collect();
                let sums = self.mesh.world().sums(&self.host, &own)?;
                let (of_flags, of_counts) = sums.split_at(flags.len());
                flags.copy_from_slice(of_flags);
                counts.with_numbers(of_counts)
            }
        };
        match self.data_parallel.loss_ranks().size() == data.size() {
            true => Ok((all.clone(), all)),
            false => Ok((counts.clone(), all)),
        }
    }

    fn step_batch(
        &self,
        read: ReadBatches,
        seq_length: usize,
        (own, all): (&LossCounts, &LossCounts),
    ) -> StepBatch {
        let first_sample = self.progress.consumed_samples;
        let global_batch_size = self.config.batch_size.global_batch_size(first_sample);
        let (seed, step) = (self.config.seed, self.progress.step);
        StepBatch {
            batches: read.batches,
            first_sample,
            data_seconds: read.seconds,
            global_batch_size,
            pass: Context::new(seed, step, Mode::Train, global_batch_size, seq_length),
            counts: read.counts,
            loss: LossReduction::new(own, all),
        }
    }
}
