//! A validation stream, in order: every token but the first is predicted exactly once.

use super::{Batch, FiniteSamples, Samples, TokenBatch, TokenSource};
use ferrotron_tensor::{Error, Result};

/// Windows of `seq_length` tokens that do not overlap, called samples. The last window may be shorter: what is
/// missing has ignored targets, so that all batches have one shape and a mean over [`Validation::predicted`] targets
/// is exact.
///
/// ```
/// use ferrotron_data::{TokenSource, Validation};
/// let source = TokenSource::from_tokens((0..100).collect(), 100)?;
/// let validation = Validation::new(source, 8)?;
/// assert_eq!((validation.samples(), validation.predicted()), (13, 99));
/// assert_eq!(validation.tokens(12, 4)?.num_valid_tokens(), 3); // the rest of the last window, and rows beyond it
/// assert_eq!(validation.first(2)?.predicted(), 16);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Validation {
    source: TokenSource,
    seq_length: usize,
}

impl Validation {
    /// Windows of `source`.
    ///
    /// # Errors
    /// A length of zero; fewer than two tokens, since the first is not predicted.
    pub fn new(source: TokenSource, seq_length: usize) -> Result<Self> {
        if seq_length == 0 {
            return Err(Error::config("data", "--seq-length 0 must be at least 1"));
        }
        if source.len() < 2 {
            return Err(Error::value(
                "data",
                format!(
                    "the validation data has {} tokens, but needs at least 2: hold out more with --valid-fraction or --split",
                    source.len()
                ),
            ));
        }
        Ok(Validation { source, seq_length })
    }

    /// The first `samples` windows, or all if there are fewer.
    ///
    /// # Errors
    /// No window.
    pub fn first(&self, samples: u64) -> Result<Validation> {
        let tokens = samples.saturating_mul(self.seq_length as u64).min(self.predicted());
        Validation::new(self.source.slice(0..tokens + 1)?, self.seq_length)
    }

    /// Tokens that all samples together predict: all but the first.
    pub fn predicted(&self) -> u64 {
        self.source.len() - 1
    }

    /// Number of samples.
    pub fn samples(&self) -> u64 {
        self.predicted().div_ceil(self.seq_length as u64)
    }

    /// The samples `first_sample` to `first_sample + rows - 1`. Those at or beyond [`Validation::samples`] have only
    /// ignored targets, so that ranks which take batches in turn can all run the same number.
    ///
    /// # Errors
    /// A token beyond the vocabulary.
    pub fn tokens(&self, first_sample: u64, rows: usize) -> Result<TokenBatch> {
        let mut batch = TokenBatch::blank(first_sample, rows, self.seq_length);
        let mut tokens = vec![0; self.seq_length + 1];
        for row in 0..rows {
            let start = (first_sample + row as u64) * self.seq_length as u64;
            let length =
                self.predicted().saturating_sub(start).min(self.seq_length as u64) as usize;
            if length > 0 {
                let window = &mut tokens[..=length];
                self.source.read(start, window)?;
                batch.fill(row, window);
            }
        }
        Ok(batch)
    }
}

impl Samples for Validation {
    fn batch(&self, first_sample: u64, micro_batch: usize) -> Result<Batch> {
        self.tokens(first_sample, micro_batch)?.try_into()
    }

    fn seq_length(&self) -> usize {
        self.seq_length
    }
}

impl FiniteSamples for Validation {
    fn len(&self) -> u64 {
        self.samples()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::IGNORE;

    fn validation(tokens: u32, seq_length: usize) -> Result<Validation> {
        let source = TokenSource::from_tokens((0..tokens).collect(), tokens as usize)?;
        Validation::new(source, seq_length)
    }

    #[test]
    fn every_token_but_the_first_is_predicted_once_from_the_one_before() {
        for tokens in 2..60 {
            for (seq_length, rows) in [(1, 1), (8, 1), (8, 3), (100, 2)] {
                let validation = validation(tokens, seq_length).unwrap();
                let mut predicted = Vec::new();
                for first in (0..validation.samples()).step_by(rows) {
                    let batch = validation.tokens(first, rows).unwrap();
                    assert_eq!(batch.inputs.len(), seq_length * rows);
                    for (&input, &target) in batch.inputs.iter().zip(&batch.targets) {
                        if target != IGNORE {
                            assert_eq!(target, i64::from(input) + 1);
                            predicted.push(target as u32);
                        }
                    }
                }
                assert_eq!(predicted, (1..tokens).collect::<Vec<u32>>());
                assert_eq!(validation.predicted(), u64::from(tokens) - 1);
                assert_eq!(
                    validation.tokens(validation.samples(), rows).unwrap().num_valid_tokens(),
                    0
                );
            }
        }
    }

    #[test]
    fn the_last_window_is_padded_with_ignored_targets() {
        let batch = validation(12, 8).unwrap().tokens(0, 2).unwrap();
        assert_eq!(batch.inputs, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 0, 0, 0, 0]);
        assert_eq!(batch.targets[8..], [9, 10, 11, IGNORE, IGNORE, IGNORE, IGNORE, IGNORE]);
    }

    #[test]
    fn the_first_samples_are_the_same_ones_and_no_more() {
        let all = validation(30, 8).unwrap();
        let two = all.first(2).unwrap();
        assert_eq!((two.samples(), two.predicted()), (2, 16));
        assert_eq!(two.tokens(0, 2).unwrap(), all.tokens(0, 2).unwrap());
        assert_eq!(two.tokens(2, 1).unwrap().num_valid_tokens(), 0);
        for enough in [4, 5, u64::MAX] {
            assert_eq!(all.first(enough).unwrap().predicted(), 29);
        }
        assert!(all.first(0).is_err());
    }

    #[test]
    fn too_little_data_and_zero_sizes_are_refused() {
        let error = validation(1, 8).unwrap_err().to_string();
        assert!(error.contains("has 1 tokens, but needs at least 2"), "{error}");
        assert!(validation(9, 0).is_err());
    }
}
