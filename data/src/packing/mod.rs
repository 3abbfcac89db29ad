//! Fine-tuning samples, packed into sequences: prompts and completions of which the completions count in the loss.
//!
//! A data set has one document for each sample: a sequence of the prompt, and one of the completion. Sample tokens
//! `t[0..n]` take `n - 1` positions, with the inputs `t[0..n-1]` and the targets `t[1..n]`; targets within the prompt are
//! [`IGNORE`](crate::IGNORE). [`Bins::first_fit`] packs samples into sequences. Attention and positions stop at the borders
//! of samples (`cu_seqlens`), so the loss is that of each sample alone. What is left of a sequence is padding, which is a
//! document of its own and does not count.
//!
//! The bins are computed once, when the data is opened. Training takes them in the order of a [`Permutation`] for each
//! epoch, a function of the seed and the number of the sequence, as [`Sampler`](crate::Sampler) does.

mod first_fit;
mod sampler;

use crate::blend::{Blend, BlendPart};
use crate::document_samples::DocumentRows;
use crate::{Batch, FiniteSamples, Samples, TokenBatch};
use ferrotron_tensor::{Error, Result};
use first_fit::Bins;
use std::fmt;

pub use first_fit::PackingAlgorithm;
pub use sampler::PackedSampler;

/// The packing of fine-tuning samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackingConfig {
    /// Positions of a sequence.
    pub seq_length: usize,
    /// The order in which first-fit takes the samples.
    pub algorithm: PackingAlgorithm,
    /// The treatment of samples that are longer than a sequence.
    pub long_samples: LongSamples,
}

/// The treatment of samples that are longer than a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LongSamples {
    /// Makes them an error.
    Refuse,
    /// Ends them with the sequence. Samples whose prompt leaves no position to a completion are left out.
    Truncate,
}

/// The fine-tuning samples of a blend, each once, packed into sequences.
///
/// ```
/// use ferrotron_data::{
///     BlendConfig, BlendPaths, BlendedDataset, IndexedDatasetBuilder, LongSamples, PackedSamples, PackingAlgorithm,
///     PackingConfig, Samples, Split, TokenBatch, TokenType,
/// };
/// # let folder = tempfile::tempdir().unwrap();
/// let prefix = folder.path().join("my_prompt_completion");
/// let mut builder = IndexedDatasetBuilder::new(&prefix, TokenType::U16)?;
/// for (prompt, completion) in [(&[1, 2][..], &[3, 4][..]), (&[5], &[6, 7])] {
///     builder.add_sequence(prompt)?;
///     builder.add_sequence(completion)?;
///     builder.end_document()?;
/// }
/// builder.finish()?;
///
/// let paths = BlendPaths::parse("--data-path", &[prefix.display().to_string()])?;
/// let config = BlendConfig::Shared(paths, Split::proportions([1.0, 0.0, 0.0])?);
/// let dataset = BlendedDataset::open_pairs(&config, 10)?;
/// let (algorithm, long_samples) = (PackingAlgorithm::FirstFit, LongSamples::Refuse);
/// let config = PackingConfig { seq_length: 6, algorithm, long_samples };
/// let batch = PackedSamples::new(&dataset.training, &config)?.batch(0, 1)?;
/// assert_eq!(batch.get::<u32>(TokenBatch::INPUTS)?, [1, 2, 3, 5, 6, 0]);
/// assert_eq!(batch.get::<i64>(TokenBatch::TARGETS)?, [-100, 3, 4, 6, 7, -100]);
/// assert_eq!(batch.get::<u32>(TokenBatch::POSITIONS)?, [0, 1, 2, 0, 1, 0]);
/// assert_eq!(batch.documents().unwrap(), [[0, 3, 5, 6]]);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Clone)]
pub struct PackedSamples {
    blend: Blend,
    seq_length: usize,
    pairs: Vec<Pair>,
    bins: Bins,
    /// The sequences that an evaluation takes.
    len: u64,
    report: PackingReport,
}

/// A prompt and its completion.
#[derive(Debug, Clone, Copy)]
struct Pair {
    /// Its first token, in the data set of this number.
    start: u64,
    set: u16,
    /// Tokens of the prompt.
    prompt: u32,
    /// Positions that it takes.
    positions: u32,
}

/// The numbers of a packing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PackingReport {
    /// Samples that are packed.
    pub samples: u64,
    /// Sequences.
    pub sequences: u64,
    /// Positions of all sequences.
    pub positions: u64,
    /// Positions that samples take.
    pub used: u64,
    /// Samples that were cut at the end of a sequence.
    pub truncated: u64,
    /// Samples that were left out, since their prompt alone fills a sequence.
    pub left_out: u64,
}

impl PackingReport {
    /// The share of the positions that samples take.
    pub fn efficiency(&self) -> f64 {
        self.used as f64 / self.positions.max(1) as f64
    }
}

impl fmt::Display for PackingReport {
    /// Writes one line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PackingReport { samples, sequences, truncated, left_out, .. } = self;
        let efficiency = 100.0 * self.efficiency();
        write!(
            f,
            "{samples} samples packed into {sequences} sequences, efficiency {efficiency:.2} %"
        )?;
        match (truncated, left_out) {
            (0, 0) => Ok(()),
            (_, 0) => write!(f, "; {truncated} samples are cut"),
            _ => write!(
                f,
                "; {truncated} samples are cut, and {left_out} left out, whose prompt alone fills a sequence"
            ),
        }
    }
}

impl PackedSamples {
    /// Packs the samples of all sets of `blend` together, as [`BlendedDataset::open_pairs`](crate::BlendedDataset::open_pairs)
    /// opens them. Weights do not matter. Takes 28 bytes of memory for each sample.
    ///
    /// # Errors
    /// A sequence length of 0; a damaged index; an empty prompt or completion; samples longer than a sequence, unless they
    /// are truncated; no sample.
    pub fn new(blend: &Blend, config: &PackingConfig) -> Result<PackedSamples> {
        let PackingConfig { seq_length, algorithm, long_samples } = *config;
        let capacity = u32::try_from(seq_length).ok().filter(|&capacity| capacity > 0);
        let capacity = capacity.ok_or_else(|| {
            Error::config("--seq-length", format!("{seq_length} must be 1 to {}", u32::MAX))
        })?;
        let (mut pairs, mut report) = (Vec::new(), PackingReport::default());
        let mut longest: Option<(u64, String)> = None;
        for (set, part) in blend.parts().iter().enumerate() {
            for (number, mut pair) in (0_u64..).zip(pairs_of(part, set as u16)?) {
                if pair.positions > capacity {
                    report.truncated += 1;
                    let needed = u64::from(pair.positions);
                    if longest.as_ref().is_none_or(|(most, _)| needed > *most) {
                        let number = part.sequences.start / 2 + number;
                        longest = Some((needed, format!("sample {number} of '{}'", part.name)));
                    }
                    pair.positions = capacity;
                }
                match pair.prompt <= pair.positions {
                    true => pairs.push(pair),
                    false => report.left_out += 1,
                }
            }
        }
        if let Some((needed, name)) = longest.filter(|_| long_samples == LongSamples::Refuse) {
            let message = format!(
                "{} of {} samples are longer than --seq-length {seq_length}, of which {name} needs the most, {needed}: give \
                 --seq-length {needed}, or cut them by --truncate-samples",
                report.truncated,
                pairs.len() as u64 + report.left_out
            );
            return Err(Error::config("--packing", message));
        }
        report.truncated -= report.left_out;
        if pairs.is_empty() {
            let message = match report.left_out {
                0 => "the data has no sample".to_string(),
                all => format!("the prompts of all {all} samples fill --seq-length {seq_length}"),
            };
            return Err(Error::config("--packing", message));
        }
        if u32::try_from(pairs.len()).is_err() {
            let message = format!("{} samples are more than 2^32", pairs.len());
            return Err(Error::config("--packing", message));
        }
        let lengths: Vec<u32> = pairs.iter().map(|pair| pair.positions).collect();
        let bins = Bins::first_fit(&lengths, capacity, algorithm);
        report.samples = pairs.len() as u64;
        report.sequences = bins.len() as u64;
        report.positions = report.sequences * seq_length as u64;
        report.used = lengths.iter().map(|&length| u64::from(length)).sum();
        let len = report.sequences;
        Ok(PackedSamples { blend: blend.clone(), seq_length, pairs, bins, len, report })
    }

    /// The first `sequences` sequences, or all if there are fewer.
    #[must_use]
    pub fn first(self, sequences: u64) -> PackedSamples {
        let len = sequences.min(self.report.sequences);
        PackedSamples { len, ..self }
    }

    /// The numbers of the packing.
    pub fn report(&self) -> PackingReport {
        self.report
    }

    /// Adds prompts, positions and bins to a checksum.
    fn hash(&self, hasher: &mut crc32fast::Hasher) {
        hasher.update(&(self.seq_length as u64).to_le_bytes());
        let mut words = |words: &mut dyn Iterator<Item = u32>| {
            words.for_each(|word| hasher.update(&word.to_le_bytes()));
        };
        words(&mut self.pairs.iter().flat_map(|pair| [pair.prompt, pair.positions]));
        words(&mut self.bins.items.iter().chain(&self.bins.ends).copied());
    }

    /// Fills a row with sequence number `sequence`, and adds the borders of its samples.
    fn fill(&self, sequence: u64, rows: &mut DocumentRows, row: usize) -> Result<()> {
        let (base, mut at) = (row * self.seq_length, 0);
        for &item in self.bins.bin(sequence as usize) {
            let Pair { start, set, prompt, positions } = self.pairs[item as usize];
            let mut tokens = vec![0; positions as usize + 1];
            let shard = &self.blend.parts()[usize::from(set)].shard;
            shard.read(start, &mut tokens, self.blend.vocab_size())?;
            let TokenBatch { inputs, targets, .. } = &mut rows.tokens;
            for (position, two) in tokens.windows(2).enumerate() {
                inputs[base + at + position] = two[0];
                if position + 1 >= prompt as usize {
                    targets[base + at + position] = i64::from(two[1]);
                }
            }
            at += positions as usize;
            rows.end_document(row, at);
        }
        Ok(())
    }
}

/// The samples of a data set, whole.
fn pairs_of(part: &BlendPart, set: u16) -> Result<Vec<Pair>> {
    let dataset = part.shard.dataset()?;
    dataset.check()?;
    let lengths = dataset.sequence_lengths(part.sequences.clone())?;
    let mut start = part.tokens.start;
    let pair = |(number, &[prompt, completion]): (u64, &[u32; 2])| {
        if prompt == 0 || completion == 0 {
            let number = part.sequences.start / 2 + number;
            let which = if prompt == 0 { "prompt" } else { "completion" };
            let message = format!("sample {number} of '{}' has an empty {which}", part.name);
            return Err(Error::value("data", message));
        }
        let pair = Pair { start, set, prompt, positions: prompt + completion - 1 };
        start += u64::from(prompt) + u64::from(completion);
        Ok(pair)
    };
    (0..).zip(lengths.as_chunks::<2>().0).map(pair).collect()
}

impl Samples for PackedSamples {
    /// Sequences beyond the last one have nothing that counts.
    fn batch(&self, first_sample: u64, micro_batch: usize) -> Result<Batch> {
        let mut rows = DocumentRows::blank(first_sample, micro_batch, self.seq_length);
        for row in 0..micro_batch {
            let sequence = first_sample + row as u64;
            if sequence < self.len {
                self.fill(sequence, &mut rows, row)?;
            }
        }
        rows.batch()
    }

    fn seq_length(&self) -> usize {
        self.seq_length
    }
}

impl FiniteSamples for PackedSamples {
    fn len(&self) -> u64 {
        self.len
    }
}

#[cfg(test)]
mod tests;
