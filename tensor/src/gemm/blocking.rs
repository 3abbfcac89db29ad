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
/// Lanes of the other operand for each thread that packs the same lanes, at least: packing is then 2 % of the product.
const USES: usize = 256;
/// Sums that keep two units busy, each of which begins a multiply-add a cycle and ends it four cycles later.
const BUSY_SUMS: usize = 8;
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
    /// The operand that each thread packs for itself, a tile's lanes at a time: 0 for the left, 1 for the right one.
    pub own: Option<usize>,
    /// Bands of rows whose tiles follow one another: one for each thread, or one for all.
    pub bands: usize,
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
pub(super) fn even(total: usize, most: usize, grain: usize) -> usize {
    total.div_ceil(total.div_ceil(most)).next_multiple_of(grain)
}

/// The width of panels, in vectors of columns, with which `mr` rows take the least time. A panel takes as long as its sums,
/// at least [`BUSY_SUMS`], and one unit more.
pub(super) fn panel_vectors(columns: usize, most: usize, mr: usize) -> usize {
    let time = |vectors: usize| 1 + (mr * vectors).max(BUSY_SUMS);
    let total = |&width: &usize| {
        let last = columns % width;
        columns / width * time(width) + if last > 0 { time(last) } else { 0 }
    };
    (1..=most.min(columns)).min_by_key(total).expect("a panel has a vector")
}

/// Chooses the operand that each thread packs for itself, a tile's lanes at a time: of those to be packed, the one with
/// more lanes. None if threads that need the same lanes would pack them too often.
fn own_side(
    packed: [bool; 2],
    lanes: [usize; 2],
    tile: [usize; 2],
    threads: usize,
) -> Option<usize> {
    let side = (0..2).filter(|&side| packed[side]).max_by_key(|&side| lanes[side])?;
    let sharing = threads.div_ceil(lanes[side].div_ceil(tile[side]));
    (lanes[1 - side] >= USES * sharing).then_some(side)
}

/// kc of steps of so many bytes.
pub(super) fn kc_steps(k: usize, bytes: usize) -> usize {
    even(k, KC_BYTES / bytes, GRAIN)
}

impl CacheBlocking {
    /// The cuts, with the operands that are to be packed; what needs no packing ahead is one cache block.
    pub(super) fn new(size: GemmShape, packed: [bool; 2]) -> CacheBlocking {
        let GemmShape { rows: m, columns: n, k, threads, bytes, lanes, mr, vectors: most_vectors } =
            size;
        let kc = kc_steps(k, bytes);
        let nr = panel_vectors(n.div_ceil(lanes), most_vectors, mr.min(m)) * lanes;
        let own = own_side(packed, [m, n], [MC, NC_PANELS * nr], threads);
        let deepest = (CACHE_BLOCK_DEPTH_BYTES / bytes / kc).max(1) * kc;
        let depth = if packed == [false; 2] { k } else { deepest.min(k.next_multiple_of(kc)) };
        // Panels for all threads, and the sums that wait for the next cache block along k, stay in a shared cache.
        let shared = (0..2).any(|side| packed[side] && own != Some(side));
        let most = |side: usize| match depth < k || shared && own != Some(side) {
            true => CACHE_BLOCK_LANE_BYTES / bytes,
            false => usize::MAX,
        };
        let (rows, columns) = (even(m, most(0), GRAIN), even(n, most(1), nr));
        let nc = (NC_PANELS * nr).min(columns);
        // Enough tiles that threads which come late or go slower still share evenly.
        let across = columns.div_ceil(nc);
        // Few rows stay together, so that columns are read once.
        let wanted = if threads > 1 && m > FEW { (8 * threads).div_ceil(across) } else { 1 };
        let mc = rows.div_ceil(wanted).next_multiple_of(mr).min(MC);
        let cache_blocks = [m.div_ceil(rows), n.div_ceil(columns), k.div_ceil(depth)];
        // Threads that have rows of their own read all columns, and find their rows in their caches in the next operation.
        let banded = m > n && own != Some(0) && (own.is_none() || rows >= USES * threads);
        let bands = if banded { threads } else { 1 };
        CacheBlocking { kc, depth, rows, columns, mc, nc, nr, cache_blocks, own, bands }
    }

    /// Number of tiles in so many rows and columns.
    pub(super) fn tiles(&self, rows: usize, columns: usize) -> usize {
        rows.div_ceil(self.mc) * columns.div_ceil(self.nc)
    }

    /// The row and column, in tiles, of tile number `number` of so many lanes. Tiles of the lanes that a thread packs for
    /// itself follow one another, and so do those of a band.
    pub(super) fn tile(&self, [rows, columns]: [usize; 2], number: usize) -> [usize; 2] {
        let (down, across) = (rows.div_ceil(self.mc), columns.div_ceil(self.nc));
        if self.own == Some(0) {
            return [number / across, number % across];
        }
        // Band b ends before row (b + 1) * down / bands.
        let band = ((number / across + 1) * self.bands - 1) / down;
        let [first, end] = [band, band + 1].map(|band| band * down / self.bands);
        let number = number - first * across;
        [first + number % (end - first), number / (end - first)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own(threads: usize, [rows, k, columns]: [usize; 3], packed: [bool; 2]) -> Option<usize> {
        let shape = GemmShape { rows, columns, k, threads, bytes: 4, lanes: 16, mr: 8, vectors: 3 };
        CacheBlocking::new(shape, packed).own
    }

    #[test]
    fn threads_pack_the_operand_with_more_lanes_for_themselves() {
        let (right, both) = ([false, true], [true; 2]);
        for threads in [1, 2, 4] {
            // A linear layer, the logits, and weight gradients: of GPT-2 124M.
            assert_eq!(own(threads, [1024, 768, 2304], right), Some(1));
            assert_eq!(own(threads, [1024, 768, 50304], right), Some(1));
            assert_eq!(own(threads, [50304, 1024, 768], both), Some(0));
            assert_eq!(own(threads, [768, 1024, 3072], both), Some(1));
            assert_eq!(own(threads, [1024, 3072, 768], right), Some(1));
            // Too few uses, nothing to pack.
            assert_eq!(own(threads, [128, 768, 2304], right), None);
            assert_eq!(own(threads, [1024, 768, 2304], [false; 2]), None);
        }
        // 64 threads would pack each of 4 chunks 16 times.
        assert_eq!(own(64, [1024, 768, 768], right), None);
        assert_eq!(own(64, [4096, 768, 768], right), Some(1));
    }

    #[test]
    fn tiles_of_a_thread_share_rows_where_these_are_more() {
        for (dims, packed, threads, bands) in [
            // A linear layer of 768 rows, its input gradient, and layers with more columns than rows.
            ([768, 128, 512], [false, true], 2, 2),
            ([768, 512, 128], [false, false], 3, 3),
            ([768, 768, 3072], [false, true], 2, 1),
            // Each thread would pack all columns for too few rows.
            ([768, 128, 512], [false, true], 4, 1),
            // Threads pack rows for themselves, which gives them bands anyway.
            ([768, 512, 512], [true, true], 2, 1),
        ] {
            let [rows, k, columns] = dims;
            let shape =
                GemmShape { rows, columns, k, threads, bytes: 4, lanes: 16, mr: 8, vectors: 3 };
            let plan = CacheBlocking::new(shape, packed);
            assert_eq!(plan.bands, bands, "{dims:?}, {threads} threads");
        }
    }

    #[test]
    fn bands_have_each_tile_once() {
        let shape = GemmShape {
            rows: 64,
            k: 64,
            columns: 64,
            threads: 1,
            bytes: 4,
            lanes: 16,
            mr: 8,
            vectors: 3,
        };
        let plan = CacheBlocking::new(shape, [false; 2]);
        for (down, across, bands) in (1..8).flat_map(|down| {
            (1..4).flat_map(move |across| (1..10).map(move |bands| (down, across, bands)))
        }) {
            let plan = CacheBlocking { mc: 8, nc: 16, bands, ..plan };
            let lanes = [8 * down - 3, 16 * across - 5];
            let count = plan.tiles(lanes[0], lanes[1]);
            let tiles: Vec<[usize; 2]> =
                (0..count).map(|number| plan.tile(lanes, number)).collect();
            let what = format!("{down} x {across} tiles in {bands} bands: {tiles:?}");
            // Of the bands that end below a row, the first has it.
            let band = |&[row, _]: &[usize; 2]| {
                (0..bands).position(|band| row < (band + 1) * down / bands).expect("the last")
            };
            assert!(tiles.is_sorted_by_key(band), "{what}");
            let mut sorted = tiles.clone();
            sorted.sort_unstable();
            let all: Vec<[usize; 2]> = (0..count).map(|i| [i / across, i % across]).collect();
            assert_eq!(sorted, all, "{what}");
        }
    }

    #[test]
    fn panels_leave_no_last_one_of_few_sums() {
        let columns = [1, 2, 3, 4, 5, 8, 10, 16, 48, 64];
        // AVX2 with 4 rows, AVX-512 with 8, and fewer rows.
        let panels = |mr: usize| columns.map(|columns| panel_vectors(columns, 3, mr));
        assert_eq!(panels(4), [1, 2, 3, 2, 3, 3, 2, 2, 3, 3]);
        assert_eq!(panels(8), [1, 2, 3, 2, 3, 3, 3, 3, 3, 3]);
        assert_eq!([panels(1), panels(2)], [[1, 2, 3, 2, 3, 3, 3, 3, 3, 3]; 2]);
    }
}
