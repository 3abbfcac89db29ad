//! The order of packed sequences in training: every sequence once in each epoch, and sets by their weights.

use super::{PackedSamples, PackingConfig, PackingReport};
use crate::blend::Blend;
use crate::blend::order::{BlendOrder, normalized};
use crate::document_samples::DocumentRows;
use crate::{Batch, Permutation, Samples};
use ferrotron_tensor::{Error, RandomKey, Result};

/// Draws packed sequences of fine-tuning samples for training.
///
/// Sample `n` of a run is a sequence of [`PackedSamples`]. Its place is a function of the data, the
/// [`PackingConfig`], the seed and `n`.
pub struct PackedSampler {
    sets: Vec<PackedSamples>,
    /// The set of each sample; none if all are packed together.
    order: Option<BlendOrder>,
    seed: u64,
    seq_length: usize,
}

impl PackedSampler {
    /// Packs the samples of `blend`. Sets without weights are packed together; with weights, each set is packed by itself,
    /// and sequences are drawn from them by weight.
    ///
    /// # Errors
    /// Errors of [`PackedSamples::new`].
    pub fn new(blend: &Blend, config: &PackingConfig, seed: u64) -> Result<PackedSampler> {
        let weights = blend.weights().filter(|_| blend.num_sets() > 1);
        let order = weights.map(|weights| BlendOrder::new(normalized(&normalized(weights))));
        let sets = match order {
            None => vec![PackedSamples::new(blend, config)?],
            Some(_) => {
                let set = |set: usize| PackedSamples::new(&blend.set(set), config);
                (0..blend.num_sets()).map(set).collect::<Result<_>>()?
            }
        };
        Ok(PackedSampler { sets, order, seed, seq_length: config.seq_length })
    }

    /// The numbers of the packing, over all sets.
    pub fn report(&self) -> PackingReport {
        self.sets.iter().map(PackedSamples::report).fold(PackingReport::default(), |sum, set| {
            PackingReport {
                samples: sum.samples + set.samples,
                sequences: sum.sequences + set.sequences,
                positions: sum.positions + set.positions,
                used: sum.used + set.used,
                truncated: sum.truncated + set.truncated,
                left_out: sum.left_out + set.left_out,
            }
        })
    }

    /// A CRC-32 of prompts, borders, sequences and weights: runs that differ in it have other samples of the same tokens.
    pub fn crc32(&self) -> u32 {
        let mut hasher = crc32fast::Hasher::new();
        let weights = self.order.iter().flat_map(BlendOrder::weights);
        weights.for_each(|weight| hasher.update(&weight.to_le_bytes()));
        self.sets.iter().for_each(|set| set.hash(&mut hasher));
        hasher.finalize()
    }

    /// The set of sample `sample` of the run, and the sequence there.
    fn place(&self, sample: u64) -> Result<(usize, u64)> {
        let spent = || Error::value("data", "all sets of the blend are read to their end");
        let (set, number) = match &self.order {
            Some(order) => order.at(sample).ok_or_else(spent)?,
            None => (0, sample),
        };
        let sequences = self.sets[set].report.sequences;
        // Sets of equal size have orders of their own.
        let seed = self.seed ^ (set as u64).rotate_right(16);
        let key = RandomKey::new(seed, number / sequences, "data.packing");
        Ok((set, Permutation::new(key, sequences).at(number % sequences)))
    }
}

impl Samples for PackedSampler {
    /// Errors if a token is beyond the vocabulary.
    fn batch(&self, first_sample: u64, micro_batch: usize) -> Result<Batch> {
        let mut rows = DocumentRows::blank(first_sample, micro_batch, self.seq_length);
        for row in 0..micro_batch {
            let (set, sequence) = self.place(first_sample + row as u64)?;
            self.sets[set].fill(sequence, &mut rows, row)?;
        }
        rows.batch()
    }

    fn seq_length(&self) -> usize {
        self.seq_length
    }
}
