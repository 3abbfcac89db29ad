//! Indexed data sets that are read together, by weight: Megatron-LM's `--data-path`.
//!
//! A [`BlendConfig`] names the sets; [`BlendedDataset::open`] divides them into those for training, for validation and for testing. A
//! [`Blend`] gives its samples in one of two orders: that of [`Sampler`](crate::Sampler), or Megatron's
//! ([`MegatronSampler`](crate::MegatronSampler)).

mod names;
pub(crate) mod order;
mod paths;
mod samples;
mod unit;

use crate::indexed_dataset::IndexedDataset;
use crate::shard::Shard;
use crate::source::{MAX_OPEN, Part};
use crate::token_fingerprint;
use crate::tokenizer::Tokenizer;
use crate::{Dataset, FiniteSamples, Sampler, Samples, Split, TokenSource, Validation};
use ferrotron_tensor::{Error, Result};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use names::distinct_names;
pub use paths::BlendPaths;
use samples::{BlendedSampler, BlendedValidation};
use unit::Unit;

/// Sets that one blend can have: Megatron counts them with 16 bits.
const MAX_SETS: usize = i16::MAX as usize - 1;

/// The indexed data sets of a run.
#[derive(Debug, Clone, PartialEq)]
pub enum BlendConfig {
    /// Sets that are divided into parts for training, validation and testing, each by its sequences.
    Shared(BlendPaths, Split),
    /// Sets of their own for training, validation and testing.
    PerSplit {
        /// The sets to train on.
        training: BlendPaths,
        /// The sets to validate on.
        validation: Option<BlendPaths>,
        /// The sets that are evaluated once, behind the last step.
        test: Option<BlendPaths>,
    },
}

impl BlendConfig {
    /// Compares `tokenizer` with the one that the fingerprint of each set names, if it has a fingerprint.
    ///
    /// # Errors
    /// A set that was made with another one, with both.
    pub fn check_tokenizer(&self, tokenizer: &Tokenizer) -> Result<()> {
        self.prefixes().try_for_each(|prefix| token_fingerprint::check(prefix, tokenizer))
    }

    /// The sets, for training first.
    pub fn prefixes(&self) -> impl Iterator<Item = &Path> {
        let paths = match self {
            BlendConfig::Shared(paths, _) => [Some(paths), None, None],
            BlendConfig::PerSplit { training, validation, test } => {
                [Some(training), validation.as_ref(), test.as_ref()]
            }
        };
        paths.into_iter().flatten().flat_map(|paths| &paths.prefixes).map(PathBuf::as_path)
    }
}

/// The blends of a run.
#[derive(Clone)]
pub struct BlendedDataset {
    /// The sets to train on.
    pub training: Blend,
    /// The sets to validate on; `None` where nothing was held out.
    pub validation: Option<Blend>,
    /// The sets to evaluate once, behind the last step; `None` where nothing was held out for it.
    pub test: Option<Blend>,
}

/// Parts of indexed data sets, with their weights.
///
/// ```
/// use ferrotron_data::{BlendConfig, BlendPaths, BlendedDataset, IndexedDatasetBuilder, Samples, Split, TokenType};
/// # let folder = tempfile::tempdir().unwrap();
/// # let name = |set: &str| folder.path().join(set).display().to_string();
/// for (set, token) in [("a", 1), ("b", 2)] {
///     let mut builder = IndexedDatasetBuilder::new(&folder.path().join(set), TokenType::U16)?;
///     for _ in 0..100 {
///         builder.add_sequence(&[token; 30])?;
///         builder.end_document()?;
///     }
///     builder.finish()?;
/// }
/// let words = ["30".to_string(), name("a"), "70".to_string(), name("b")];
/// let paths = BlendPaths::parse("--data-path", &words)?;
/// let config = BlendConfig::Shared(paths, Split::proportions([969.0, 30.0, 1.0])?);
/// let dataset = BlendedDataset::open(&config, 3)?;
/// let batch = dataset.training.sampler(16, 1234)?.batch(0, 10)?;
/// let sets: Vec<u32> = batch.get::<u32>("inputs")?.chunks(16).map(|row| row[0]).collect();
/// assert_eq!(sets, [2, 1, 2, 2, 1, 2, 2, 1, 2, 2]);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Clone)]
pub struct Blend {
    /// The option that names the sets, for messages.
    option: &'static str,
    parts: Arc<[BlendPart]>,
    weights: Option<Vec<f64>>,
    vocab_size: usize,
}

/// A part of an indexed data set.
pub(crate) struct BlendPart {
    pub shard: Arc<Shard>,
    /// The set, for messages.
    pub name: String,
    /// Its sequences.
    pub sequences: Range<u64>,
    /// Their tokens.
    pub tokens: Range<u64>,
}

impl BlendedDataset {
    /// Opens the sets of `config`, whose tokens are below `vocab_size`.
    ///
    /// # Errors
    /// A set that is none or is damaged; no tokens for training; sets for validation or testing without any; a token beyond
    /// the vocabulary, in blends up to 2^27 tokens.
    pub fn open(config: &BlendConfig, vocab_size: usize) -> Result<BlendedDataset> {
        BlendedDataset::open_in(Unit::Sequence, config, vocab_size)
    }

    /// Opens sets of prompts and completions for [`PackedSampler`](crate::PackedSampler). They are divided by pairs.
    ///
    /// # Errors
    /// Errors of [`BlendedDataset::open`]; a set with a document that is no pair of sequences.
    pub fn open_pairs(config: &BlendConfig, vocab_size: usize) -> Result<BlendedDataset> {
        BlendedDataset::open_in(Unit::Pair, config, vocab_size)
    }

    /// Opens sets of sentences for [`SentencePairs`](crate::SentencePairs). They are divided by documents.
    ///
    /// # Errors
    /// Errors of [`BlendedDataset::open`].
    pub fn open_sentences(config: &BlendConfig, vocab_size: usize) -> Result<BlendedDataset> {
        BlendedDataset::open_in(Unit::Document, config, vocab_size)
    }

    fn open_in(unit: Unit, config: &BlendConfig, vocab_size: usize) -> Result<BlendedDataset> {
        let (training, validation, test) = match config {
            BlendConfig::Shared(paths, split) => {
                let [training, validation, test] =
                    open(paths, unit, |all| split.sequences(all), vocab_size)?;
                // A small share of a small set may hold nothing to predict.
                (training, Some(validation.longer_than(0)), Some(test.longer_than(1)))
            }
            BlendConfig::PerSplit { training, validation, test } => {
                let whole = |paths: &BlendPaths| {
                    let whole = |all| [0..all, all..all, all..all];
                    let [blend, ..] = open(paths, unit, whole, vocab_size)?;
                    // Megatron leaves the weight of a single one out.
                    let weights = blend.weights.clone().filter(|weights| weights.len() > 1);
                    Blend { weights, ..blend }.not_empty()
                };
                let [validation, test] =
                    [validation, test].map(|paths| paths.as_ref().map(whole).transpose());
                (whole(training)?, validation?, test?)
            }
        };
        let training = training.not_empty()?;
        let [validation, test] =
            [validation, test].map(|held_out| held_out.filter(|blend| !blend.parts.is_empty()));
        let dataset = BlendedDataset { training, validation, test };
        let Dataset { train, validation } = dataset.streams();
        let test = dataset.test.as_ref().map(Blend::tokens);
        [Some(train), validation, test]
            .iter()
            .flatten()
            .try_for_each(TokenSource::check_if_short)?;
        Ok(dataset)
    }

    /// The tokens for training and validation as streams, the sets laid end to end.
    pub fn streams(&self) -> Dataset {
        let validation = self.validation.as_ref().map(Blend::tokens);
        Dataset { train: self.training.tokens(), validation }
    }
}

/// Opens sets and divides their sequences into three blends.
fn open(
    paths: &BlendPaths,
    unit: Unit,
    ranges: impl Fn(u64) -> [Range<u64>; 3],
    vocab_size: usize,
) -> Result<[Blend; 3]> {
    let BlendPaths { option, prefixes, weights } = paths;
    if prefixes.len() > MAX_SETS {
        let message = format!(
            "{} data sets, but one blend has at most {MAX_SETS}: join some of them",
            prefixes.len()
        );
        return Err(Error::config(option, message));
    }
    let mut blends = [Vec::new(), Vec::new(), Vec::new()];
    for (index, prefix) in prefixes.iter().enumerate() {
        let dataset = open_set(option, prefix)?;
        let ranges = unit.ranges(&dataset, &ranges)?;
        let tokens = ranges.clone().map(|sequences| dataset.tokens_of(sequences));
        let mut shard = Shard::indexed(dataset)?;
        if index >= MAX_OPEN {
            shard.close();
        }
        let shard = Arc::new(shard);
        for ((blend, sequences), tokens) in blends.iter_mut().zip(ranges).zip(tokens) {
            let name = prefix.display().to_string();
            blend.push(BlendPart { shard: shard.clone(), name, sequences, tokens: tokens? });
        }
    }
    Ok(blends.map(|parts| Blend {
        option,
        parts: parts.into(),
        weights: weights.clone(),
        vocab_size,
    }))
}

fn open_set(option: &'static str, prefix: &Path) -> Result<IndexedDataset> {
    if IndexedDataset::index_path(prefix).is_none() {
        let name = prefix.display();
        let why = match prefix.exists() {
            true => format!(
                "'{name}' is no indexed data set (PREFIX.idx and PREFIX.bin): give text and other files by --data"
            ),
            false => format!("there is no data set '{name}': no file '{name}.idx'"),
        };
        return Err(Error::io(option, why));
    }
    IndexedDataset::open(prefix)
}

impl Blend {
    /// Number of sets.
    pub fn num_sets(&self) -> usize {
        self.parts.len()
    }

    /// The paths of the sets, in the order of the command line.
    pub fn set_names(&self) -> impl Iterator<Item = &str> {
        self.parts.iter().map(|part| part.name.as_str())
    }

    /// The parts, in the order of the command line.
    pub(crate) fn parts(&self) -> &[BlendPart] {
        &self.parts
    }

    /// The weights that were given, not normalized.
    pub(crate) fn weights(&self) -> Option<&[f64]> {
        self.weights.as_deref()
    }

    /// The option that names the sets.
    pub(crate) fn option(&self) -> &'static str {
        self.option
    }

    /// Every token is below this.
    pub(crate) fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The tokens of all sets, laid end to end.
    pub fn tokens(&self) -> TokenSource {
        let part = |part: &BlendPart| Part {
            shard: part.shard.clone(),
            start: part.tokens.start,
            len: part.tokens.end - part.tokens.start,
        };
        TokenSource::from_parts(self.parts.iter().map(part).collect(), self.vocab_size)
    }

    /// Training samples in the order of [`Sampler`]. Sets without weights are one stream, laid end to end; those with
    /// weights are streams of their own, from which samples are taken as in Megatron.
    ///
    /// # Errors
    /// Too few tokens for a sample, in a set with a weight or in all others together.
    pub fn sampler(&self, seq_length: usize, seed: u64) -> Result<Box<dyn Samples>> {
        Ok(match &self.weights {
            Some(weights) if self.parts.len() > 1 => {
                let sampler = |set: usize| {
                    // Sets of equal length have orders of their own.
                    let seed = seed ^ (set as u64).rotate_right(16);
                    let sampler = Sampler::new(self.tokens_of(set), seq_length, seed);
                    sampler.map_err(|error| error.at(&self.parts[set].name))
                };
                let sets = (0..self.parts.len()).map(sampler).collect::<Result<Vec<Sampler>>>()?;
                Box::new(BlendedSampler::new(sets, weights, seq_length))
            }
            _ => Box::new(Sampler::new(self.tokens(), seq_length, seed)?),
        })
    }

    /// A CRC-32 of the weights, if there are any: blends that differ in it have different orders of the same tokens.
    pub fn weights_crc32(&self) -> Option<u32> {
        let weights = order::normalized(self.weights.as_ref()?);
        let bytes: Vec<u8> = weights.iter().flat_map(|weight| weight.to_le_bytes()).collect();
        Some(crc32fast::hash(&bytes))
    }

    /// The first `samples` windows for validation. Of several sets, each sample comes from the one that lags furthest
    /// behind its share, which is its weight or else its size; each window is read once.
    ///
    /// # Errors
    /// Fewer than two tokens; no sample.
    pub fn validation(&self, seq_length: usize, samples: u64) -> Result<Box<dyn FiniteSamples>> {
        Ok(match self.parts.len() {
            1 => Box::new(Validation::new(self.tokens(), seq_length)?.first(samples)?),
            _ => {
                let set = |set: usize| {
                    let validation = Validation::new(self.tokens_of(set), seq_length);
                    validation.map_err(|error| error.at(&self.parts[set].name))
                };
                let sets = (0..self.parts.len()).map(set).collect::<Result<Vec<Validation>>>()?;
                Box::new(BlendedValidation::new(sets, self.weights(), seq_length, samples)?)
            }
        })
    }

    /// The tokens of one set.
    fn tokens_of(&self, set: usize) -> TokenSource {
        self.set(set).tokens()
    }

    /// The sets, each by itself and by a name of its own.
    ///
    /// # Errors
    /// A set that is there twice.
    pub fn named_sets(&self) -> Result<Vec<(String, Blend)>> {
        let paths: Vec<&Path> = self.parts.iter().map(|part| Path::new(&part.name)).collect();
        let names = distinct_names(self.option, &paths)?;
        Ok(names.into_iter().enumerate().map(|(set, name)| (name, self.set(set))).collect())
    }

    /// One set by itself.
    pub(crate) fn set(&self, set: usize) -> Blend {
        Blend { parts: Arc::new([self.parts[set].clone()]), weights: None, ..self.clone() }
    }

    /// The same without sets that have at most so many tokens in this part.
    fn longer_than(self, tokens: u64) -> Blend {
        let len = |set: usize| self.parts[set].tokens.end - self.parts[set].tokens.start;
        let kept = |set: &usize| len(*set) > tokens;
        let kept: Vec<usize> = (0..self.parts.len()).filter(kept).collect();
        let weights = self.weights.as_ref();
        let weights = weights.map(|weights| kept.iter().map(|&set| weights[set]).collect());
        let parts = kept.iter().map(|&set| self.parts[set].clone()).collect();
        Blend { parts, weights, ..self }
    }

    /// Errors if a set has no token.
    fn not_empty(self) -> Result<Blend> {
        match self.parts.iter().find(|part| part.tokens.is_empty()) {
            None => Ok(self),
            Some(part) => {
                let message = format!(
                    "'{}' has no token for this part: leave it out, or give a larger share by --split",
                    part.name
                );
                Err(Error::config(self.option, message))
            }
        }
    }
}

impl Clone for BlendPart {
    fn clone(&self) -> BlendPart {
        let BlendPart { shard, name, sequences, tokens } = self;
        BlendPart {
            shard: shard.clone(),
            name: name.clone(),
            sequences: sequences.clone(),
            tokens: tokens.clone(),
        }
    }
}

#[cfg(test)]
mod tests;
