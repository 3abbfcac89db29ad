//! The macrokernel: computes one tile of the product, mc x nc, by the three loops around the microkernel.

use super::Accum;
use super::blocking::CacheBlocking;
use super::kernel::{Compute, GemmKernels, MicroTile};
use super::packed_operand::{Access, PackedOperand, Range};
use super::problem::{Bias, Problem};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// A product and the state of its computation.
pub(super) struct GemmTask<T: 'static> {
    pub kernels: &'static GemmKernels<T>,
    pub problem: Problem,
    pub plan: CacheBlocking,
    pub alpha: T,
    pub lhs: PackedOperand<T>,
    pub rhs: PackedOperand<T>,
    /// Accumulates tiles when the target cannot take sums; unused where a single block along k is the whole sum.
    pub scratch: Option<*mut T>,
    /// Whether the microkernel writes the last block's sums to the target, with the bias.
    pub stores_result: bool,
    /// The panels that each thread has packed for itself: their first step times the operand's lanes, and first lane.
    pub held: Vec<AtomicUsize>,
}

// SAFETY: threads write disjoint chunks of the panels, then disjoint tiles of the target or their
// scratch, and a phase begins only after the one before is done (acquire and release on `done`).
unsafe impl<T: Sync> Sync for GemmTask<T> {}

/// A tile of the target and where its sums are accumulated.
struct TilePosition<T> {
    row: usize,
    column: usize,
    rows: usize,
    columns: usize,
    /// The target itself, or scratch.
    sums: *mut T,
    sums_row: isize,
}

impl<T: Compute> GemmTask<T> {
    /// Computes tile number `number` of the cache block that `rows` and `columns` span. `ends` says whether the block
    /// is the first and the last along k.
    ///
    /// # Safety
    /// The cache block is packed, no other thread computes this tile, and `thread` is this thread's number.
    pub(super) unsafe fn compute_tile(
        &self,
        rows: Range,
        columns: Range,
        [first, last]: [bool; 2],
        number: usize,
        thread: usize,
    ) {
        let (plan, target) = (&self.plan, self.problem.target);
        let [i, j] = plan.tile([rows.lanes, columns.lanes], number);
        let (i0, j0) = (i * plan.mc, j * plan.nc);
        // SAFETY: the caller's promise.
        unsafe { self.pack_own(rows, columns, [i0, j0], thread) };
        let (row, column) = (rows.lane + i0, columns.lane + j0);
        let (sums, sums_row) = match self.scratch {
            None => (target.at(row, column).cast::<T>(), target.row_stride),
            Some(scratch) => {
                // A tile that takes several cache blocks needs a place of its own.
                let slot = if first && last { thread } else { number };
                let offset = slot * plan.mc * plan.nc;
                (scratch.wrapping_add(offset), plan.nc as isize)
            }
        };
        let place = TilePosition {
            row,
            column,
            rows: plan.mc.min(rows.lanes - i0),
            columns: plan.nc.min(columns.lanes - j0),
            sums,
            sums_row,
        };
        let add = self.problem.accum == Accum::Add;
        // SAFETY: the tile lies within the target, and its sums are this thread's for now.
        unsafe {
            if self.scratch.is_some() && first && add {
                let (at, dims) = ([row, column], [place.rows, place.columns]);
                self.kernels.widen_target(&target, at, dims, sums, plan.nc);
            }
            // Columns that are streamed are read to their end before the next ones.
            let together = if self.rhs.access == Access::Streamed { plan.nr } else { plan.nc };
            for j in (0..place.columns).step_by(together) {
                let place = TilePosition {
                    column: column + j,
                    columns: together.min(place.columns - j),
                    sums: sums.wrapping_add(j),
                    ..place
                };
                for start in (0..rows.steps).step_by(plan.kc) {
                    let add = add || !first || start > 0;
                    let last = last && start + plan.kc >= rows.steps;
                    self.add_products(&place, rows, columns, start, [add, last], thread);
                }
            }
            if last && !self.stores_result {
                // The target's columns are apart, or it has a bias for each row.
                let (at, dims) = ([row, column], [place.rows, place.columns]);
                self.kernels.round_to_target(&self.problem, at, dims, sums, sums_row);
            }
        }
    }

    /// Packs the lanes of a tile that this thread packs for itself, if its last tile had others.
    unsafe fn pack_own(&self, rows: Range, columns: Range, [i0, j0]: [usize; 2], thread: usize) {
        let CacheBlocking { mc, nc, .. } = self.plan;
        let sides = [(&self.lhs, rows, i0, mc), (&self.rhs, columns, j0, nc)];
        for (operand, block, lane, most) in sides {
            let own = operand.access == Access::PackedPerTile;
            let first = block.step * operand.operand.lanes + block.lane + lane;
            if own && self.held[thread].swap(first, Relaxed) != first {
                // SAFETY: the lanes lie within the operand.
                unsafe { operand.pack_tile(block, [lane, most.min(block.lanes - lane)], thread) };
            }
        }
    }

    /// Adds the products of the kc steps from `start` of the cache block on to a tile.
    unsafe fn add_products(
        &self,
        place: &TilePosition<T>,
        rows: Range,
        columns: Range,
        start: usize,
        [add, last]: [bool; 2],
        thread: usize,
    ) {
        let GemmTask { plan, kernels, lhs, rhs, .. } = self;
        let mr = kernels.tiles.len();
        let depth = plan.kc.min(rows.steps - start);
        let (i0, j0) = (place.row - rows.lane, place.column - columns.lane);
        let a = lhs.view(rows, i0, start, depth, thread);
        let b = rhs.view(columns, j0, start, depth, thread);
        let (target, stores_result) = (self.problem.target, last && self.stores_result);
        let (to, to_row, dtype) = match stores_result {
            true => (target.at(place.row, place.column), target.row_stride, target.dtype),
            false => (place.sums.cast(), place.sums_row, T::DTYPE),
        };
        let size = dtype.size();
        let bias = match self.problem.bias {
            Bias::Columns(bias) if stores_result => bias.wrapping_add(place.column * size),
            _ => std::ptr::null(),
        };
        let stream = (rhs.access == Access::Streamed).then(|| (kernels.stream)(rhs.operand.dtype));
        for i in (0..place.rows).step_by(mr) {
            let tiles = &kernels.tiles[mr.min(place.rows - i) - 1];
            let a_data = a.data.wrapping_offset((i / mr) as isize * a.panel);
            let c = place.sums.wrapping_offset(i as isize * place.sums_row);
            let to = to.wrapping_offset(i as isize * to_row * size as isize);
            for (panel, j) in (0..place.columns).step_by(plan.nr).enumerate() {
                let lanes = plan.nr.min(place.columns - j);
                let vectors = lanes.div_ceil(kernels.lanes);
                if rhs.access == Access::PackedPerThread {
                    let (lane, step) = (place.column + j, columns.step + start);
                    let range = Range { lane, lanes, step, steps: depth };
                    // SAFETY: the range lies within the operand.
                    unsafe { rhs.pack_panel(range, thread) };
                }
                let tile = MicroTile {
                    depth,
                    a: a_data,
                    a_row: a.lane,
                    a_step: a.step,
                    b: b.data.wrapping_offset(panel as isize * b.panel),
                    b_step: b.step,
                    c: c.wrapping_add(j),
                    c_row: place.sums_row,
                    add,
                    to: to.wrapping_add(j * size),
                    to_row,
                    dtype,
                    last_lanes: lanes - (vectors - 1) * kernels.lanes,
                    alpha: self.alpha,
                    bias: if bias.is_null() { bias } else { bias.wrapping_add(j * size) },
                };
                // SAFETY: the pointers lie within panels or operands, and the target or scratch.
                unsafe {
                    match stream {
                        None => tiles[vectors - 1](&tile),
                        Some(stream) => {
                            let from = rhs.stored(columns, place.column + j, start, depth);
                            stream[mr.min(place.rows - i) - 1](&tile, &from);
                        }
                    }
                }
            }
        }
    }
}
