//! AMX products of bf16 matrices of any size: the loops around the microkernel.
//!
//! ```text
//!  for each cache block: all threads pack its rows and its columns; then, piece by piece,
//!    for each chunk of columns            in L2
//!      for each panel of 32 rows          a piece: one list of microtiles
//!        for each sum block and k-block   the rows' part in L1
//!          for each panel of 32 columns   a microtile
//! ```

use super::blocking::Blocking;
use super::config;
use super::microkernel::{self, MICROTILE, STEP_BYTES, SUMS_BYTES};
use super::pack::{Panels, STEP, Tiles, pack};
use super::piece::{BiasRow, Lanes, Piece};
use super::stream;
use crate::gemm::problem::Problem;
use crate::gemm::scheduler;
use crate::gemm::scheduler::{CacheBlock, Work};
use crate::gemm::workspace::with_workspace;
use crate::{Result, ThreadTeam};

/// Steps of a piece of packing, and its panels, where the lanes of an element lie together.
const PACKED_STEPS: usize = 32;
const PACKED_PANELS: usize = 16;

/// A product and its memory.
struct Product {
    problem: Problem,
    blocking: Blocking,
    alpha: f32,
    /// Packed panels of rows and of columns.
    packed: [*mut u8; 2],
    /// Held blocks of all pieces of a cache block, where there are several cache blocks along k.
    held: Option<*mut u8>,
    /// The threads' own memory.
    private: *mut u8,
    private_bytes: usize,
}

// SAFETY: threads write disjoint panels, then disjoint pieces of the target and of the held blocks, and each its own
// private memory.
unsafe impl Sync for Product {}

/// Computes an oriented problem, whose steps are elements, with so many threads of a team: here or, of few rows, in [`stream`].
/// Errors if there is no memory for packed operands.
///
/// # Safety
/// Data and strides describe valid, non-overlapping memory; the process may use AMX.
pub(in crate::gemm) unsafe fn run(
    team: &ThreadTeam,
    threads: usize,
    problem: Problem,
    alpha: f32,
) -> Result<()> {
    let [m, n, k] = [problem.lhs.lanes, problem.rhs.lanes, problem.k];
    // SAFETY: the caller's promise, passed on.
    unsafe {
        if stream::fits(&problem) {
            return stream::run(team, threads, problem, alpha);
        }
        run_with(Blocking::new([m, n, k], threads), team, threads, problem, alpha)
    }
}

/// # Safety
/// The conditions of [`run`].
pub(super) unsafe fn run_with(
    blocking: Blocking,
    team: &ThreadTeam,
    threads: usize,
    problem: Problem,
    alpha: f32,
) -> Result<()> {
    let panel_bytes = blocking.depth.div_ceil(STEP) * STEP_BYTES;
    let bytes = [blocking.rows, blocking.columns].map(|lanes| lanes / MICROTILE * panel_bytes);
    let pieces = blocking.rows / MICROTILE * blocking.columns.div_ceil(blocking.chunk);
    let panels = blocking.chunk / MICROTILE;
    let held_bytes = if blocking.cache_blocks[2] > 1 { pieces * panels * SUMS_BYTES } else { 0 };
    let private_bytes = Piece::private_bytes(panels, blocking.depth.div_ceil(STEP));
    let total = bytes[0] + bytes[1] + held_bytes + threads * private_bytes;
    with_workspace(total, |memory| {
        let columns = memory.wrapping_add(bytes[0]);
        let held = columns.wrapping_add(bytes[1]);
        let product = Product {
            problem,
            blocking,
            alpha,
            packed: [memory, columns],
            held: (held_bytes > 0).then_some(held),
            private: held.wrapping_add(held_bytes),
            private_bytes,
        };
        // SAFETY: pieces of one phase touch different memory.
        unsafe { scheduler::run(team, threads, &product) };
    })
}

impl Work for Product {
    fn cache_blocks(&self) -> [usize; 3] {
        self.blocking.cache_blocks
    }

    fn packing_pieces(&self, block: CacheBlock) -> usize {
        self.packings(block).iter().sum()
    }

    fn computing_pieces(&self, block: CacheBlock) -> usize {
        let [rows, columns] = self.lanes(block);
        rows.len.div_ceil(MICROTILE) * columns.len.div_ceil(self.blocking.chunk)
    }

    unsafe fn pack(&self, block: CacheBlock, number: usize) {
        let of_rows = self.packings(block)[0];
        let side = usize::from(number >= of_rows);
        let number = if side == 1 { number - of_rows } else { number };
        let lanes = self.lanes(block)[side];
        let (element, steps) = self.steps(block);
        let (panels, packed_steps) = self.packed_together(side);
        let across = lanes.len.div_ceil(panels * MICROTILE);
        let (panel, step) = (number % across * panels, number / across * packed_steps);
        // The last cache block along k may be shorter than what the pieces are counted by.
        if step >= steps {
            return;
        }
        let first = panel * MICROTILE;
        let panel_bytes = steps * STEP_BYTES;
        let panels = Panels {
            operand: if side == 0 { &self.problem.lhs } else { &self.problem.rhs },
            tiles: if side == 0 { Tiles::Rows } else { Tiles::Columns },
            lane: lanes.first + first,
            lanes: (panels * MICROTILE).min(lanes.len - first),
            element: element + step * STEP,
            steps: packed_steps.min(steps - step),
            to: self.packed[side].wrapping_add(panel * panel_bytes + step * STEP_BYTES),
            panel_bytes,
        };
        // SAFETY: the lanes lie within the operand, and the block's panels have room.
        unsafe { pack(&panels) };
    }

    unsafe fn compute(&self, block: CacheBlock, number: usize, thread: usize) {
        // SAFETY: the caller's promise, passed on; shapes have been loaded by `enter`; of what is finished a
        // conversion reads only what the list has stored.
        unsafe {
            let piece = self.piece(block, number, thread);
            piece.prepare();
            microkernel::run(piece.microtiles(), self.alpha, piece.finished);
            piece.epilogue();
        }
    }

    fn enter(&self) {
        // SAFETY: the process may use tile registers.
        unsafe { config::load() };
    }

    fn leave(&self) {
        // SAFETY: as above.
        unsafe { config::release() };
    }
}

impl Product {
    /// Pieces of packing for rows and for columns.
    fn packings(&self, block: CacheBlock) -> [usize; 2] {
        let lanes = self.lanes(block);
        let (_, steps) = self.steps(block);
        std::array::from_fn(|side| {
            let (panels, packed_steps) = self.packed_together(side);
            let pieces =
                lanes[side].len.div_ceil(panels * MICROTILE) * steps.div_ceil(packed_steps);
            if block.fresh[side] { pieces } else { 0 }
        })
    }

    /// Panels and steps of a piece of packing.
    fn packed_together(&self, side: usize) -> (usize, usize) {
        let operand = if side == 0 { &self.problem.lhs } else { &self.problem.rhs };
        match operand.lane_stride {
            1 => (PACKED_PANELS, PACKED_STEPS),
            _ => (1, self.blocking.depth.div_ceil(STEP)),
        }
    }

    /// Rows and columns of a cache block.
    fn lanes(&self, block: CacheBlock) -> [Lanes; 2] {
        let lanes = |number: usize, most: usize, total: usize| {
            let first = number * most;
            Lanes { first, len: most.min(total - first) }
        };
        let Blocking { rows, columns, .. } = self.blocking;
        let [i, j, _] = block.index;
        [lanes(i, rows, self.problem.lhs.lanes), lanes(j, columns, self.problem.rhs.lanes)]
    }

    /// First element and number of steps of a cache block.
    fn steps(&self, block: CacheBlock) -> (usize, usize) {
        let element = block.index[2] * self.blocking.depth;
        (element, self.blocking.depth.min(self.problem.k - element).div_ceil(STEP))
    }

    fn piece(&self, block: CacheBlock, number: usize, thread: usize) -> Piece<'_> {
        let [rows, columns] = self.lanes(block);
        let (_, steps) = self.steps(block);
        let panel_bytes = steps * STEP_BYTES;
        let row_panels = rows.len.div_ceil(MICROTILE);
        let (row_panel, chunk) = (number % row_panels, number / row_panels);
        let (row, column) = (row_panel * MICROTILE, chunk * self.blocking.chunk);
        let panels = self.blocking.chunk / MICROTILE;
        let sums = self.private.wrapping_add(thread * self.private_bytes);
        let own_held = sums.wrapping_add(panels * SUMS_BYTES);
        let finished = own_held.wrapping_add(panels * SUMS_BYTES);
        let bias = finished.wrapping_add(2 * SUMS_BYTES);
        Piece {
            problem: &self.problem,
            blocking: &self.blocking,
            rows: Lanes { first: rows.first + row, len: MICROTILE.min(rows.len - row) },
            columns: Lanes {
                first: columns.first + column,
                len: self.blocking.chunk.min(columns.len - column),
            },
            first: block.index[2] == 0,
            last: block.index[2] + 1 == self.blocking.cache_blocks[2],
            a: self.packed[0].wrapping_add(row_panel * panel_bytes),
            b: self.packed[1].wrapping_add(chunk * panels * panel_bytes),
            panel_bytes,
            steps,
            held: self
                .held
                .map_or(own_held, |held| held.wrapping_add(number * panels * SUMS_BYTES)),
            sums,
            finished,
            bias: bias.cast(),
            list: bias.wrapping_add(panels * size_of::<BiasRow>()).cast(),
        }
    }
}
