//! Samples for BERT: two consecutive segments of a document, swapped in half of the samples, with some tokens masked.
//!
//! After Megatron-LM's `bert_dataset.py` (Shoeybi et al., arXiv 1909.08053, section 5.3), with the masks of Devlin et al.,
//! arXiv 1810.04805, appendix A.1, of single tokens, and in an order that needs no state, as for [token data](super):
//!
//! 1. The sentences of each document make groups of at least two. A group ends when it has as many tokens as fit or,
//!    with probability 0.1, a random smaller number, if more than one sentence would be left; or with the document.
//!    Documents of one sentence are left out.
//! 2. Sample `n` belongs to epoch `n / groups`, which takes each group once, in an order of its own.
//! 3. The group is cut in two segments at a random sentence. The longer one loses a token at a random end until both
//!    fit. With probability 1/2 they are swapped: `[CLS] A [SEP] B [SEP]`, and then padding,
//!    which attention leaves out.
//! 4. Of the tokens of A and B, 15 % are predicted, at least one: 80 % of these are replaced by `[MASK]`, 10 % by a
//!    random token, and 10 % are kept.
//!
//! All of this is a function of the seed and the number of the sample: ranks, micro-batches and resumed runs draw the
//! same. Of data sets with weights, a sample comes from the one that lags furthest behind its share, and its group is that of
//! its number there.

use super::blend::order::{BlendOrder, normalized};
use super::{Batch, Blend, Documents, FiniteSamples, PairBatch, Permutation, Samples};
use crate::tokenizer::SpecialTokens;
use ferrotron_tensor::{Error, RandomKey, Result};
use std::ops::Range;
use std::sync::Arc;

/// The part of the data of which [`SentencePairs`] are made, for messages.
const TRAINING: &str = "training";

/// Share of the tokens that are predicted.
const MASKED: f64 = 0.15;

/// Probability that a group is shorter than what fits.
const SHORT: f64 = 0.1;

/// Consecutive sentences, and the most of their tokens that are wanted.
#[derive(Debug, Clone, PartialEq)]
struct Group {
    sentences: Range<usize>,
    most: usize,
}

/// The groups of a part of the data, and the rule by which they become samples.
#[derive(Debug, Clone)]
struct Groups {
    documents: Documents,
    special: SpecialTokens,
    seq_length: usize,
    seed: u64,
    groups: Arc<[Group]>,
}

impl Groups {
    fn new(
        documents: Documents,
        special: SpecialTokens,
        seq_length: usize,
        seed: u64,
    ) -> Result<Groups> {
        SentencePairs::check_length(seq_length)?;
        let mut groups = Vec::new();
        for (index, document) in documents.documents().iter().enumerate() {
            let key = RandomKey::new(seed, index as u64, "data.bert.group");
            cut_into_groups(&documents, document, seq_length - 3, &key, &mut groups);
        }
        Ok(Groups { documents, special, seq_length, seed, groups: groups.into() })
    }

    /// Number of groups.
    fn len(&self) -> u64 {
        self.groups.len() as u64
    }

    /// Errors, with the way to more of them, if there is no group in a part of the data.
    fn not_empty(self, part: &str, remedy: &str) -> Result<Groups> {
        if self.groups.is_empty() {
            let (sentences, count) =
                (self.documents.num_sentences(), self.documents.num_documents());
            let message = format!(
                "no document for {part} has two sentences: there are {sentences} sentences in {count} documents, which blank \
                 lines separate in text: {remedy}"
            );
            return Err(Error::value("data", message));
        }
        Ok(self)
    }

    /// Writes the sample of group `index` into row `row`, by the random numbers of sample `sample` at `site`.
    ///
    /// # Errors
    /// A file that cannot be read; a token beyond the vocabulary.
    fn fill(
        &self,
        batch: &mut PairBatch,
        row: usize,
        index: u64,
        sample: u64,
        site: &str,
    ) -> Result<()> {
        let Group { sentences, most } = &self.groups[index as usize];
        let key = RandomKey::new(self.seed, sample, site);
        let cut = sentences.start + 1 + below(&key, 0, sentences.len() - 1);
        let tokens = self.documents.tokens_of(sentences.clone())?;
        let (first, second) = tokens.split_at(self.documents.num_tokens_of(sentences.start..cut));
        let mut parts = [first, second];
        for drop in 0.. {
            let longer = usize::from(parts[1].len() > parts[0].len());
            let part = parts[longer];
            if parts[0].len() + parts[1].len() <= *most {
                break;
            }
            let front = usize::from(key.uniform(2 + drop) < 0.5);
            parts[longer] = &part[front..part.len() - 1 + front];
        }
        let swapped = key.uniform(1) < 0.5;
        if swapped {
            parts.reverse();
        }
        let [a, b] = parts;
        let SpecialTokens { cls, sep, .. } = self.special;
        let whole = [&[cls], a, &[sep], b, &[sep]].concat();
        let (second, end) = (a.len() + 2, whole.len() - 1);
        let at = row * self.seq_length..row * self.seq_length + whole.len();
        batch.tokens[at.clone()].copy_from_slice(&whole);
        batch.segments[at.clone()][second..].fill(1);
        batch.order[row] = i64::from(swapped);
        batch.lengths[row] = whole.len();
        let maskable = (1..second - 1).chain(second..end).collect();
        let key = RandomKey::new(self.seed, sample, &format!("{site}.mask"));
        self.mask(&mut batch.tokens[at.clone()], &mut batch.targets[at], maskable, &key);
        Ok(())
    }

    /// Masks some of the tokens at `positions`, and writes what they were into `targets`.
    fn mask(
        &self,
        tokens: &mut [u32],
        targets: &mut [i64],
        mut positions: Vec<usize>,
        key: &RandomKey,
    ) {
        let count = (MASKED * positions.len() as f64).round().max(1.0) as usize;
        positions.sort_by_key(|&at| (key.bits(3 * at as u64), at));
        for &at in positions.iter().take(count) {
            targets[at] = i64::from(tokens[at]);
            let choice = key.uniform(3 * at as u64 + 1);
            if choice < 0.8 {
                tokens[at] = self.special.mask;
            } else if choice < 0.9 {
                tokens[at] = below(key, 3 * at as u64 + 2, self.special.vocab_size) as u32;
            }
        }
    }

    fn blank(&self, first_sample: u64, micro_batch: usize) -> PairBatch {
        PairBatch::blank(first_sample, micro_batch, self.seq_length, self.special.pad)
    }
}

/// Cuts a document into groups of sentences with `fit` tokens or a few more.
fn cut_into_groups(
    documents: &Documents,
    document: &Range<usize>,
    fit: usize,
    key: &RandomKey,
    groups: &mut Vec<Group>,
) {
    let (mut start, mut drawn) = (document.start, 0);
    while start + 1 < document.end {
        let short = fit > 2 && key.uniform(drawn) < SHORT;
        let most = if short { 2 + below(key, drawn + 1, fit - 2) } else { fit };
        drawn += 2;
        let (mut end, mut tokens) = (start, 0);
        while end < document.end && (end < start + 2 || tokens < most || end + 1 == document.end) {
            tokens += documents.num_tokens_of(end..end + 1);
            end += 1;
        }
        groups.push(Group { sentences: start..end, most });
        start = end;
    }
}

/// A random number below `count`.
fn below(key: &RandomKey, index: u64, count: usize) -> usize {
    (key.uniform(index) * count as f64) as usize
}

/// Draws training batches of masked sentence pairs.
///
/// ```
/// use ferrotron_data::{Documents, Samples, SentencePairs};
/// use ferrotron_data::tokenizer::Tokenizer;
/// let text = "It rains. Take an umbrella!\nOr stay.\n\nOne more. And another.";
/// let documents = Documents::from_text(text, &Tokenizer::Byte)?;
/// let pairs = SentencePairs::new(documents, Tokenizer::Byte.special_tokens()?, 32, 1234)?;
/// let batch = pairs.batch(0, 4)?;
/// assert_eq!(batch.get::<i64>("order")?.len(), 4);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Clone)]
pub struct SentencePairs {
    sets: Vec<Groups>,
    /// The set of each sample and its number there, if sets have weights.
    order: Option<Arc<BlendOrder>>,
}

impl SentencePairs {
    /// Samples of `seq_length` positions of `documents`.
    ///
    /// # Errors
    /// A sequence length below 5; no document of two sentences.
    pub fn new(
        documents: Documents,
        special: SpecialTokens,
        seq_length: usize,
        seed: u64,
    ) -> Result<SentencePairs> {
        let groups = Groups::new(documents, special, seq_length, seed)?;
        let groups = groups.not_empty(TRAINING, "give documents of several sentences")?;
        Ok(SentencePairs { sets: vec![groups], order: None })
    }

    /// Samples of the sets of a blend from [`BlendedDataset::open_sentences`](crate::BlendedDataset::open_sentences). Those
    /// without weights are laid end to end.
    ///
    /// # Errors
    /// A set without sentences, or that is damaged; as [`SentencePairs::new`], for each set with a weight.
    pub fn of_blend(
        blend: &Blend,
        special: SpecialTokens,
        seq_length: usize,
        seed: u64,
    ) -> Result<SentencePairs> {
        let Some(weights) = blend.weights().filter(|weights| weights.len() > 1) else {
            return SentencePairs::new(Documents::of_blend(blend)?, special, seq_length, seed);
        };
        // Sets of equal documents have orders of their own.
        let seed = |set: usize| seed ^ (set as u64).rotate_right(16);
        let sets = groups_of_sets(blend, special, seq_length, seed)?;
        let not_empty = |(groups, name): (Groups, &str)| {
            let groups = groups.not_empty(TRAINING, "leave the set out");
            groups.map_err(|error| error.at(name))
        };
        let sets: Vec<Groups> =
            sets.into_iter().zip(blend.set_names()).map(not_empty).collect::<Result<_>>()?;
        let order = BlendOrder::new(normalized(&normalized(weights)));
        Ok(SentencePairs { sets, order: Some(Arc::new(order)) })
    }

    /// Errors if samples of `seq_length` positions have no place for two segments.
    pub fn check_length(seq_length: usize) -> Result<()> {
        if seq_length < 5 {
            let message = format!("must be at least 5, [CLS] a [SEP] b [SEP], got {seq_length}");
            return Err(Error::config("--seq-length", message));
        }
        Ok(())
    }

    /// Samples of one pass over the data, which sets with weights do not have.
    pub fn samples_per_epoch(&self) -> Option<u64> {
        self.order.is_none().then(|| self.sets[0].len())
    }
}

/// The groups of each set of a blend, with a seed for each.
fn groups_of_sets(
    blend: &Blend,
    special: SpecialTokens,
    seq_length: usize,
    seed: impl Fn(usize) -> u64,
) -> Result<Vec<Groups>> {
    let names: Vec<String> = blend.set_names().map(String::from).collect();
    let groups = |(set, name): (usize, String)| {
        let documents = Documents::of_blend(&blend.set(set))?;
        Groups::new(documents, special, seq_length, seed(set)).map_err(|error| error.at(&name))
    };
    names.into_iter().enumerate().map(groups).collect()
}

impl Samples for SentencePairs {
    fn batch(&self, first_sample: u64, micro_batch: usize) -> Result<Batch> {
        let mut batch = self.sets[0].blank(first_sample, micro_batch);
        for (row, sample) in (first_sample..).take(micro_batch).enumerate() {
            let place = self.order.as_ref().map_or(Some((0, sample)), |order| order.at(sample));
            let (set, number) = place.expect("an order without sizes has no end");
            let groups = &self.sets[set];
            let key = RandomKey::new(groups.seed, number / groups.len(), "data.bert.order");
            let index = Permutation::new(key, groups.len()).at(number % groups.len());
            groups.fill(&mut batch, row, index, sample, "data.bert.train")?;
        }
        batch.try_into()
    }

    fn seq_length(&self) -> usize {
        self.sets[0].seq_length
    }

    fn order_state(&self, sample: u64) -> Option<Vec<u64>> {
        Some(self.order.as_ref()?.state(sample))
    }

    fn resume_order(&self, state: &[u64]) {
        self.order.iter().for_each(|order| order.resume(state));
    }
}

/// Masked sentence pairs for evaluation: each group once, always with the same masks.
#[derive(Clone)]
pub struct HeldOutPairs {
    sets: Vec<Groups>,
    /// The set of each sample and its number there, if there are several.
    order: Option<Arc<BlendOrder>>,
    count: u64,
}

impl HeldOutPairs {
    /// Samples of `seq_length` positions of `documents`; those of seed 0, so that runs of any seed are compared on the
    /// same.
    ///
    /// # Errors
    /// Errors as [`SentencePairs::new`].
    pub fn new(
        documents: Documents,
        special: SpecialTokens,
        seq_length: usize,
    ) -> Result<HeldOutPairs> {
        let remedy =
            "hold out more with --valid-fraction or --split, or name files by --valid-data";
        let groups = Groups::new(documents, special, seq_length, 0)?;
        let groups = groups.not_empty("validation", remedy)?;
        Ok(HeldOutPairs { count: groups.len(), sets: vec![groups], order: None })
    }

    /// Samples of the sets of a blend from [`BlendedDataset::open_sentences`](crate::BlendedDataset::open_sentences). Of
    /// several, each comes from the one that lags furthest behind its share, which is its weight or else its size. Sets of
    /// which no document has two sentences are left out with their weights, and their names are returned; no samples if those
    /// are all.
    ///
    /// # Errors
    /// A set without sentences, or that is damaged; a sequence length below 5.
    pub fn of_blend(
        blend: &Blend,
        special: SpecialTokens,
        seq_length: usize,
    ) -> Result<(Option<HeldOutPairs>, Vec<String>)> {
        let groups = groups_of_sets(blend, special, seq_length, |_| 0)?;
        let (mut sets, mut sizes, mut weights) = (Vec::new(), Vec::new(), Vec::new());
        let mut left_out = Vec::new();
        for (set, (groups, name)) in groups.into_iter().zip(blend.set_names()).enumerate() {
            let size = groups.len();
            if size == 0 {
                left_out.push(name.to_string());
                continue;
            }
            weights.push(blend.weights().map_or(size as f64, |weights| weights[set]));
            sizes.push(size);
            sets.push(groups);
        }
        let count = sizes.iter().sum();
        let order =
            (sets.len() > 1).then(|| Arc::new(BlendOrder::finite(normalized(&weights), sizes)));
        Ok(((count > 0).then_some(HeldOutPairs { sets, order, count }), left_out))
    }

    /// The first `samples` samples, or all if there are fewer.
    #[must_use]
    pub fn first(self, samples: u64) -> HeldOutPairs {
        HeldOutPairs { count: self.count.min(samples), ..self }
    }
}

impl Samples for HeldOutPairs {
    fn batch(&self, first_sample: u64, micro_batch: usize) -> Result<Batch> {
        let mut batch = self.sets[0].blank(first_sample, micro_batch);
        for (row, sample) in (first_sample..self.count).take(micro_batch).enumerate() {
            let place = self.order.as_ref().map_or(Some((0, sample)), |order| order.at(sample));
            let (set, number) = place.expect("there are as many samples as the sets have");
            self.sets[set].fill(&mut batch, row, number, sample, "data.bert.valid")?;
        }
        batch.try_into()
    }

    fn seq_length(&self) -> usize {
        self.sets[0].seq_length
    }
}

impl FiniteSamples for HeldOutPairs {
    fn len(&self) -> u64 {
        self.count
    }
}

#[cfg(test)]
mod tests;
