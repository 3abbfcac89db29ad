//! The whole validation stream, in order: every token but the first is predicted exactly once.

use super::{Batch, TokenSource};
use ferrotron_tensor::{Error, Result};

/// Windows of `seq_length` that do not overlap, `micro_batch` to a batch. The last window may be
/// shorter and the last batch may lack rows: what is missing has ignored targets, so that all batches
/// have one shape and a mean over [`Validation::predicted`] targets is exact.
///
/// ```
/// use ferrotron_models::data::{TokenSource, Validation};
/// let source = TokenSource::from_tokens((0..100).collect(), 100)?;
/// let validation = Validation::new(source, 8, 4)?;
/// assert_eq!(validation.predicted(), 99);
/// let counted: u64 = (0..validation.batches()).map(|i| validation.batch(i).unwrap().counted()).sum();
/// assert_eq!(counted, 99);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Validation {
    source: TokenSource,
    seq_length: usize,
    micro_batch: usize,
}

impl Validation {
    /// Windows of `source`.
    ///
    /// # Errors
    /// A size of zero; fewer than two tokens, of which none could be predicted.
    pub fn new(source: TokenSource, seq_length: usize, micro_batch: usize) -> Result<Self> {
        if seq_length == 0 || micro_batch == 0 {
            return Err(Error::config(
                "data",
                format!(
                    "--seq-length {seq_length} and --micro-batch-size {micro_batch} must be at least 1"
                ),
            ));
        }
        if source.len() < 2 {
            return Err(Error::value(
                "data",
                format!(
                    "the validation data has {} tokens, but needs at least 2: hold out more with --split",
                    source.len()
                ),
            ));
        }
        Ok(Validation { source, seq_length, micro_batch })
    }

    /// Tokens that all batches together predict: all but the first.
    pub fn predicted(&self) -> u64 {
        self.source.len() - 1
    }

    /// Number of batches.
    pub fn batches(&self) -> u64 {
        self.predicted().div_ceil(self.seq_length as u64 * self.micro_batch as u64)
    }

    /// Batch number `index`. One at or beyond [`Validation::batches`] has only ignored targets, so
    /// that ranks which take batches in turn can all run the same number.
    ///
    /// # Errors
    /// A token beyond the vocabulary.
    pub fn batch(&self, index: u64) -> Result<Batch> {
        let first = index * self.micro_batch as u64;
        let mut batch = Batch::blank(first, self.micro_batch, self.seq_length);
        let mut tokens = vec![0; self.seq_length + 1];
        for row in 0..self.micro_batch {
            let start = (first + row as u64) * self.seq_length as u64;
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

    /// All batches in order.
    pub fn iter(&self) -> impl Iterator<Item = Result<Batch>> + '_ {
        (0..self.batches()).map(|index| self.batch(index))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::IGNORE;

    fn validation(tokens: u32, seq_length: usize, micro_batch: usize) -> Result<Validation> {
        let source = TokenSource::from_tokens((0..tokens).collect(), tokens as usize)?;
        Validation::new(source, seq_length, micro_batch)
    }

    #[test]
    fn every_token_but_the_first_is_predicted_once_from_the_one_before() {
        for tokens in 2..60 {
            for (seq_length, micro_batch) in [(1, 1), (8, 1), (8, 3), (100, 2)] {
                let validation = validation(tokens, seq_length, micro_batch).unwrap();
                let mut predicted = Vec::new();
                for batch in validation.iter() {
                    let batch = batch.unwrap();
                    assert_eq!(batch.inputs.len(), seq_length * micro_batch);
                    for (&input, &target) in batch.inputs.iter().zip(&batch.targets) {
                        if target != IGNORE {
                            assert_eq!(target, i64::from(input) + 1);
                            predicted.push(target as u32);
                        }
                    }
                }
                assert_eq!(predicted, (1..tokens).collect::<Vec<u32>>());
                assert_eq!(validation.predicted(), u64::from(tokens) - 1);
                assert_eq!(validation.batch(validation.batches()).unwrap().counted(), 0);
            }
        }
    }

    #[test]
    fn the_last_window_is_padded_with_ignored_targets() {
        let batch = validation(12, 8, 2).unwrap().batch(0).unwrap();
        assert_eq!(batch.inputs, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 0, 0, 0, 0]);
        assert_eq!(batch.targets[8..], [9, 10, 11, IGNORE, IGNORE, IGNORE, IGNORE, IGNORE]);
    }

    #[test]
    fn too_little_data_and_zero_sizes_are_refused() {
        assert!(
            validation(1, 8, 1)
                .unwrap_err()
                .to_string()
                .contains("has 1 tokens, but needs at least 2")
        );
        assert!(validation(9, 0, 1).is_err());
        assert!(validation(9, 8, 0).is_err());
    }
}
