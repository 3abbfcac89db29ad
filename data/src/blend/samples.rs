//! Samples of several data sets, each from the set that lags furthest behind its share.

use super::order::{BlendOrder, normalized};
use crate::{Batch, FiniteSamples, Sampler, Samples, TokenBatch, Validation};
use ferrotron_tensor::{Error, Result};

/// Training samples of sets with weights, in the order of [`Sampler`] within each.
///
/// The place of a sample is a function of the sets, their weights, the sequence length, the seed and its number.
pub(super) struct BlendedSampler {
    sets: Vec<Sampler>,
    order: BlendOrder,
    seq_length: usize,
}

impl BlendedSampler {
    /// The samples of sets with these weights.
    pub fn new(sets: Vec<Sampler>, weights: &[f64], seq_length: usize) -> BlendedSampler {
        let order = BlendOrder::new(normalized(&normalized(weights)));
        BlendedSampler { sets, order, seq_length }
    }
}

impl Samples for BlendedSampler {
    fn batch(&self, first_sample: u64, micro_batch: usize) -> Result<Batch> {
        let mut batch = TokenBatch::blank(first_sample, micro_batch, self.seq_length);
        for row in 0..micro_batch {
            let (set, number) = self.order.at(first_sample + row as u64).ok_or_else(spent)?;
            batch.copy_row(row, &self.sets[set].tokens(number, 1)?);
        }
        batch.try_into()
    }

    fn seq_length(&self) -> usize {
        self.seq_length
    }

    fn order_state(&self, sample: u64) -> Option<Vec<u64>> {
        Some(self.order.state(sample))
    }

    fn resume_order(&self, state: &[u64]) {
        self.order.resume(state);
    }
}

/// Windows of several sets, each of which is read once.
pub(super) struct BlendedValidation {
    sets: Vec<Validation>,
    order: BlendOrder,
    samples: u64,
    seq_length: usize,
}

impl BlendedValidation {
    /// The first `samples` windows of sets, by these weights or else by their size.
    pub fn new(
        sets: Vec<Validation>,
        weights: Option<&[f64]>,
        seq_length: usize,
        samples: u64,
    ) -> Result<BlendedValidation> {
        let sizes: Vec<u64> = sets.iter().map(Validation::samples).collect();
        let weights = match weights {
            Some(weights) => normalized(weights),
            None => normalized(&sizes.iter().map(|&size| size as f64).collect::<Vec<f64>>()),
        };
        let samples = samples.min(sizes.iter().sum());
        if samples == 0 {
            return Err(Error::value("data", "the validation data has no sample"));
        }
        let order = BlendOrder::finite(weights, sizes);
        Ok(BlendedValidation { sets, order, samples, seq_length })
    }
}

impl Samples for BlendedValidation {
    fn batch(&self, first_sample: u64, micro_batch: usize) -> Result<Batch> {
        let mut batch = TokenBatch::blank(first_sample, micro_batch, self.seq_length);
        for row in 0..micro_batch {
            let sample = first_sample + row as u64;
            if sample < self.samples {
                let (set, number) = self.order.at(sample).ok_or_else(spent)?;
                batch.copy_row(row, &self.sets[set].tokens(number, 1)?);
            }
        }
        batch.try_into()
    }

    fn seq_length(&self) -> usize {
        self.seq_length
    }
}

impl FiniteSamples for BlendedValidation {
    fn len(&self) -> u64 {
        self.samples
    }
}

fn spent() -> Error {
    Error::value("data", "all sets of the blend are read to their end")
}
