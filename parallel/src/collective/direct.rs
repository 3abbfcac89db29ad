//! Which calls ranks carry out directly with one another instead of round a ring, and the bytes that each then sends.

use super::partition_range;

/// Bytes of the largest buffer whose parts go straight to their owners. A ring has as many waits as steps, and ranks wait
/// longer than so few bytes take; of more, a ring crosses each link between machines once.
const DIRECT_BYTES: usize = 256 << 10;

/// Number of ranks up to which they do. Each sends to all others, so that more of them would be slowed by the number of
/// messages.
const MOST_RANKS: usize = 16;

/// Returns whether `ranks` ranks exchange the parts of a buffer of so many bytes directly. A ring of two does the same.
pub(crate) fn is_direct(ranks: usize, bytes: usize) -> bool {
    (3..=MOST_RANKS).contains(&ranks) && bytes <= DIRECT_BYTES
}

/// Rows that rank `rank` sends in an all-gather of `rows` rows of `row_bytes` bytes: its own to each other rank, or round
/// the ring all but the next rank's.
pub(crate) fn gathered_rows(ranks: usize, rank: usize, rows: usize, row_bytes: usize) -> usize {
    let part = |rank: usize| partition_range(rows, ranks, rank % ranks).len();
    match (ranks, is_direct(ranks, rows * row_bytes)) {
        (1, _) => 0,
        (_, true) => (ranks - 1) * part(rank),
        (_, false) => rows - part(rank + 1),
    }
}
