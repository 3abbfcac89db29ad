//! Cuts of an AMX product for the caches and the threads; none of them changes a result.
//!
//! | cut | size | where it stays |
//! |---|---|---|
//! | k-block | `k_block` steps of 32 elements | a row panel's part: at most 32 KiB of L1 |
//! | chunk | `chunk` columns over the cache block's depth | L2, read once for each row panel |
//! | cache block | `rows` x `columns` x `depth` | packed at a time, at most 8 MiB an operand |
//!
//! Sums begin anew after `sum_block` elements, a function of k alone that is the same for every instruction set.

use super::microkernel::{MICROTILE, STEP_BYTES};
use super::pack::STEP;
use crate::gemm::blocking::{even, kc_steps};

/// Steps of a k-block, at most: 32 KiB of rows.
const K_BLOCK: usize = 16;
/// Bytes of a chunk, more or less.
const CHUNK_BYTES: usize = 1200 << 10;
/// Bytes of a chunk that spares a long left operand a second pass.
const ONLY_CHUNK_BYTES: usize = 1600 << 10;
/// Bytes of a cache block's operand, at most.
const CACHE_BLOCK_BYTES: usize = 8 << 20;
/// Elements of k in the only cache block, at most. With more, chunks become narrow, and rows are read too often.
const DEPTH: usize = 1792;
/// Pieces a cache block should have for each of several threads.
const PIECES_PER_THREAD: usize = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Blocking {
    /// See [`sum_block`].
    pub sum_block: usize,
    /// Steps of a k-block, at most.
    pub k_block: usize,
    /// Elements of k, rows and columns of a cache block.
    pub depth: usize,
    pub rows: usize,
    pub columns: usize,
    /// Columns of a chunk: what a piece of work covers of a row panel.
    pub chunk: usize,
    /// Number of cache blocks along rows, columns and k.
    pub cache_blocks: [usize; 3],
}

/// Elements that are summed from zero, in a product over `k`.
pub(super) fn sum_block(k: usize) -> usize {
    2 * kc_steps(k.div_ceil(2), size_of::<f32>())
}

impl Blocking {
    pub(super) fn new([m, n, k]: [usize; 3], threads: usize) -> Blocking {
        let (rows, columns) = (m.next_multiple_of(MICROTILE), n.next_multiple_of(MICROTILE));
        let sum_block = sum_block(k);
        let depth = if k <= DEPTH { k.next_multiple_of(STEP) } else { sum_block };
        let steps = depth.div_ceil(STEP);
        // How many lanes, in whole panels, take so many bytes.
        let lanes = |bytes: usize| (bytes / (steps * STEP_BYTES)).max(1) * MICROTILE;
        let parts = |whole: usize, most: usize| even(whole, most, MICROTILE);
        let deep = k > depth;
        let long = rows > lanes(CACHE_BLOCK_BYTES);
        let block_columns = parts(columns, lanes(CACHE_BLOCK_BYTES));
        let mut chunk = parts(columns, lanes(CHUNK_BYTES));
        let block_rows = parts(rows, lanes(CACHE_BLOCK_BYTES));
        if long && columns <= lanes(ONLY_CHUNK_BYTES) {
            chunk = columns;
        }
        // Enough pieces that threads which come late or go slower still share evenly.
        let panels = block_rows / MICROTILE;
        let chunks = if threads > 1 { (PIECES_PER_THREAD * threads).div_ceil(panels) } else { 1 };
        chunk = chunk.min(parts(block_columns, block_columns.div_ceil(chunks)));
        let columns = if deep || long { block_columns } else { block_columns.min(chunks * chunk) };
        let cache_blocks = [m.div_ceil(block_rows), n.div_ceil(columns), k.div_ceil(depth)];
        Blocking {
            sum_block,
            k_block: K_BLOCK,
            depth,
            rows: block_rows,
            columns,
            chunk,
            cache_blocks,
        }
    }

    /// The steps of each k-block of a sum over `steps` steps that is computed for so many panels of columns.
    pub(super) fn k_block_of(&self, steps: usize, panels: usize) -> usize {
        // With one panel, the sums of a k-block would be loaded just after they were stored.
        let most = if panels == 1 { steps } else { self.k_block };
        steps.div_ceil(steps.div_ceil(most))
    }
}
