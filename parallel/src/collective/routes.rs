//! The routes that the bytes of a call take, and the bytes that each rank then sends.

use super::{partition_range, tree};

/// Bytes of the longest part that goes straight to its owner. A ring has as many waits as steps, and ranks wait longer than
/// so few bytes take; of more, a ring crosses each link between machines once.
const DIRECT_BYTES: usize = 64 << 10;

/// Number of ranks up to which they do. Each sends to all others, so that more of them would be slowed by the number of
/// messages.
const MOST_DIRECT: usize = 16;

/// Bytes of the largest buffer that goes up and down a tree among more ranks, however long its parts are.
const TREE_BYTES: usize = 256 << 10;

/// Bytes of the smallest part that more ranks send round a ring: every part is a message of every rank.
const SMALLEST_PART: usize = 4 << 10;

/// Number of ranks up to which each sends its 16-bit addends to all others. More of them would need too many
/// connections, and add in f32 along the routes of that type.
const MOST_PAIRWISE: usize = 64;

/// The routes of an all-reduce, a reduce-scatter or an all-gather.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Route {
    /// Every part straight to its owner, and from it to all others.
    Direct,
    /// The whole buffer up and down the tree of the group.
    Tree,
    /// Every part round the ring.
    Ring,
}

/// The route that `rows` rows of `row_bytes` bytes take among `ranks` ranks. A ring of two is direct.
pub(crate) fn route(ranks: usize, rows: usize, row_bytes: usize) -> Route {
    let bytes = rows * row_bytes;
    match ranks {
        0..=2 => Route::Ring,
        3..=MOST_DIRECT if rows.div_ceil(ranks) * row_bytes <= DIRECT_BYTES => Route::Direct,
        3..=MOST_DIRECT => Route::Ring,
        _ if bytes <= TREE_BYTES || bytes / ranks < SMALLEST_PART => Route::Tree,
        _ => Route::Ring,
    }
}

/// Returns whether sums of 16-bit numbers are made by all ranks from the addends of all.
pub(crate) fn is_pairwise(ranks: usize) -> bool {
    ranks <= MOST_PAIRWISE
}

/// Elements of `size` bytes that rank `rank` sends in a reduce-scatter of `len` elements.
pub(crate) fn scattered(ranks: usize, rank: usize, len: usize, size: usize) -> usize {
    let others = len - partition_range(len, ranks, rank).len();
    match (route(ranks, len, size), size) {
        (_, 2) if is_pairwise(ranks) => others,
        (_, 2) => 2 * scattered(ranks, rank, len, 4),
        (Route::Tree, _) => len * tree_neighbours(ranks, rank),
        _ => others,
    }
}

/// Rows that rank `rank` sends in an all-gather of `rows` rows of `row_bytes` bytes: its own to each other rank, the whole
/// to each neighbour in the tree, or round the ring all but the next rank's.
pub(crate) fn gathered_rows(ranks: usize, rank: usize, rows: usize, row_bytes: usize) -> usize {
    let part = |rank: usize| partition_range(rows, ranks, rank % ranks).len();
    match (ranks, route(ranks, rows, row_bytes)) {
        (1, _) => 0,
        (_, Route::Direct) => (ranks - 1) * part(rank),
        (_, Route::Tree) => rows * tree_neighbours(ranks, rank),
        (_, Route::Ring) => rows - part(rank + 1),
    }
}

/// Bytes that rank `rank` sends in an all-reduce of `len` elements of `size` bytes.
pub(crate) fn all_reduced(ranks: usize, rank: usize, len: usize, size: usize) -> usize {
    let scattered = |len| len - partition_range(len, ranks, rank).len();
    match (ranks, route(ranks, len, size), size) {
        (1, ..) => 0,
        (_, _, 2) if !is_pairwise(ranks) => all_reduced(ranks, rank, len, 4),
        (_, Route::Tree, 2) => {
            size * (scattered(len) + len - partition_range(len, ranks, (rank + 1) % ranks).len())
        }
        (_, Route::Tree, _) => size * len * tree_neighbours(ranks, rank),
        _ => size * (scattered(len) + gathered_rows(ranks, rank, len, size)),
    }
}

fn tree_neighbours(ranks: usize, rank: usize) -> usize {
    usize::from(rank > 0) + tree::children(rank, ranks).len()
}
