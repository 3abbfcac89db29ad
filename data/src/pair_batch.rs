//! Masked pairs of segments, as a batch of BERT.

use super::{Batch, IGNORE};
use ferrotron_tensor::{Error, Result};

/// Rows of tokens in two segments, some of them masked.
///
/// The arrays of its [`Batch`] have the names given here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PairBatch {
    /// (micro_batch, seq_length) token ids.
    pub tokens: Vec<u32>,
    /// (micro_batch, seq_length) segment ids: 0 and 1.
    pub segments: Vec<u32>,
    /// (micro_batch, seq_length) tokens to predict, or [`IGNORE`] where a token is not.
    pub targets: Vec<i64>,
    /// (micro_batch) labels: 0 for segments as in the text, 1 for swapped ones, or [`IGNORE`].
    pub order: Vec<i64>,
    /// (micro_batch) positions in front of the padding, which attention leaves out.
    pub lengths: Vec<usize>,
    /// The number, in the whole run, of the sample in the first row; later rows follow on.
    pub first_sample: u64,
    /// Rows.
    pub micro_batch: usize,
    /// Positions of a row.
    pub seq_length: usize,
}

impl PairBatch {
    /// Name of the token ids in a [`Batch`].
    pub const TOKENS: &str = "tokens";
    /// Name of the segment ids in a [`Batch`].
    pub const SEGMENTS: &str = "segments";
    /// Name of the tokens to predict in a [`Batch`].
    pub const TARGETS: &str = "targets";
    /// Name of the labels in a [`Batch`].
    pub const ORDER: &str = "order";

    /// A batch in which nothing counts yet: tokens `pad`, targets and labels [`IGNORE`]. Rows have all positions.
    pub fn blank(first_sample: u64, micro_batch: usize, seq_length: usize, pad: u32) -> PairBatch {
        let n = micro_batch * seq_length;
        PairBatch {
            tokens: vec![pad; n],
            segments: vec![0; n],
            targets: vec![IGNORE; n],
            order: vec![IGNORE; micro_batch],
            lengths: vec![seq_length; micro_batch],
            first_sample,
            micro_batch,
            seq_length,
        }
    }
}

impl TryFrom<PairBatch> for Batch {
    type Error = Error;

    /// Errors if an array has another number of elements than it says there, or a row is longer than `seq_length`.
    fn try_from(pairs: PairBatch) -> Result<Batch> {
        let dims = [pairs.micro_batch, pairs.seq_length];
        Batch::new(pairs.first_sample, dims[0], dims[1])
            .with_positions(PairBatch::TOKENS, pairs.tokens, &dims)?
            .with_positions(PairBatch::SEGMENTS, pairs.segments, &dims)?
            .with_positions(PairBatch::TARGETS, pairs.targets, &dims)?
            .with(PairBatch::ORDER, pairs.order, &dims[..1])?
            .with_key_lengths(pairs.lengths)
    }
}
