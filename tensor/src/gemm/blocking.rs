//! Divides a product into blocks: the sizes of the five loops in [`super`].
//!
//! kc is a function of k alone, so that sums are always formed alike. All other cuts are for the caches and the
//! threads and do not show in the result.

use super::stream::FEW;

/// Bytes of kc elements, at most: kc x nc of the right operand (192 columns) then takes 384 KiB of L2.
const KC_BYTES: usize = 2048;
/// Bytes of k in a cache block, at most.
const CACHE_BLOCK_DEPTH_BYTES: usize = 4096;
/// Rows or columns of a cache block, in bytes: with the depth above each operand's is up to 8 MiB.
const CACHE_BLOCK_LANE_BYTES: usize = 8192;
/// mc, at most.
const MC: usize = 128;
/// nc, in panels of nr columns.
const NC_PANELS: usize = 4;
/// Rounds up what is divided evenly.
const GRAIN: usize = 16;

/// The cuts of one product of (rows, k) by (k, columns).
#[derive(Debug, Clone, Copy)]
pub(super) struct CacheBlocking {
    /// Steps of k that the microkernel runs through in one go.
    pub kc: usize,
    /// Steps of a cache block: a multiple of kc.
    pub depth: usize,
    /// Rows and columns of a cache block.
    pub rows: usize,
    pub columns: usize,
    /// Rows and columns of a tile, which a thread computes at a time.
    pub mc: usize,
    pub nc: usize,
    /// Columns of a packed panel and of a microtile: a number of vectors.
    pub nr: usize,
    /// Number of cache blocks along rows, columns and k.
    pub cache_blocks: [usize; 3],
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
    /// Rows of a microtile.
    pub mr: usize,
    /// Vectors of columns of a microtile, at most.
    pub vectors: usize,
}

/// The size of equal parts of `total`, each at most about `most`, rounded up to `grain`.
fn even(total: usize, most: usize, grain: usize) -> usize {
    total.div_ceil(total.div_ceil(most)).next_multiple_of(grain)
}

/// kc of words or f32 values.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub(super) fn kc_steps(k: usize) -> usize {
    even(k, KC_BYTES / size_of::<f32>(), GRAIN)
}

impl CacheBlocking {
    /// The cuts; what needs no packing ahead is one cache block.
    pub(super) fn new(size: GemmShape, packing: bool) -> CacheBlocking {
        let GemmShape { rows: m, columns: n, k, threads, bytes, lanes, mr, vectors: most_vectors } =
            size;
        let kc = even(k, KC_BYTES / bytes, GRAIN);
        let depth = (CACHE_BLOCK_DEPTH_BYTES / bytes / kc).max(1) * kc;
        let depth = if packing { depth.min(k.next_multiple_of(kc)) } else { k };
        let vectors = n.div_ceil(lanes);
        let nr = vectors.div_ceil(vectors.div_ceil(most_vectors)) * lanes;
        let most = if packing { CACHE_BLOCK_LANE_BYTES / bytes } else { usize::MAX };
        let (rows, columns) = (even(m, most, GRAIN), even(n, most, nr));
        let nc = (NC_PANELS * nr).min(columns);
        // Enough tiles that threads which come late or go slower still share evenly.
        let across = columns.div_ceil(nc);
        // Few rows stay together, so that columns are read once.
        let wanted = if threads > 1 && m > FEW { (8 * threads).div_ceil(across) } else { 1 };
        let mc = rows.div_ceil(wanted).next_multiple_of(mr).min(MC);
        let cache_blocks = [m.div_ceil(rows), n.div_ceil(columns), k.div_ceil(depth)];
        CacheBlocking { kc, depth, rows, columns, mc, nc, nr, cache_blocks }
    }

    /// Number of tiles in so many rows and columns.
    pub(super) fn tiles(&self, rows: usize, columns: usize) -> usize {
        rows.div_ceil(self.mc) * columns.div_ceil(self.nc)
    }
}
