//! The order of the training samples: a function of (seed, sample number), and of nothing else.
//!
//! Two customs exist. nanoGPT draws random offsets: boundaries vary, but after as many samples as make
//! one pass, 1/e of the data has not been seen. Megatron-LM shuffles sequences that do not overlap:
//! everything is seen equally often, but with the same boundaries in every epoch, and from index
//! files. The rule here takes the better half of both and stores nothing:
//!
//! 1. The data (N tokens, sequences of T) give `S = max(1, (N - T) / T)` sequences an epoch, rounded
//!    down. Sample `n` belongs to epoch `e = n / S`.
//! 2. Each epoch draws a phase `p` in `0..T` from (seed, e): its sequences begin at
//!    `p, p + T, p + 2T, ...`, so boundaries differ from epoch to epoch. (With fewer than 2T tokens
//!    there is one sequence an epoch, at any place where it fits.)
//! 3. Within the epoch, samples take its sequences in the order of a
//!    [`Permutation`] keyed by (seed, e): each exactly once.
//!
//! A sample reads T + 1 tokens: T inputs and the T that follow them. Neighbouring sequences share
//! one token, so every token of an epoch is predicted once, except fewer than 2T at the two ends.

use super::{Batch, Permutation, TokenBatch, TokenSource};
use ferrotron_tensor::{Error, RandomKey, Result};
use std::sync::Arc;

/// The source of training samples, by number.
pub trait Samples: Send + Sync {
    /// The samples `first_sample` to `first_sample + micro_batch - 1` of the run. The trainer refuses others, or fewer.
    fn batch(&self, first_sample: u64, micro_batch: usize) -> Result<Batch>;

    /// Positions of one sample, those of its batches.
    fn seq_length(&self) -> usize;

    /// Announces the batches that come next, each as its first sample and its number of samples, and that those announced
    /// before do not. Samples that are read by the caller ignore it.
    fn prefetch(&self, _batches: &[(u64, usize)]) {}

    /// The state by which a run that resumes at `sample` finds its place, if that takes long otherwise: for
    /// [`Samples::resume_order`].
    fn order_state(&self, _sample: u64) -> Option<Vec<u64>> {
        None
    }

    /// Takes the state that [`Samples::order_state`] gave. Samples do not depend on it: a state of another order is ignored.
    fn resume_order(&self, _state: &[u64]) {}
}

/// Samples behind a pointer.
macro_rules! samples_behind {
    ($($pointer:ty),*) => {$(
        impl<S: Samples + ?Sized> Samples for $pointer {
            fn batch(&self, first_sample: u64, micro_batch: usize) -> Result<Batch> {
                (**self).batch(first_sample, micro_batch)
            }

            fn seq_length(&self) -> usize {
                (**self).seq_length()
            }

            fn prefetch(&self, batches: &[(u64, usize)]) {
                (**self).prefetch(batches);
            }

            fn order_state(&self, sample: u64) -> Option<Vec<u64>> {
                (**self).order_state(sample)
            }

            fn resume_order(&self, state: &[u64]) {
                (**self).resume_order(state);
            }
        }
    )*};
}
samples_behind!(&S, Box<S>, Arc<S>);

/// A finite number of samples behind a pointer.
macro_rules! finite_samples_behind {
    ($($pointer:ty),*) => {$(
        impl<S: FiniteSamples + ?Sized> FiniteSamples for $pointer {
            fn len(&self) -> u64 {
                (**self).len()
            }

            fn has_blank_samples(&self) -> bool {
                (**self).has_blank_samples()
            }

            fn of_evaluation(&self, number: u64) -> Option<Box<dyn FiniteSamples + '_>> {
                (**self).of_evaluation(number)
            }
        }
    )*};
}
finite_samples_behind!(&S, Box<S>);

/// A finite number of samples, for evaluation.
pub trait FiniteSamples: Samples {
    /// Number of samples. A batch may reach beyond the last one: nothing counts in the samples there.
    fn len(&self) -> u64;

    /// Whether nothing counts in the samples beyond the last one. Otherwise an evaluation refuses micro-batches that
    /// reach there.
    fn has_blank_samples(&self) -> bool {
        true
    }

    /// The samples of a run's evaluation `number`, counted from 0, if evaluations have samples of their own.
    fn of_evaluation(&self, _number: u64) -> Option<Box<dyn FiniteSamples + '_>> {
        None
    }

    /// Whether there are no samples.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Draws training batches.
///
/// ```
/// use ferrotron_data::{Sampler, TokenSource};
/// let source = TokenSource::from_tokens((0..1000).collect(), 1000)?;
/// let sampler = Sampler::new(source, 8, 1234)?;
/// let whole = sampler.tokens(100, 4)?; // samples 100, 101, 102, 103 ...
/// let half = sampler.tokens(102, 2)?; // ... a smaller micro-batch takes the last two of them
/// assert_eq!(whole.inputs[2 * 8..], half.inputs[..]);
/// assert_eq!(whole.targets[0], i64::from(whole.inputs[1]));
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Sampler {
    source: TokenSource,
    seq_length: usize,
    seed: u64,
    sequences: u64,
}

impl Sampler {
    /// Samples of `seq_length` inputs from `source`.
    ///
    /// # Errors
    /// A sequence length of zero; data shorter than one sequence.
    pub fn new(source: TokenSource, seq_length: usize, seed: u64) -> Result<Self> {
        if seq_length == 0 {
            return Err(Error::config("data", "--seq-length must be at least 1"));
        }
        let (tokens, length) = (source.len(), seq_length as u64);
        if tokens <= length {
            return Err(Error::value(
                "data",
                format!(
                    "the training data has {tokens} tokens, but one sequence needs {} (--seq-length {length} and the \
                     token after it): use more data or a shorter --seq-length",
                    length + 1
                ),
            ));
        }
        let sequences = ((tokens - length) / length).max(1);
        Ok(Sampler { source, seq_length, seed, sequences })
    }

    /// The position of the first input of sample number `sample`.
    pub fn start(&self, sample: u64) -> u64 {
        let length = self.seq_length as u64;
        let (epoch, index) = (sample / self.sequences, sample % self.sequences);
        // Sequences end at phase + S * T at the latest, and their last target one token later.
        let slack = (self.source.len() - 1 - self.sequences * length).min(length - 1);
        let bits = RandomKey::new(self.seed, epoch, "data.phase").block(0);
        let phase = (u64::from(bits[0]) << 32 | u64::from(bits[1])) % (slack + 1);
        let order =
            Permutation::new(RandomKey::new(self.seed, epoch, "data.order"), self.sequences);
        phase + order.at(index) * length
    }

    /// The samples `first_sample` to `first_sample + micro_batch - 1` of the run, as rows of tokens.
    ///
    /// Errors if a token is beyond the vocabulary.
    pub fn tokens(&self, first_sample: u64, micro_batch: usize) -> Result<TokenBatch> {
        let mut batch = TokenBatch::blank(first_sample, micro_batch, self.seq_length);
        let mut tokens = vec![0; self.seq_length + 1];
        for row in 0..micro_batch {
            self.source.read(self.start(first_sample + row as u64), &mut tokens)?;
            batch.fill(row, &tokens);
        }
        Ok(batch)
    }
}

impl Samples for Sampler {
    /// Errors if a token is beyond the vocabulary.
    fn batch(&self, first_sample: u64, micro_batch: usize) -> Result<Batch> {
        self.tokens(first_sample, micro_batch)?.try_into()
    }

    fn seq_length(&self) -> usize {
        self.seq_length
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sampler(tokens: u32, seq_length: usize, seed: u64) -> Sampler {
        let source = TokenSource::from_tokens((0..tokens).collect(), tokens as usize).unwrap();
        Sampler::new(source, seq_length, seed).unwrap()
    }

    /// Sorted starts of epoch `epoch`.
    fn starts(sampler: &Sampler, epoch: u64) -> Vec<u64> {
        let n = sampler.sequences;
        let mut starts: Vec<u64> = (epoch * n..(epoch + 1) * n).map(|i| sampler.start(i)).collect();
        starts.sort_unstable();
        starts
    }

    proptest! {
        #[test]
        fn an_epoch_visits_each_of_its_sequences_once(
            seq_length in 1usize..40, more in 0u32..500, seed: u64, epoch in 0u64..1_000_000
        ) {
            let tokens = seq_length as u32 + 1 + more;
            let sampler = sampler(tokens, seq_length, seed);
            let starts = starts(&sampler, epoch);
            let length = seq_length as u64;
            prop_assert!(starts[0] < length || starts.len() == 1);
            prop_assert!(starts.windows(2).all(|pair| pair[1] - pair[0] == length));
            prop_assert!(starts[starts.len() - 1] + length < u64::from(tokens));
            // Fewer than 2 T predictions are lost.
            prop_assert!(u64::from(tokens) - 1 - starts.len() as u64 * length < 2 * length);
        }
    }

    #[test]
    fn phases_and_orders_differ_by_epoch_and_seed() {
        let sampler_1 = sampler(10_000, 16, 1);
        let sampler_2 = sampler(10_000, 16, 2);
        let mut phases: Vec<u64> = (0..200).map(|epoch| starts(&sampler_1, epoch)[0]).collect();
        let n = sampler_1.sequences;
        assert_ne!(sampler_1.start(0) / 16, sampler_1.start(n) / 16);
        assert_ne!(sampler_1.tokens(0, 8).unwrap(), sampler_2.tokens(0, 8).unwrap());
        phases.sort_unstable();
        phases.dedup();
        assert_eq!(phases, (0..16).collect::<Vec<u64>>(), "200 epochs meet all 16 phases");
    }

    #[test]
    fn batches_are_the_same_samples_however_they_are_cut() {
        let sampler = sampler(1000, 8, 1234);
        let whole = sampler.tokens(0, 300).unwrap(); // more than two epochs
        for micro_batch in [1, 2, 3, 4, 7] {
            // Any count of consumed samples is a place to resume.
            for first in [0, 1, 100, 122, 123, 290] {
                let part = sampler.tokens(first, micro_batch).unwrap();
                let range = first as usize * 8..(first as usize + micro_batch) * 8;
                assert_eq!(part.inputs, whole.inputs[range.clone()]);
                assert_eq!(part.targets, whole.targets[range]);
                assert_eq!(part.num_valid_tokens(), micro_batch as u64 * 8);
            }
        }
    }

    #[test]
    fn targets_are_the_next_tokens() {
        let batch = sampler(100, 5, 3).tokens(11, 4).unwrap();
        assert_eq!((batch.micro_batch, batch.seq_length, batch.first_sample), (4, 5, 11));
        for (input, target) in batch.inputs.iter().zip(&batch.targets) {
            assert_eq!(*target, i64::from(*input) + 1); // the tokens count up
        }
    }

    #[test]
    fn data_of_exactly_one_sequence_is_enough_and_less_is_not() {
        assert_eq!(sampler(9, 8, 1).tokens(5, 1).unwrap().inputs, (0..8).collect::<Vec<u32>>());
        let source = TokenSource::from_tokens((0..8).collect(), 8).unwrap();
        assert_eq!(
            Sampler::new(source.clone(), 8, 1).unwrap_err().to_string(),
            "data: the training data has 8 tokens, but one sequence needs 9 (--seq-length 8 and the token after it): \
             use more data or a shorter --seq-length"
        );
        assert!(Sampler::new(source, 0, 1).is_err());
    }

    #[test]
    fn samplers_can_be_shared_between_threads() {
        fn shared<T: Send + Sync>() {}
        shared::<(Sampler, crate::tokenizer::Tokenizer)>();
    }

    #[test]
    fn the_order_is_fixed_for_ever() {
        // A change of these numbers would break the resumption of every run saved before it.
        let sampler = sampler(1000, 8, 1234);
        let starts: Vec<u64> = (0..6).chain(248..250).map(|sample| sampler.start(sample)).collect();
        assert_eq!(starts, [849, 665, 185, 649, 897, 497, 680, 824]);
    }
}
