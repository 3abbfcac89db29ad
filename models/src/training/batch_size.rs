//! Batch arithmetic: global batch = micro batch x data-parallel size x accumulation.
//!
//! The optimizer sees only the global batch; ranks and accumulation determine how it is split. Sample numbers count
//! from the start of the run (`consumed`), so the same samples are in the same update for any number of ranks.
//!
//! A ramp-up ([`Rampup`], Megatron-LM's `--rampup-batch-size <start> <increment> <samples>`) starts with `start`
//! samples per update. It grows to the full global batch in equal increments, spread evenly over the first `samples`
//! samples. With `n = (global - start) / increment` increments, the batch after `consumed` samples is
//! `start + increment * floor(consumed * n / samples)`, and the full batch from `consumed = samples` on.

use ferrotron_tensor::{Error, Result};

use crate::io::data::{Batch, Samples};

/// A batch-size ramp-up: `--rampup-batch-size <start> <increment> <samples>`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rampup {
    /// Global batch of the first update.
    pub start: usize,
    /// Samples by which the batch grows per increment.
    pub increment: usize,
    /// Samples over which the growth is spread.
    pub samples: u64,
}

/// Configuration of a [`BatchSize`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchSizeConfig {
    /// Samples per forward pass of one rank (`--micro-batch-size`).
    pub micro_batch_size: usize,
    /// Number of ranks with different samples.
    pub data_parallel_size: usize,
    /// Samples per update (`--global-batch-size`); `None` means micro x data-parallel.
    pub global_batch_size: Option<usize>,
    /// Optional ramp-up at the start of the run.
    pub rampup: Option<Rampup>,
}

impl Default for BatchSizeConfig {
    /// One sample on one rank.
    fn default() -> Self {
        BatchSizeConfig {
            micro_batch_size: 1,
            data_parallel_size: 1,
            global_batch_size: None,
            rampup: None,
        }
    }
}

impl BatchSizeConfig {
    /// The largest micro-batch size below the chosen one that leaves all batches as they were given, if there is one.
    fn smaller_micro_batch(&self) -> Option<usize> {
        let global = self.global_batch_size?;
        let rampup = self.rampup.map(|rampup| [rampup.start, rampup.increment]);
        let batches = rampup.into_iter().flatten().chain([global]);
        let fits = |micro: usize, batch| {
            batch > 0 && usize::is_multiple_of(batch, micro * self.data_parallel_size)
        };
        let smaller = 1..self.micro_batch_size.min(global / self.data_parallel_size + 1);
        smaller.rev().find(|micro| batches.clone().all(|batch| fits(*micro, batch)))
    }
}

/// Validated batch sizes. Sizes that vary are functions of the consumed samples.
///
/// ```
/// use ferrotron_models::batch_size::{BatchSize, BatchSizeConfig};
/// let sizes = BatchSize::new(BatchSizeConfig {
///     micro_batch_size: 8,
///     data_parallel_size: 2,
///     global_batch_size: Some(32),
///     ..BatchSizeConfig::default()
/// })?;
/// assert_eq!(sizes.global_batch_size(0), 32);
/// assert_eq!(sizes.microbatches(0), 2);
/// assert_eq!(sizes.first_sample(64, 1, 0), 64 + 16); // second microbatch, first rank
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchSize {
    micro_batch_size: usize,
    data_parallel: usize,
    global_batch_size: usize,
    rampup: Option<Rampup>,
}

impl BatchSize {
    /// `global` samples per update; each of `data_parallel` ranks takes `micro` at a time.
    ///
    /// # Errors
    /// The errors of [`BatchSize::new`].
    pub fn constant(micro: usize, data_parallel: usize, global: usize) -> Result<Self> {
        BatchSize::new(BatchSizeConfig {
            micro_batch_size: micro,
            data_parallel_size: data_parallel,
            global_batch_size: Some(global),
            rampup: None,
        })
    }

    /// Checks that every batch of the run consists of whole micro-batches on every rank.
    ///
    /// # Errors
    /// Errors if a size is zero, or if micro x data-parallel does not divide the global batch, the ramp-up start or the
    /// increment. Errors if the ramp-up does not reach the global batch in whole increments.
    pub fn new(config: BatchSizeConfig) -> Result<Self> {
        let BatchSizeConfig { micro_batch_size: micro, data_parallel_size, rampup, .. } = config;
        let refuse = |context: String| Error::config("batch size", context);
        if micro == 0 || data_parallel_size == 0 {
            return Err(refuse(format!(
                "--micro-batch-size {micro} and data-parallel size {data_parallel_size} must be at least 1"
            )));
        }
        let Some(unit) = micro.checked_mul(data_parallel_size) else {
            return Err(refuse(format!(
                "micro {micro} x data-parallel {data_parallel_size} overflows"
            )));
        };
        let global = config.global_batch_size.unwrap_or(unit);
        let check = |name: &str, value: usize| {
            if value == 0 || !value.is_multiple_of(unit) {
                let down = value / unit * unit;
                let up = down.saturating_add(unit);
                let near = if down == 0 { up.to_string() } else { format!("{down} or {up}") };
                let keep = config.smaller_micro_batch().map_or(String::new(), |micro| {
                    format!(", or keep it with --micro-batch-size {micro}")
                });
                return Err(refuse(format!(
                    "{name} {value} is not a multiple of --micro-batch-size {micro} x data-parallel size \
                     {data_parallel_size} = {unit}: use {near}, for example{keep}"
                )));
            }
            Ok(())
        };
        check("--global-batch-size", global)?;
        if let Some(Rampup { start, increment, .. }) = rampup {
            check("--rampup-batch-size start", start)?;
            check("--rampup-batch-size increment", increment)?;
            if start > global || !(global - start).is_multiple_of(increment) {
                return Err(refuse(format!(
                    "--rampup-batch-size cannot go from {start} to --global-batch-size {global} in increments \
                     of {increment}"
                )));
            }
        }
        Ok(BatchSize {
            micro_batch_size: micro,
            data_parallel: data_parallel_size,
            global_batch_size: global,
            rampup,
        })
    }

    /// Errors unless it was made for `ranks` ranks along the data axis: they would take samples twice, or leave some out.
    pub(crate) fn check_ranks(&self, ranks: usize) -> Result<()> {
        if self.data_parallel == ranks {
            return Ok(());
        }
        let message = format!(
            "it is for a data-parallel size of {}, and the mesh has {ranks} ranks along the data axis: set \
             `data_parallel_size` of BatchSizeConfig",
            self.data_parallel
        );
        Err(Error::config("batch size", message))
    }

    /// Samples of one micro-batch on one rank.
    pub fn micro_batch_size(&self) -> usize {
        self.micro_batch_size
    }

    /// Samples per update after the ramp-up.
    pub fn full_batch_size(&self) -> usize {
        self.global_batch_size
    }

    /// Samples of the update that starts after `consumed` samples.
    pub fn global_batch_size(&self, consumed: u64) -> usize {
        match self.rampup {
            Some(Rampup { start, increment, samples }) if consumed < samples => {
                let increments = ((self.global_batch_size - start) / increment) as u128;
                // The floor is exact in u128; increments * consumed can exceed 64 bits.
                let done = u128::from(consumed) * increments / u128::from(samples);
                start + done as usize * increment
            }
            _ => self.global_batch_size,
        }
    }

    /// Number of whole updates that start after `consumed` samples and end within the first `samples` of a run.
    ///
    /// ```
    /// use ferrotron_models::batch_size::{BatchSize, BatchSizeConfig, Rampup};
    /// let rampup = Some(Rampup { start: 2, increment: 2, samples: 6 });
    /// let sizes = BatchSize::new(BatchSizeConfig { global_batch_size: Some(8), rampup, ..BatchSizeConfig::default() })?;
    /// assert_eq!(sizes.steps_within(0, 30), 5); // 2 + 4 + 8 + 8 + 8
    /// assert_eq!(sizes.steps_within(0, 29), 4);
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn steps_within(&self, mut consumed: u64, samples: u64) -> u64 {
        let mut steps = 0;
        while self.rampup.is_some_and(|rampup| consumed < rampup.samples) {
            let next = consumed.saturating_add(self.global_batch_size(consumed) as u64);
            if next > samples {
                return steps;
            }
            (consumed, steps) = (next, steps + 1);
        }
        steps + samples.saturating_sub(consumed) / self.global_batch_size as u64
    }

    /// Micro-batches per rank in the update that starts after `consumed` samples.
    pub fn microbatches(&self, consumed: u64) -> usize {
        self.global_batch_size(consumed) / (self.micro_batch_size * self.data_parallel)
    }

    /// The first sample and the number of samples of each micro-batch of rank `data_parallel_rank`, in the update that
    /// starts after `consumed` samples.
    pub fn batches(&self, consumed: u64, data_parallel_rank: usize) -> Vec<(u64, usize)> {
        let first = |i| self.first_sample(consumed, i, data_parallel_rank);
        (0..self.microbatches(consumed)).map(|i| (first(i), self.micro_batch_size)).collect()
    }

    /// Reads the micro-batches of [`BatchSize::batches`].
    ///
    /// Errors unless `samples` returns those that it is asked for, of as many positions as it says.
    pub(crate) fn read(
        &self,
        samples: &dyn Samples,
        consumed: u64,
        data_parallel_rank: usize,
    ) -> Result<Vec<Batch>> {
        let length = samples.seq_length();
        let read = |(first, count): (u64, usize)| {
            let batch = samples.batch(first, count)?;
            if (batch.first_sample, batch.micro_batch, batch.seq_length) == (first, count, length) {
                return Ok(batch);
            }
            let message = format!(
                "asked for {count} from {first} on, of {length} positions each, and got {} from {} on, of {} positions",
                batch.micro_batch, batch.first_sample, batch.seq_length
            );
            Err(Error::value("samples", message))
        };
        self.batches(consumed, data_parallel_rank).into_iter().map(read).collect()
    }

    /// All numbers of micro-batches that updates of the run may have.
    pub fn all_microbatches(&self) -> impl Iterator<Item = usize> {
        let unit = self.micro_batch_size * self.data_parallel;
        let (start, increment) =
            self.rampup.map_or((self.global_batch_size, self.global_batch_size), |rampup| {
                (rampup.start, rampup.increment)
            });
        (start..=self.global_batch_size).step_by(increment).map(move |global| global / unit)
    }

    /// The first sample of rank `data_parallel_rank` in micro-batch `microbatch` of the update that starts after
    /// `consumed` samples. Ranks are adjacent within a micro-batch, as in Megatron-LM.
    pub fn first_sample(&self, consumed: u64, microbatch: usize, data_parallel_rank: usize) -> u64 {
        let chunk = microbatch * self.data_parallel + data_parallel_rank;
        consumed + chunk as u64 * self.micro_batch_size as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(
        micro: usize,
        data_parallel: usize,
        global: Option<usize>,
        rampup: Option<(usize, usize, u64)>,
    ) -> Result<BatchSize> {
        BatchSize::new(BatchSizeConfig {
            micro_batch_size: micro,
            data_parallel_size: data_parallel,
            global_batch_size: global,
            rampup: rampup.map(|(start, increment, samples)| Rampup { start, increment, samples }),
        })
    }

    #[test]
    fn microbatches_are_megatrons() {
        // Values of Megatron-LM's test_num_microbatches_calculator.py, except where that decreases sizes silently.
        assert_eq!(sizes(8, 2, Some(32), None).unwrap().microbatches(0), 2);
        assert_eq!(
            sizes(8, 3, Some(32), None).unwrap_err().to_string(),
            "batch size: --global-batch-size 32 is not a multiple of --micro-batch-size 8 x data-parallel size 3 = 24: \
             use 24 or 48, for example"
        );
        assert!(sizes(8, 2, Some(33), None).is_err());
    }

    #[test]
    fn the_default_global_batch_is_micro_times_data_parallel() {
        let sizes = sizes(4, 3, None, None).unwrap();
        assert_eq!(
            (
                sizes.global_batch_size(0),
                sizes.microbatches(7),
                sizes.micro_batch_size(),
                sizes.full_batch_size()
            ),
            (12, 1, 4, 12)
        );
    }

    #[test]
    fn zero_and_impossible_sizes_are_refused_with_their_values() {
        for (result, words) in [
            (sizes(0, 1, None, None), "--micro-batch-size 0"),
            (sizes(1, 0, None, None), "data-parallel size 0"),
            (sizes(4, 1, Some(0), None), "--global-batch-size 0 is not a multiple"),
            (
                sizes(8, 1, Some(4), None),
                "= 8: use 8, for example, or keep it with --micro-batch-size 4",
            ),
            (
                sizes(4, 2, Some(20), None),
                "use 16 or 24, for example, or keep it with --micro-batch-size 2",
            ),
            (sizes(4, 4, Some(30), None), "use 16 or 32, for example"),
            (sizes(usize::MAX, 2, None, None), "overflows"),
            (
                sizes(4, 2, Some(32), Some((4, 8, 100))),
                "start 4 is not a multiple of --micro-batch-size 4 x data-parallel size 2 = 8: use 8, for example, or \
                 keep it with --micro-batch-size 2",
            ),
            (sizes(4, 2, Some(32), Some((8, 0, 100))), "increment 0 is not a multiple"),
            (
                sizes(4, 2, Some(32), Some((8, 16, 100))),
                "from 8 to --global-batch-size 32 in increments of 16",
            ),
            (sizes(4, 2, Some(32), Some((40, 8, 100))), "from 40 to --global-batch-size 32"),
        ] {
            let error = result.unwrap_err().to_string();
            assert!(error.contains(words), "'{error}' does not say '{words}'");
        }
    }

    #[test]
    fn a_ramp_up_grows_in_equal_parts_and_ends_at_the_global_batch() {
        let sizes = sizes(4, 2, Some(32), Some((8, 8, 300))).unwrap();
        // Three increments over 300 samples: one per hundred.
        for (consumed, want) in
            [(0, 8), (99, 8), (100, 16), (199, 16), (200, 24), (299, 24), (300, 32), (u64::MAX, 32)]
        {
            assert_eq!(sizes.global_batch_size(consumed), want, "after {consumed} samples");
            assert_eq!(sizes.microbatches(consumed), want / 8);
        }
    }

    #[test]
    fn a_ramp_up_of_no_length_or_no_height_is_the_full_batch() {
        assert_eq!(sizes(1, 1, Some(8), Some((2, 2, 0))).unwrap().global_batch_size(0), 8);
        assert_eq!(sizes(1, 1, Some(8), Some((8, 2, 100))).unwrap().global_batch_size(50), 8);
    }

    #[test]
    fn ranks_and_microbatches_cut_an_update_without_gap_or_overlap() {
        for data_parallel in [1, 2, 4] {
            let sizes = sizes(2, data_parallel, Some(16), None).unwrap();
            let mut samples: Vec<u64> = (0..sizes.microbatches(48))
                .flat_map(|m| (0..data_parallel).map(move |rank| (m, rank)))
                .flat_map(|(m, rank)| (0..2).map(move |i| sizes.first_sample(48, m, rank) + i))
                .collect();
            samples.sort_unstable();
            assert_eq!(samples, (48..64).collect::<Vec<u64>>());
        }
    }
}
