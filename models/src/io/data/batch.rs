//! What a model reads in one pass: rows of tokens and, for each, the token that follows.

/// The target of a position that does not count, as `ignore_index` in PyTorch. Any negative target
/// means the same.
pub const IGNORE: i64 = -100;

/// `micro_batch` rows of `seq_length` tokens, row after row.
///
/// `targets[i]` is the token that follows `inputs[i]` in the data, or [`IGNORE`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// (micro_batch, seq_length) token ids.
    pub inputs: Vec<u32>,
    /// (micro_batch, seq_length) next tokens.
    pub targets: Vec<i64>,
    /// The number, in the whole run, of the sample in the first row; later rows follow on.
    pub first_sample: u64,
    /// Rows.
    pub micro_batch: usize,
    /// Tokens of a row.
    pub seq_length: usize,
}

impl Batch {
    /// A batch in which no position counts yet: inputs 0, targets [`IGNORE`].
    pub(super) fn blank(first_sample: u64, micro_batch: usize, seq_length: usize) -> Self {
        let n = micro_batch * seq_length;
        Batch {
            inputs: vec![0; n],
            targets: vec![IGNORE; n],
            first_sample,
            micro_batch,
            seq_length,
        }
    }

    /// Fills the front of row `row` from `tokens`: all but the last are inputs, all but the first
    /// targets.
    pub(super) fn fill(&mut self, row: usize, tokens: &[u32]) {
        let row = row * self.seq_length;
        for (i, pair) in tokens.windows(2).enumerate() {
            self.inputs[row + i] = pair[0];
            self.targets[row + i] = i64::from(pair[1]);
        }
    }

    /// Positions that count in the loss.
    pub fn num_valid_tokens(&self) -> u64 {
        self.targets.iter().filter(|&&target| target >= 0).count() as u64
    }
}
