//! Runs a product: a list of work that the threads take from until nothing is left.
//!
//! The list alternates between packing a chapter's panels and computing its tiles. Threads draw
//! numbers from one counter; before its first work of a new phase a thread waits until all work of
//! the phases before is done. Only work that some thread is in the midst of is ever waited for, so
//! nothing can hang, and one thread alone finishes everything if the others are busy elsewhere.

use super::Accum;
use super::kernel::{Compute, Kernels, PackFn, Tile};
use super::pack::{Finish, Strip};
use super::plan::{Plan, Size};
use super::workspace::with_workspace;
use crate::DType;
use std::sync::atomic::{AtomicUsize, Ordering};

/// One operand: a lane is a row of the left or a column of the right one, a step an index of k.
#[derive(Clone, Copy)]
pub(super) struct Operand {
    pub data: *const u8,
    pub dtype: DType,
    pub lanes: usize,
    pub lane_stride: isize,
    pub step_stride: isize,
}

/// Where the product goes.
#[derive(Clone, Copy)]
pub(super) struct Target {
    pub data: *mut u8,
    pub dtype: DType,
    pub row_stride: isize,
    pub column_stride: isize,
}

/// A vector of the target's type to add, and the index it runs along.
#[derive(Clone, Copy)]
pub(super) enum Bias {
    None,
    Rows(*const u8),
    Columns(*const u8),
}

/// target = \[target +\] alpha * lhs * rhs \[+ bias\], with every dimension at least 1.
#[derive(Clone, Copy)]
pub(super) struct Problem {
    pub k: usize,
    pub lhs: Operand,
    pub rhs: Operand,
    pub target: Target,
    pub accum: Accum,
    pub bias: Bias,
}

impl Problem {
    /// The transposed product.
    fn transposed(self) -> Problem {
        let Target { data, dtype, row_stride, column_stride } = self.target;
        Problem {
            lhs: self.rhs,
            rhs: self.lhs,
            target: Target { data, dtype, row_stride: column_stride, column_stride: row_stride },
            bias: match self.bias {
                Bias::None => Bias::None,
                Bias::Rows(data) => Bias::Columns(data),
                Bias::Columns(data) => Bias::Rows(data),
            },
            ..self
        }
    }

    /// Turned so that columns, which fill the vectors, are contiguous, or the longer side of a narrow
    /// target.
    fn oriented(self) -> Problem {
        let (m, n) = (self.lhs.lanes, self.rhs.lanes);
        let turn = if m.min(n) < NARROW {
            n < m
        } else {
            self.target.column_stride != 1 && self.target.row_stride == 1
        };
        if turn { self.transposed() } else { self }
    }
}

/// Lanes below which vectors are hardly filled.
const NARROW: usize = 16;
/// Operations below which another thread is not worth waking.
const OPERATIONS_PER_THREAD: usize = 2 << 20;
/// Elements that a thread packs at a time.
const PACK_ELEMENTS: usize = 16 << 10;
/// Elements of an operand up to which it is used in place, where its layout allows.
const IN_PLACE_ELEMENTS: usize = 16 << 10;

/// Computes the problem with up to `threads` threads of the current rayon pool.
///
/// # Safety
/// Data and strides describe valid, non-overlapping memory; the processor has the instruction set
/// of the kernels.
pub(super) unsafe fn run<T: Compute>(
    kernels: &'static Kernels<T>,
    threads: usize,
    problem: Problem,
    alpha: T,
) {
    let problem = problem.oriented();
    let Problem { k, lhs, rhs, target, .. } = problem;
    let (rows, columns) = (lhs.lanes, rhs.lanes);
    let operations = 2 * rows.saturating_mul(columns).saturating_mul(k);
    let threads = threads.clamp(1, 1 + operations / OPERATIONS_PER_THREAD);
    let bytes = size_of::<T>();
    let kernel_rows = kernels.tiles.len();
    let size = Size { rows, columns, k, threads, bytes, lanes: kernels.lanes, kernel_rows };
    let plan = Plan::new(size);

    let small = |operand: &Operand| {
        operand.dtype == T::DTYPE && operand.lanes.saturating_mul(k) <= IN_PLACE_ELEMENTS
    };
    let lhs_in_place = small(&lhs) && (lhs.lane_stride == 1 || lhs.step_stride == 1);
    let rhs_in_place = small(&rhs)
        && rhs.lane_stride == 1
        && (kernels.free_masks || columns.is_multiple_of(kernels.lanes));
    let direct = target.dtype == T::DTYPE && (target.column_stride == 1 || columns == 1);

    let depth = plan.depth.min(k.next_multiple_of(plan.block));
    let padded_rows = plan.rows.next_multiple_of(kernel_rows.max(kernels.lanes));
    let lhs_size = if lhs_in_place { 0 } else { padded_rows * depth };
    let rhs_size = if rhs_in_place { 0 } else { plan.columns * depth };
    let slots = if plan.chapters[2] == 1 {
        threads
    } else {
        plan.rows.div_ceil(plan.tile_rows) * plan.columns.div_ceil(plan.tile_columns)
    };
    let scratch_size = if direct { 0 } else { slots * plan.tile_rows * plan.tile_columns };

    let body = |memory: *mut u8| {
        let lhs_panels = memory.cast::<T>();
        let rhs_panels = lhs_panels.wrapping_add(lhs_size);
        let job = Job {
            kernels,
            problem,
            plan,
            alpha,
            lhs: Side {
                operand: lhs,
                pack: (kernels.pack)(lhs.dtype),
                in_place: lhs_in_place,
                panels: lhs_panels,
                width: kernel_rows,
                padded: padded_rows,
                unit: kernel_rows.max(kernels.lanes),
            },
            rhs: Side {
                operand: rhs,
                pack: (kernels.pack)(rhs.dtype),
                in_place: rhs_in_place,
                panels: rhs_panels,
                width: plan.panel_columns,
                padded: plan.columns,
                unit: plan.panel_columns,
            },
            scratch: (!direct).then(|| rhs_panels.wrapping_add(rhs_size)),
            drawn: AtomicUsize::new(0),
            done: AtomicUsize::new(0),
            arrived: AtomicUsize::new(0),
        };
        fan_out(threads, &job);
    };
    with_workspace((lhs_size + rhs_size + scratch_size) * bytes, body);
}

/// Lets `threads` threads work on the job; returns when it is done.
fn fan_out<T: Compute>(threads: usize, job: &Job<T>) {
    if threads == 1 {
        job.work();
    } else {
        let half = threads / 2;
        rayon::join(|| fan_out(half, job), || fan_out(threads - half, job));
    }
}

/// An operand and its panels.
struct Side<T> {
    operand: Operand,
    pack: PackFn<T>,
    in_place: bool,
    panels: *mut T,
    /// Lanes of a panel.
    width: usize,
    /// Lanes of a chapter's panels, padding included.
    padded: usize,
    /// Lanes that are packed together, at least.
    unit: usize,
}

/// A chapter: ranges of rows, columns and k.
#[derive(Clone, Copy, Default)]
struct Chapter {
    index: [usize; 3],
    /// Which operands change with it.
    fresh: [bool; 2],
}

/// A phase: packing or computing one chapter.
#[derive(Clone, Copy)]
struct Phase {
    chapter: Chapter,
    packing: bool,
    start: usize,
    len: usize,
}

struct Job<T: 'static> {
    kernels: &'static Kernels<T>,
    problem: Problem,
    plan: Plan,
    alpha: T,
    lhs: Side<T>,
    rhs: Side<T>,
    /// Where tiles are accumulated when the target cannot take them.
    scratch: Option<*mut T>,
    /// Work handed out.
    drawn: AtomicUsize,
    /// Work finished.
    done: AtomicUsize,
    /// Threads that have come.
    arrived: AtomicUsize,
}

// SAFETY: threads write disjoint chunks of the panels, then disjoint tiles of the target or their
// scratch, and a phase begins only after the one before is done (acquire and release on `done`).
unsafe impl<T: Sync> Sync for Job<T> {}

impl<T> Side<T> {
    /// Cuts a chapter of `lanes` x `depth` for packing: chunks of a block, lanes and steps of each.
    fn chunk(&self, lanes: usize, block: usize) -> (usize, usize, usize) {
        if self.operand.lane_stride == 1 {
            let steps = (PACK_ELEMENTS / lanes).clamp(8, block);
            (block.div_ceil(steps), lanes, steps)
        } else {
            let units = (PACK_ELEMENTS / (self.unit * block)).max(1);
            let chunk = units * self.unit;
            (lanes.div_ceil(chunk), chunk, block)
        }
    }
}

impl<T: Compute> Job<T> {
    /// Draws and does work until none is left.
    fn work(&self) {
        let slot = self.arrived.fetch_add(1, Ordering::Relaxed);
        let mut phase = self.phase(Chapter { index: [0; 3], fresh: [true; 2] }, true, 0);
        loop {
            let unit = self.drawn.fetch_add(1, Ordering::Relaxed);
            while unit >= phase.start + phase.len {
                match self.next(phase) {
                    Some(next) => phase = next,
                    None => return,
                }
            }
            let mut patience = 0_u32;
            while self.done.load(Ordering::Acquire) < phase.start {
                patience += 1;
                // The thread that is waited for may need this processor.
                if patience.is_multiple_of(1024) {
                    std::thread::yield_now();
                } else {
                    std::hint::spin_loop();
                }
            }
            let unit = unit - phase.start;
            // SAFETY: each unit is drawn once, and the phases before are done.
            unsafe {
                if phase.packing {
                    self.pack(phase.chapter, unit);
                } else {
                    self.compute(phase.chapter, unit, slot);
                }
            }
            self.done.fetch_add(1, Ordering::Release);
        }
    }

    fn phase(&self, chapter: Chapter, packing: bool, start: usize) -> Phase {
        let [rows, columns, depth] = self.extents(chapter);
        let len = if packing {
            let blocks = depth.div_ceil(self.plan.block);
            let chunks = |side: &Side<T>, fresh: bool, lanes: usize| {
                let needed = fresh && !side.in_place;
                if needed { blocks * side.chunk(lanes, self.plan.block).0 } else { 0 }
            };
            chunks(&self.lhs, chapter.fresh[0], rows) + chunks(&self.rhs, chapter.fresh[1], columns)
        } else {
            rows.div_ceil(self.plan.tile_rows) * columns.div_ceil(self.plan.tile_columns)
        };
        Phase { chapter, packing, start, len }
    }

    fn next(&self, phase: Phase) -> Option<Phase> {
        let start = phase.start + phase.len;
        if phase.packing {
            return Some(self.phase(phase.chapter, false, start));
        }
        // Along k first, so that a tile is finished soon; along columns last.
        let mut index = phase.chapter.index;
        for axis in [2, 0, 1] {
            index[axis] += 1;
            if index[axis] < self.plan.chapters[axis] {
                let old = phase.chapter.index;
                let along_k = index[2] != old[2];
                let fresh = [along_k || index[0] != old[0], along_k || index[1] != old[1]];
                return Some(self.phase(Chapter { index, fresh }, true, start));
            }
            index[axis] = 0;
        }
        None
    }

    /// First row, column and step of a chapter.
    fn origin(&self, chapter: Chapter) -> [usize; 3] {
        let [i, j, p] = chapter.index;
        [i * self.plan.rows, j * self.plan.columns, p * self.plan.depth]
    }

    /// Number of rows, columns and steps of a chapter.
    fn extents(&self, chapter: Chapter) -> [usize; 3] {
        let [i, j, p] = self.origin(chapter);
        let Plan { rows, columns, depth, .. } = self.plan;
        [
            rows.min(self.problem.lhs.lanes - i),
            columns.min(self.problem.rhs.lanes - j),
            depth.min(self.problem.k - p),
        ]
    }

    /// Packs chunk number `unit` of a chapter.
    unsafe fn pack(&self, chapter: Chapter, unit: usize) {
        let [row, column, first_step] = self.origin(chapter);
        let [rows, columns, depth] = self.extents(chapter);
        let block = self.plan.block;
        let blocks = depth.div_ceil(block);
        let lhs_chunks = if chapter.fresh[0] && !self.lhs.in_place {
            blocks * self.lhs.chunk(rows, block).0
        } else {
            0
        };
        let (side, unit, origin, lanes) = if unit < lhs_chunks {
            (&self.lhs, unit, row, rows)
        } else {
            (&self.rhs, unit - lhs_chunks, column, columns)
        };
        let (chunks, chunk_lanes, chunk_steps) = side.chunk(lanes, block);
        let (block_index, chunk) = (unit / chunks, unit % chunks);
        let in_block = block.min(depth - block_index * block);
        let (lane, step) =
            if chunk_lanes == lanes { (0, chunk * chunk_steps) } else { (chunk * chunk_lanes, 0) };
        if step >= in_block {
            return;
        }
        let Operand { data, dtype, lane_stride, step_stride, .. } = side.operand;
        let offset = (origin + lane) as isize * lane_stride
            + (first_step + block_index * block + step) as isize * step_stride;
        let to = block_index * block * side.padded + lane * in_block + step * side.width;
        let strip = Strip {
            from: data.wrapping_offset(offset * dtype.size() as isize),
            step_stride,
            lane_stride,
            depth: chunk_steps.min(in_block - step),
            count: chunk_lanes.min(lanes - lane),
            to: side.panels.wrapping_add(to),
            width: side.width,
            panel_stride: side.width * in_block,
        };
        // SAFETY: the chunk lies within the operand, and its panels within the side's memory: lanes
        // are padded to whole registers there.
        unsafe { (side.pack)(&strip) }
    }

    /// Computes tile number `unit` of a chapter.
    unsafe fn compute(&self, chapter: Chapter, unit: usize, slot: usize) {
        let Job { plan, problem, kernels, .. } = self;
        let target = problem.target;
        let [row, column, first_step] = self.origin(chapter);
        let [rows, columns, depth] = self.extents(chapter);
        let tiles_down = rows.div_ceil(plan.tile_rows);
        let i0 = unit % tiles_down * plan.tile_rows;
        let j0 = unit / tiles_down * plan.tile_columns;
        let (tile_rows, tile_columns) =
            (plan.tile_rows.min(rows - i0), plan.tile_columns.min(columns - j0));
        let (first, last) = (chapter.index[2] == 0, chapter.index[2] + 1 == plan.chapters[2]);
        let add = problem.accum == Accum::Add;

        let place =
            (row + i0) as isize * target.row_stride + (column + j0) as isize * target.column_stride;
        let place = target.data.wrapping_offset(place * target.dtype.size() as isize);
        let (c, c_row) = match self.scratch {
            None => (place.cast::<T>(), target.row_stride),
            Some(scratch) => {
                let slot = if plan.chapters[2] == 1 { slot } else { unit };
                let size = plan.tile_rows * plan.tile_columns;
                (scratch.wrapping_add(slot * size), plan.tile_columns as isize)
            }
        };
        if self.scratch.is_some() && first && add {
            let strip = Strip {
                from: place,
                step_stride: target.row_stride,
                lane_stride: target.column_stride,
                depth: tile_rows,
                count: tile_columns,
                to: c,
                width: plan.tile_columns,
                panel_stride: 0,
            };
            // SAFETY: the tile lies within the target, the scratch is as large as the largest tile.
            unsafe { (kernels.pack)(target.dtype)(&strip) };
        }
        let fused_bias = match problem.bias {
            Bias::Columns(bias) if last && self.scratch.is_none() => {
                bias.cast::<T>().wrapping_add(column + j0)
            }
            _ => std::ptr::null(),
        };

        for start in (0..depth).step_by(plan.block) {
            let steps = plan.block.min(depth - start);
            let (a, a_panel, a_row, a_step) = self.lhs.view(row, i0, first_step, start, steps);
            let (b, b_panel, _, b_step) = self.rhs.view(column, j0, first_step, start, steps);
            let last_block = start + steps == depth;
            for i in (0..tile_rows).step_by(kernels.tiles.len()) {
                let kernel_rows = kernels.tiles.len().min(tile_rows - i);
                for j in (0..tile_columns).step_by(plan.panel_columns) {
                    let kernel_columns = plan.panel_columns.min(tile_columns - j);
                    let vectors = kernel_columns.div_ceil(kernels.lanes);
                    let fuse = last_block && !fused_bias.is_null();
                    let tile = Tile {
                        depth: steps,
                        a: a.wrapping_offset((i / self.lhs.width) as isize * a_panel),
                        a_row,
                        a_step,
                        b: b.wrapping_offset((j / self.rhs.width) as isize * b_panel),
                        b_step,
                        c: c.wrapping_offset(i as isize * c_row).wrapping_add(j),
                        c_row,
                        last_lanes: kernel_columns - (vectors - 1) * kernels.lanes,
                        alpha: self.alpha,
                        add: !first || start > 0 || add,
                        bias: if fuse { fused_bias.wrapping_add(j) } else { std::ptr::null() },
                    };
                    // SAFETY: the pointers lie within panels (or operands) and target (or scratch).
                    unsafe { kernels.tiles[kernel_rows - 1][vectors - 1](&tile) };
                }
            }
        }

        let (bias, bias_row, bias_column) = match problem.bias {
            Bias::None => (std::ptr::null(), 0, 0),
            Bias::Rows(bias) => (bias.wrapping_add((row + i0) * target.dtype.size()), 1, 0),
            Bias::Columns(bias) => (bias.wrapping_add((column + j0) * target.dtype.size()), 0, 1),
        };
        if last && (self.scratch.is_some() || bias_row == 1) {
            let finish = Finish {
                from: c,
                from_row: c_row,
                rows: tile_rows,
                columns: tile_columns,
                to: place,
                row_stride: target.row_stride,
                column_stride: target.column_stride,
                bias,
                bias_row,
                bias_column,
            };
            // SAFETY: the tile lies within the target, its bias within the bias.
            unsafe { (kernels.finish)(target.dtype)(&finish) };
        }
    }
}

impl<T: Compute> Side<T> {
    /// Where the microkernel finds lane `lane` (of the chapter at `origin`) at the block that starts
    /// `start` steps into the chapter: the address, and the strides of panels, lanes and steps.
    fn view(
        &self,
        origin: usize,
        lane: usize,
        first_step: usize,
        start: usize,
        steps: usize,
    ) -> (*const T, isize, isize, isize) {
        if self.in_place {
            let Operand { data, lane_stride, step_stride, .. } = self.operand;
            let offset = (origin + lane) as isize * lane_stride
                + (first_step + start) as isize * step_stride;
            let address = data.cast::<T>().wrapping_offset(offset);
            (address, self.width as isize * lane_stride, lane_stride, step_stride)
        } else {
            let address = self.panels.wrapping_add(start * self.padded + lane * steps);
            (address, (self.width * steps) as isize, 1, self.width as isize)
        }
    }
}
