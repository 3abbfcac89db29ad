//! How a product is cut up.
//!
//! A *block* is the steps of k that the microkernel runs through in one go: a function of k alone,
//! so that sums are always formed alike. All other cuts are for the caches and the threads and do
//! not show in the result: a *chapter* is what is packed at a time, and a *tile* is what one thread
//! computes at a time, with its part of the right operand in L2.

/// Bytes of k in a block: the right operand's part of a tile (192 columns) then takes 384 KiB of L2.
const BLOCK_BYTES: usize = 2048;
/// Bytes of k in a chapter, at most.
const CHAPTER_DEPTH_BYTES: usize = 4096;
/// Rows or columns of a chapter, in bytes: with the depth above a chapter's operand is up to 8 MiB.
const CHAPTER_LANE_BYTES: usize = 8192;
/// Rows of a tile, at most.
const TILE_ROWS: usize = 128;
/// Panels of columns of a tile.
const TILE_PANELS: usize = 4;
/// Rounds up what is divided evenly.
const GRAIN: usize = 16;

/// The cuts of one product of (rows, k) by (k, columns).
#[derive(Debug, Clone, Copy)]
pub(super) struct CacheBlocking {
    /// Steps of a block.
    pub block: usize,
    /// Steps of a chapter: a multiple of the block.
    pub depth: usize,
    /// Rows and columns of a chapter.
    pub rows: usize,
    pub columns: usize,
    /// Rows and columns of a tile.
    pub tile_rows: usize,
    pub tile_columns: usize,
    /// Columns of a packed panel: a number of vectors.
    pub panel_columns: usize,
    /// Number of chapters along rows, columns and k.
    pub chapters: [usize; 3],
}

/// The dimensions of a product and what it is computed with.
#[derive(Debug, Clone, Copy)]
pub(super) struct GemmShape {
    pub rows: usize,
    pub columns: usize,
    pub k: usize,
    pub threads: usize,
    /// Bytes of an accumulator.
    pub bytes: usize,
    /// Lanes of a register.
    pub lanes: usize,
    /// Rows and vectors of columns of the microkernel.
    pub kernel_rows: usize,
    pub kernel_vectors: usize,
}

/// The size of equal parts of `total`, each at most about `most`, rounded up to `grain`.
fn even(total: usize, most: usize, grain: usize) -> usize {
    total.div_ceil(total.div_ceil(most)).next_multiple_of(grain)
}

/// Steps of a block of words or f32 values.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub(super) fn sum_block_steps(k: usize) -> usize {
    even(k, BLOCK_BYTES / size_of::<f32>(), GRAIN)
}

impl CacheBlocking {
    /// The cuts; what needs no packing in chapters is one chapter.
    pub(super) fn new(size: GemmShape, packing: bool) -> CacheBlocking {
        let GemmShape {
            rows: m,
            columns: n,
            k,
            threads,
            bytes,
            lanes,
            kernel_rows,
            kernel_vectors,
        } = size;
        let block = even(k, BLOCK_BYTES / bytes, GRAIN);
        let depth = (CHAPTER_DEPTH_BYTES / bytes / block).max(1) * block;
        let depth = if packing { depth.min(k.next_multiple_of(block)) } else { k };
        let vectors = n.div_ceil(lanes);
        let panel_columns = vectors.div_ceil(vectors.div_ceil(kernel_vectors)) * lanes;
        let most = if packing { CHAPTER_LANE_BYTES / bytes } else { usize::MAX };
        let (rows, columns) = (even(m, most, GRAIN), even(n, most, panel_columns));
        let tile_columns = (TILE_PANELS * panel_columns).min(columns);
        // Enough tiles that threads which come late or go slower still share evenly.
        let strips = columns.div_ceil(tile_columns);
        let wanted = if threads > 1 { (8 * threads).div_ceil(strips) } else { 1 };
        let tile_rows = rows.div_ceil(wanted).next_multiple_of(kernel_rows).min(TILE_ROWS);
        let chapters = [m.div_ceil(rows), n.div_ceil(columns), k.div_ceil(depth)];
        CacheBlocking {
            block,
            depth,
            rows,
            columns,
            tile_rows,
            tile_columns,
            panel_columns,
            chapters,
        }
    }

    /// Number of tiles in so many rows and columns.
    pub(super) fn tiles(&self, rows: usize, columns: usize) -> usize {
        rows.div_ceil(self.tile_rows) * columns.div_ceil(self.tile_columns)
    }
}
