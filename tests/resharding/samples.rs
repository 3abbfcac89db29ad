//! Samples for training and validation, by the configuration of a model.

use ferrotron::models::bert::{Bert, BertConfig};
use ferrotron::models::data::{Batch, FiniteSamples, Samples, TokenBatch, TokenSource, Validation};
use ferrotron::models::gpt::{Gpt, GptConfig};
use ferrotron::models::support::ModelSizes;
use ferrotron::models::trainer::Model;
use ferrotron::tensor::{RandomKey, Result};
use std::collections::BTreeSet;
use std::sync::Mutex;

use super::pairs::pairs;
use super::train::SEQ_LENGTH;

/// The configuration of a model that changes its layout.
pub trait Configuration: Clone + Sync + Sized {
    type Model: Model<Config = Self>;

    /// The sizes on which layouts depend.
    fn sizes(&self) -> ModelSizes;

    /// The samples of these numbers, of which the first has number `first_sample` in the run.
    fn batch(&self, first_sample: u64, numbers: &[u64]) -> Result<Batch>;

    /// A few other samples.
    fn validation(&self) -> Result<Box<dyn FiniteSamples>>;
}

impl Configuration for GptConfig {
    type Model = Gpt;

    fn sizes(&self) -> ModelSizes {
        self.into()
    }

    fn batch(&self, first_sample: u64, numbers: &[u64]) -> Result<Batch> {
        let key = RandomKey::new(3, 0, "tokens");
        let token = |i: u64| (key.uniform(i) * self.vocab_size as f64) as u32;
        let length = SEQ_LENGTH as u64;
        let positions = numbers.iter().flat_map(|number| number * length..(number + 1) * length);
        TokenBatch {
            inputs: positions.clone().map(|i| token(2 * i)).collect(),
            targets: positions.map(|i| i64::from(token(2 * i + 1))).collect(),
            first_sample,
            micro_batch: numbers.len(),
            seq_length: SEQ_LENGTH,
        }
        .try_into()
    }

    /// Three sequences, the last one cut short.
    fn validation(&self) -> Result<Box<dyn FiniteSamples>> {
        let vocab = self.vocab_size;
        let tokens = (0..3 * SEQ_LENGTH - 2).map(|i| (i * i % vocab) as u32).collect();
        let source = TokenSource::from_tokens(tokens, vocab)?;
        Ok(Box::new(Validation::new(source, SEQ_LENGTH)?))
    }
}

impl Configuration for BertConfig {
    type Model = Bert;

    fn sizes(&self) -> ModelSizes {
        self.into()
    }

    fn batch(&self, first_sample: u64, numbers: &[u64]) -> Result<Batch> {
        pairs(first_sample, numbers, SEQ_LENGTH, self.vocab_size)
    }

    fn validation(&self) -> Result<Box<dyn FiniteSamples>> {
        Ok(Box::new(HeldOut(self.clone())))
    }
}

/// Samples with numbers that no step of training has.
struct HeldOut(BertConfig);

impl Samples for HeldOut {
    fn batch(&self, first_sample: u64, micro_batch: usize) -> Result<Batch> {
        let numbers: Vec<u64> = (first_sample + 1000..).take(micro_batch).collect();
        self.0.batch(first_sample, &numbers)
    }

    fn seq_length(&self) -> usize {
        SEQ_LENGTH
    }
}

impl FiniteSamples for HeldOut {
    fn len(&self) -> u64 {
        8
    }

    fn has_blank_samples(&self) -> bool {
        false
    }
}

/// Samples by their numbers; remembers which it was asked for.
pub struct Noise<'a, C> {
    pub model: &'a C,
    /// Number of samples after which the same ones come again.
    pub distinct_samples: u64,
    pub asked: Mutex<BTreeSet<u64>>,
}

impl<C: Configuration> Samples for Noise<'_, C> {
    fn batch(&self, first_sample: u64, micro_batch: usize) -> Result<Batch> {
        let numbers = first_sample..first_sample + micro_batch as u64;
        self.asked.lock().unwrap().extend(numbers.clone());
        let numbers: Vec<u64> = numbers.map(|number| number % self.distinct_samples).collect();
        self.model.batch(first_sample, &numbers)
    }

    fn seq_length(&self) -> usize {
        SEQ_LENGTH
    }
}
