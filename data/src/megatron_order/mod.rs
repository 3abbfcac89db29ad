//! Training samples in the order of Megatron-LM, of one indexed data set or a weighted blend.
//!
//! The order is that of `GPTDataset` and `BlendedDataset` for the same files, `--split`, `--seed`, sequence length and
//! number of samples, so that a run can be moved over in the middle of an epoch. It is a function of these alone: a run
//! resumes by its count of consumed samples. As in Megatron, another number of samples makes another order.

mod indices;
mod random_state;
mod validation;

use crate::blend::order::{BlendOrder, needed, normalized};
use crate::blend::{Blend, BlendPart};
use crate::{Batch, Samples, TokenBatch};
use ferrotron_tensor::{Error, Result};
use std::ops::Range;
use std::sync::Arc;

use crate::shard::Shard;
use indices::{Indices, Start, too_short};

pub use validation::{MegatronValidation, MegatronValidationConfig};

/// The options that decide which samples Megatron would draw of a blend.
#[derive(Debug, Clone, PartialEq)]
pub struct MegatronOrderConfig {
    /// Tokens of a sample.
    pub seq_length: usize,
    /// Samples of the whole run: steps times the global batch size.
    pub samples: u64,
    /// The seed, of 32 bits as in NumPy.
    pub seed: u32,
}

/// Draws training batches in Megatron-LM's order.
///
/// ```
/// use ferrotron_data::{
///     BlendConfig, BlendPaths, BlendedDataset, IndexedDatasetBuilder, MegatronOrderConfig, MegatronSampler, Split, TokenType,
/// };
/// # let folder = tempfile::tempdir().unwrap();
/// let prefix = folder.path().join("my_text_document");
/// let mut builder = IndexedDatasetBuilder::new(&prefix, TokenType::U16)?;
/// for document in 0..10 {
///     builder.add_sequence(&[document; 6])?;
///     builder.end_document()?;
/// }
/// builder.finish()?;
///
/// let paths = BlendPaths::parse("--data-path", &[prefix.display().to_string()])?;
/// let split = Split::proportions([8.0, 2.0, 0.0])?; // eight documents for training
/// let dataset = BlendedDataset::open(&BlendConfig::Shared(paths, split), 10)?;
/// let order = MegatronOrderConfig { seq_length: 4, samples: 100, seed: 1234 };
/// let sampler = MegatronSampler::new(&dataset.training, &order)?;
/// let batch = sampler.tokens(40, 2)?; // the samples 40 and 41 of the run
/// assert!(batch.inputs.iter().all(|&token| token < 8));
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Clone)]
pub struct MegatronSampler {
    sets: Arc<[OrderedSet]>,
    /// The set of each sample and its number there, unless there is one set without a weight.
    blend: Option<Arc<BlendOrder>>,
    samples: u64,
    seq_length: usize,
    vocab_size: usize,
}

/// A data set of a blend, with its order.
struct OrderedSet {
    shard: Arc<Shard>,
    indices: Indices,
}

impl MegatronSampler {
    /// Computes the indices: 4 bytes for each sequence of each epoch, and 12 to 20 for each sample.
    ///
    /// # Errors
    /// A damaged index; too few tokens for a sample; more samples than sets without weights have, which are read once; more
    /// samples or sequences than Megatron counts.
    pub fn new(blend: &Blend, config: &MegatronOrderConfig) -> Result<MegatronSampler> {
        let MegatronOrderConfig { seq_length, samples, seed } = *config;
        for BlendPart { name, sequences, tokens, .. } in blend.parts() {
            let [sequences, tokens] = [sequences, tokens].map(|range| range.end - range.start);
            if tokens <= seq_length as u64 {
                return Err(too_short(tokens, sequences, seq_length).at(name));
            }
        }
        let remedy = "a smaller --train-iters or --train-samples";
        MegatronSampler::order(blend, seq_length, Some(samples), seed, remedy)
    }

    /// The order of `samples` samples, or of all samples of one epoch. `remedy` says how to ask for fewer.
    fn order(
        blend: &Blend,
        seq_length: usize,
        samples: Option<u64>,
        seed: u32,
        remedy: &str,
    ) -> Result<MegatronSampler> {
        if seq_length == 0 {
            return Err(Error::config("data", "--seq-length must be at least 1"));
        }
        let shares = blend.weights().map(normalized);
        let needed: Vec<Option<u64>> = match (&shares, blend.num_sets(), samples) {
            (None, 1, samples) => vec![samples],
            // One epoch of each.
            (None, sets, _) => vec![None; sets],
            (Some(shares), _, Some(samples)) => {
                needed(shares, samples).into_iter().map(Some).collect()
            }
            (Some(_), ..) => {
                let message =
                    "a blend with weights has no end in Megatron's order: give a number of samples";
                return Err(Error::config(blend.option(), message));
            }
        };
        let order = |(part, needed): (&BlendPart, Option<u64>)| {
            OrderedSet::new(part, seq_length, needed, seed).map_err(|error| error.at(&part.name))
        };
        let sets = blend.parts().iter().zip(needed).map(order);
        let sets = sets.collect::<Result<Vec<OrderedSet>>>()?;
        let sizes: Vec<u64> = sets.iter().map(|set| set.indices.shuffle.len() as u64).collect();
        let all: u64 = sizes.iter().sum();
        let samples = samples.unwrap_or(all);
        let order = match (shares, sizes.len()) {
            (None, 1) => None,
            (None, _) => {
                if all < samples {
                    let message = format!(
                        "without weights each data set is read once, which makes {all} samples of --seq-length {seq_length}, \
                         but the run takes {samples}: give weights, or {remedy}"
                    );
                    return Err(Error::config(blend.option(), message));
                }
                let sizes: Vec<f64> = sizes.iter().map(|&size| size as f64).collect();
                Some(BlendOrder::new(normalized(&sizes)))
            }
            // Megatron normalizes them twice.
            (Some(shares), _) => Some(BlendOrder::new(normalized(&shares))),
        };
        let short = order.as_ref().and_then(|order| order.first_short(samples, &sizes));
        if let Some((set, taken)) = short {
            let message = format!(
                "the blend takes {taken} samples of '{}', which has {}: Megatron refuses that too",
                blend.parts()[set].name,
                sizes[set]
            );
            return Err(Error::value("data", message));
        }
        let samples = if order.is_none() { sizes[0] } else { samples };
        let (blend, vocab_size) = (order.map(Arc::new), blend.vocab_size());
        Ok(MegatronSampler { sets: sets.into(), blend, samples, seq_length, vocab_size })
    }

    /// A CRC-32 of weights and of the shuffled sequences and samples of each set: runs that differ in it have different
    /// orders.
    pub fn crc32(&self) -> u32 {
        let mut hasher = crc32fast::Hasher::new();
        let weights = self.blend.iter().flat_map(|blend| blend.weights());
        weights.for_each(|weight| hasher.update(&weight.to_le_bytes()));
        for Indices { documents, shuffle, .. } in self.sets.iter().map(|set| &set.indices) {
            for words in documents.chunks(1 << 14).chain(shuffle.chunks(1 << 14)) {
                let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
                hasher.update(&bytes);
            }
        }
        hasher.finalize()
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
            let place = match &self.blend {
                _ if sample >= self.samples => None,
                Some(blend) => blend.at(sample),
                None => Some((0, sample)),
            };
            let Some((set, sample)) = place else {
                let message = format!(
                    "sample {sample} is not among the {} that Megatron's order was made for: it depends on their number",
                    self.samples
                );
                return Err(Error::value("data", message));
            };
            self.sets[set].read(sample, &mut tokens, self.vocab_size)?;
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

    fn order_state(&self, sample: u64) -> Option<Vec<u64>> {
        Some(self.blend.as_ref()?.state(sample))
    }

    fn resume_order(&self, state: &[u64]) {
        self.blend.iter().for_each(|blend| blend.resume(state));
    }
}

impl OrderedSet {
    fn new(
        part: &BlendPart,
        seq_length: usize,
        samples: Option<u64>,
        seed: u32,
    ) -> Result<OrderedSet> {
        let dataset = part.shard.dataset()?;
        dataset.check()?;
        let lengths = dataset.sequence_lengths(part.sequences.clone())?;
        let sequences = part.sequences.clone();
        let indices = Indices::new(&lengths, sequences, seq_length, samples, seed)?;
        Ok(OrderedSet { shard: part.shard.clone(), indices })
    }

    /// Fills `tokens` with sample number `sample` of this set.
    fn read(&self, sample: u64, tokens: &mut [u32], vocab_size: usize) -> Result<()> {
        let Indices { documents, starts, shuffle } = &self.indices;
        let Start { position, offset } = starts[shuffle[sample as usize] as usize];
        let (mut position, mut offset, mut rest) = (position as usize, u64::from(offset), tokens);
        let dataset = self.shard.dataset()?;
        while !rest.is_empty() {
            let sequence: Range<u64> = dataset.sequence_tokens(documents[position].into())?;
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
