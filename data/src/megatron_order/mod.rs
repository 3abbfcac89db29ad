//! Training samples in the order of Megatron-LM, of one indexed data set or a weighted blend.
//!
//! The order is that of `GPTDataset` and `BlendedDataset` for the same files, `--split`, `--seed`, sequence length and
//! number of samples, so that a run can be moved over in the middle of an epoch. It is a function of these alone: a run
//! resumes by its count of consumed samples. As in Megatron, another number of samples makes another order.

mod blend;
mod indices;
mod random_state;

use crate::indexed_dataset::IndexedDataset;
use crate::shard::Shard;
use crate::source::MAX_OPEN;
use crate::{Batch, Samples, Split, TokenBatch};
use ferrotron_tensor::{Error, Result};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blend::Weights;
use indices::{Indices, Start};

/// Which samples Megatron would draw.
#[derive(Debug, Clone, PartialEq)]
pub struct MegatronOrderConfig {
    /// Indexed data sets with their weights.
    pub data: Vec<(PathBuf, f64)>,
    /// The share of each data set's sequences that is for training; the first part of it is taken.
    pub split: Split,
    /// Tokens of a sample.
    pub seq_length: usize,
    /// Samples of the whole run: steps times the global batch size.
    pub samples: u64,
    /// The seed, of 32 bits as in NumPy.
    pub seed: u32,
    /// Every token is below this.
    pub vocab_size: usize,
}

/// Draws training batches in Megatron-LM's order.
///
/// ```
/// use ferrotron_data::{IndexedDatasetBuilder, MegatronOrderConfig, MegatronSampler, Split, TokenType};
/// # let folder = tempfile::tempdir().unwrap();
/// let prefix = folder.path().join("my_text_document");
/// let mut builder = IndexedDatasetBuilder::new(&prefix, TokenType::U16)?;
/// for document in 0..10 {
///     builder.add_sequence(&[document; 6])?;
///     builder.end_document()?;
/// }
/// builder.finish()?;
///
/// let sampler = MegatronSampler::new(&MegatronOrderConfig {
///     data: vec![(prefix, 1.0)],
///     split: Split::valid_fraction(0.2)?, // eight documents for training
///     seq_length: 4,
///     samples: 100,
///     seed: 1234,
///     vocab_size: 10,
/// })?;
/// let batch = sampler.tokens(40, 2)?; // the samples 40 and 41 of the run
/// assert!(batch.inputs.iter().all(|&token| token < 8));
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Clone)]
pub struct MegatronSampler {
    sets: Arc<[IndexedSet]>,
    /// The set of each sample and its number there, if there are several sets.
    blend: Option<Arc<[(u16, u32)]>>,
    samples: u64,
    seq_length: usize,
    vocab_size: usize,
}

/// A data set of a blend, with its order.
struct IndexedSet {
    shard: Shard,
    indices: Indices,
}

impl MegatronSampler {
    /// Opens the data sets and computes the indices: 4 bytes for each sequence of each epoch, and 12 to 20 for each
    /// sample.
    ///
    /// # Errors
    /// A data set that is none or is damaged; too few tokens for a sample; weights that are none; more samples or
    /// sequences than Megatron counts.
    pub fn new(config: &MegatronOrderConfig) -> Result<MegatronSampler> {
        if config.seq_length == 0 {
            return Err(Error::config("data", "--seq-length must be at least 1"));
        }
        let (weights, single) = (config.data.iter().map(|set| set.1), config.data.len() == 1);
        let weights = Weights::new(&weights.collect::<Vec<f64>>())?;
        let needed = match single {
            true => vec![config.samples],
            false => weights.needed(config.samples),
        };
        let open = |(set, (path, _)): (usize, &(PathBuf, f64))| {
            let mut opened = IndexedSet::new(path, config, needed[set])
                .map_err(|error| error.at(&path.display().to_string()))?;
            if set >= MAX_OPEN {
                opened.shard.close();
            }
            Ok(opened)
        };
        let sets: Result<Vec<IndexedSet>> = config.data.iter().enumerate().map(open).collect();
        let sets = sets?;
        if sets.is_empty() {
            return Err(Error::config("data", "no data set given"));
        }
        let blend = (!single).then(|| weights.order(config.samples).into());
        let samples = match single {
            true => sets[0].indices.shuffle.len() as u64,
            false => config.samples,
        };
        let (seq_length, vocab_size) = (config.seq_length, config.vocab_size);
        Ok(MegatronSampler { sets: sets.into(), blend, samples, seq_length, vocab_size })
    }

    /// The samples `first_sample` to `first_sample + micro_batch - 1` of the run, as rows of tokens.
    ///
    /// # Errors
    /// A sample beyond those that the order was made for; a token beyond the vocabulary; a damaged index.
    pub fn tokens(&self, first_sample: u64, micro_batch: usize) -> Result<TokenBatch> {
        let mut batch = TokenBatch::blank(first_sample, micro_batch, self.seq_length);
        let mut tokens = vec![0; self.seq_length + 1];
        for row in 0..micro_batch {
            let sample = first_sample + row as u64;
            if sample >= self.samples {
                let message = format!(
                    "sample {sample} is not among the {} that Megatron's order was made for: it depends on their number",
                    self.samples
                );
                return Err(Error::value("data", message));
            }
            let (set, sample) = match &self.blend {
                Some(blend) => blend[sample as usize],
                None => (0, sample as u32),
            };
            self.sets[set as usize].read(sample, &mut tokens, self.vocab_size)?;
            batch.fill(row, &tokens);
        }
        Ok(batch)
    }
}

impl Samples for MegatronSampler {
    fn batch(&self, first_sample: u64, micro_batch: usize) -> Result<Batch> {
        self.tokens(first_sample, micro_batch)?.try_into()
    }

    fn seq_length(&self) -> usize {
        self.seq_length
    }
}

impl IndexedSet {
    fn new(path: &Path, config: &MegatronOrderConfig, samples: u64) -> Result<IndexedSet> {
        let dataset = IndexedDataset::open(path)?;
        dataset.check()?;
        let [training, _, _] = config.split.sequences(dataset.num_sequences());
        let lengths = dataset.sequence_lengths(training.clone())?;
        let indices =
            Indices::new(&lengths, training, config.seq_length, Some(samples), config.seed)?;
        Ok(IndexedSet { shard: Shard::indexed(dataset)?, indices })
    }

    /// Fills `tokens` with sample number `sample` of this set.
    fn read(&self, sample: u32, tokens: &mut [u32], vocab_size: usize) -> Result<()> {
        let Indices { documents, starts, shuffle } = &self.indices;
        let Start { position, offset } = starts[shuffle[sample as usize] as usize];
        let (mut position, mut offset, mut rest) = (position as usize, u64::from(offset), tokens);
        while !rest.is_empty() {
            let sequence: Range<u64> = self.shard.sequence(documents[position].into())?;
            let here = rest.len().min((sequence.end - sequence.start - offset) as usize);
            let (part, later) = rest.split_at_mut(here);
            self.shard.read(sequence.start + offset, part, vocab_size)?;
            (position, offset, rest) = (position + 1, 0, later);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
