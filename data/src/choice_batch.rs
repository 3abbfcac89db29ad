//! Questions with several choices, as a batch of BERT.

use super::{Batch, IGNORE};
use ferrotron_tensor::{Error, Result};

/// Rows of tokens in two segments, one for each choice of a question; those of a question follow one another.
///
/// The arrays of its [`Batch`] have the names given here, and those of the tokens and segments of a
/// [`PairBatch`](super::PairBatch).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChoiceBatch {
    /// (micro_batch x choices, seq_length) token ids.
    pub tokens: Vec<u32>,
    /// (micro_batch x choices, seq_length) segment ids: 0 and 1.
    pub segments: Vec<u32>,
    /// (micro_batch) the number of the right choice, from 0, or [`IGNORE`].
    pub answers: Vec<i64>,
    /// (micro_batch x choices) positions in front of the padding, which attention leaves out.
    pub lengths: Vec<usize>,
    /// The number, in the whole run, of the first question; later ones follow on.
    pub first_sample: u64,
    /// Questions.
    pub micro_batch: usize,
    /// Choices of a question.
    pub choices: usize,
    /// Positions of a row.
    pub seq_length: usize,
}

impl ChoiceBatch {
    /// Name of the right choices in a [`Batch`].
    pub const ANSWERS: &str = "answers";

    /// A batch in which nothing counts yet: tokens `pad`, answers [`IGNORE`]. Rows have all positions.
    pub fn blank(
        first_sample: u64,
        [micro_batch, choices, seq_length]: [usize; 3],
        pad: u32,
    ) -> ChoiceBatch {
        let rows = micro_batch * choices;
        ChoiceBatch {
            tokens: vec![pad; rows * seq_length],
            segments: vec![0; rows * seq_length],
            answers: vec![IGNORE; micro_batch],
            lengths: vec![seq_length; rows],
            first_sample,
            micro_batch,
            choices,
            seq_length,
        }
    }
}

impl TryFrom<ChoiceBatch> for Batch {
    type Error = Error;

    /// Errors if an array has another number of elements than it says there, or a row is longer than `seq_length`.
    fn try_from(batch: ChoiceBatch) -> Result<Batch> {
        let dims = [batch.micro_batch * batch.choices, batch.seq_length];
        Batch::new(batch.first_sample, batch.micro_batch, batch.seq_length)
            .with_rows_per_sample(batch.choices)?
            .with_positions(super::PairBatch::TOKENS, batch.tokens, &dims)?
            .with_positions(super::PairBatch::SEGMENTS, batch.segments, &dims)?
            .with(ChoiceBatch::ANSWERS, batch.answers, &[batch.micro_batch])?
            .with_key_lengths(batch.lengths)
    }
}
