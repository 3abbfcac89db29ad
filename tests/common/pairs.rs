//! Random samples for BERT: tokens of which some are to be predicted, two segments, and padding.

use ferrotron::models::data::{Batch, PairBatch};
use ferrotron::tensor::{RandomKey, Result};

/// The samples of these numbers, of which the first has number `first_sample` in the run, padded to `seq_length`
/// positions. One in three has no label of its order.
pub fn pairs(first_sample: u64, numbers: &[u64], seq_length: usize, vocab: usize) -> Result<Batch> {
    let key = RandomKey::new(3, 0, "pairs");
    let mut batch = PairBatch::blank(first_sample, numbers.len(), seq_length, 0);
    for (row, &sample) in numbers.iter().enumerate() {
        let draw = |position: usize, what: u64| {
            key.uniform(4 * (sample * seq_length as u64 + position as u64) + what)
        };
        let token = |position, what| (draw(position, what) * vocab as f64) as u32;
        let shortest = seq_length / 3;
        batch.lengths[row] = seq_length - sample as usize % (seq_length - shortest + 1);
        batch.order[row] = if sample % 3 == 2 { -100 } else { (sample / 3 % 2) as i64 };
        let second = 1 + sample as usize % shortest;
        for position in 0..batch.lengths[row] {
            let at = row * seq_length + position;
            batch.tokens[at] = token(position, 0);
            batch.segments[at] = u32::from(position >= second);
            if draw(position, 2) < 0.5 * (1.0 + draw(0, 3)) {
                batch.targets[at] = i64::from(token(position, 1));
            }
        }
    }
    batch.try_into()
}
