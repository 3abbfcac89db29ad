//! Runs a product: a list of work that the threads take from until nothing is left.
//!
//! The list alternates between packing a chapter's panels and computing its tiles. Threads draw
//! numbers from one counter; before its first work of a new phase a thread waits until all work of
//! the phases before is done. Only work that some thread is in the midst of is ever waited for, so
//! nothing can hang, and one thread alone finishes everything if the others are busy elsewhere.

use super::Accum;
use super::kernel::{Compute, Kernels};
use super::plan::{Plan, Size};
use super::problem::{Bias, Problem};
use super::side::{Access, Order, Range, Side};
use super::workspace::with_workspace;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Operations below which another thread is not worth waking.
const OPERATIONS_PER_THREAD: usize = 2 << 20;

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
    let operations = lhs.lanes.saturating_mul(rhs.lanes).saturating_mul(2 * k);
    let threads = threads.clamp(1, 1 + operations / OPERATIONS_PER_THREAD);
    let kernel_rows = kernels.tiles.len();
    let size = Size {
        rows: lhs.lanes,
        columns: rhs.lanes,
        k,
        threads,
        bytes: size_of::<T>(),
        lanes: kernels.lanes,
        kernel_rows,
        kernel_vectors: kernels.vectors(),
    };
    let (order, pack_rows) = match kernels.pack_rows {
        Some(pack) => (Order::Lanes, pack),
        None => (Order::Steps, (kernels.pack)(lhs.dtype)),
    };
    let lhs_access = Access::of_rows::<T>(&lhs, &size, order);
    let rhs_access = Access::of_columns(&rhs, &size, kernels);
    let plan = Plan::new(size, rhs_access == Access::Chapter || lhs_access == Access::Chapter);

    let mut lhs = Side {
        operand: lhs,
        access: lhs_access,
        order,
        pack: pack_rows,
        block: plan.block,
        width: kernel_rows,
        unit: kernel_rows.max(kernels.lanes),
        padded: plan.rows.next_multiple_of(kernel_rows.max(kernels.lanes)),
        panels: std::ptr::null_mut(),
    };
    let mut rhs = Side {
        operand: rhs,
        access: rhs_access,
        order: Order::Steps,
        pack: (kernels.pack)(rhs.dtype),
        block: plan.block,
        width: plan.panel_columns,
        unit: plan.panel_columns,
        padded: plan.columns,
        panels: std::ptr::null_mut(),
    };
    let contiguous = target.column_stride == 1 || rhs.operand.lanes == 1;
    let direct = target.dtype == T::DTYPE && contiguous;
    let stores_result = contiguous && !matches!(problem.bias, Bias::Rows(_));
    let needs_sums = problem.accum == Accum::Add || k > plan.block || !stores_result;
    let slots = if plan.chapters[2] == 1 { threads } else { plan.tiles(plan.rows, plan.columns) };
    let tile_elements = plan.tile_rows * plan.tile_columns;
    let scratch_elements = if direct || !needs_sums { 0 } else { slots * tile_elements };
    let lhs_elements = lhs.panel_elements(plan.depth, threads);
    let rhs_elements = rhs.panel_elements(plan.depth, threads);

    with_workspace((lhs_elements + rhs_elements + scratch_elements) * size.bytes, |memory| {
        lhs.panels = memory.cast::<T>();
        rhs.panels = lhs.panels.wrapping_add(lhs_elements);
        let scratch = (!direct).then(|| rhs.panels.wrapping_add(rhs_elements));
        let counters = [const { AtomicUsize::new(0) }; 3];
        let [drawn, done, arrived] = counters;
        let job = Job {
            kernels,
            problem,
            plan,
            alpha,
            lhs,
            rhs,
            scratch,
            stores_result,
            drawn,
            done,
            arrived,
        };
        fan_out(threads, &job);
    });
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

/// A product and the state of its computation.
pub(super) struct Job<T: 'static> {
    pub kernels: &'static Kernels<T>,
    pub problem: Problem,
    pub plan: Plan,
    pub alpha: T,
    pub lhs: Side<T>,
    pub rhs: Side<T>,
    /// Where tiles are accumulated when the target cannot take sums; without room where all is one block.
    pub scratch: Option<*mut T>,
    /// Whether the microkernel writes the last block's sums to the target, with the bias.
    pub stores_result: bool,
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

/// A chapter: its numbers along rows, columns and k.
#[derive(Clone, Copy)]
struct Chapter {
    index: [usize; 3],
    /// Whether rows and columns differ from those of the chapter before.
    fresh: [bool; 2],
}

/// Packing or computing one chapter.
#[derive(Clone, Copy)]
struct Phase {
    chapter: Chapter,
    packing: bool,
    /// Number of its first work in the list, and how much there is.
    start: usize,
    len: usize,
}

impl<T: Compute> Job<T> {
    /// Draws and does work until none is left.
    fn work(&self) {
        let thread = self.arrived.fetch_add(1, Ordering::Relaxed);
        let mut phase = self.phase(Chapter { index: [0; 3], fresh: [true; 2] }, true, 0);
        loop {
            let number = self.drawn.fetch_add(1, Ordering::Relaxed);
            while number >= phase.start + phase.len {
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
            // SAFETY: each number is drawn once, and the phases before are done.
            unsafe { self.perform(phase, number - phase.start, thread) };
            self.done.fetch_add(1, Ordering::Release);
        }
    }

    /// Does work number `number` of a phase.
    ///
    /// # Safety
    /// The phases before are done, and nobody else does this work.
    unsafe fn perform(&self, phase: Phase, number: usize, thread: usize) {
        let [rows, columns] = self.ranges(phase.chapter);
        let [.., k] = phase.chapter.index;
        // SAFETY: the ranges lie within the operands; otherwise the caller's promise.
        unsafe {
            if !phase.packing {
                let ends = [k == 0, k + 1 == self.plan.chapters[2]];
                self.compute(rows, columns, ends, number, thread);
                return;
            }
            let of_rows = if phase.chapter.fresh[0] { self.lhs.chunks(rows) } else { 0 };
            if number < of_rows {
                self.lhs.pack_chunk(rows, number);
            } else {
                self.rhs.pack_chunk(columns, number - of_rows);
            }
        }
    }

    fn phase(&self, chapter: Chapter, packing: bool, start: usize) -> Phase {
        let [rows, columns] = self.ranges(chapter);
        let len = if packing {
            let of_rows = if chapter.fresh[0] { self.lhs.chunks(rows) } else { 0 };
            let of_columns = if chapter.fresh[1] { self.rhs.chunks(columns) } else { 0 };
            of_rows + of_columns
        } else {
            self.plan.tiles(rows.lanes, columns.lanes)
        };
        Phase { chapter, packing, start, len }
    }

    fn next(&self, phase: Phase) -> Option<Phase> {
        let start = phase.start + phase.len;
        if phase.packing {
            return Some(self.phase(phase.chapter, false, start));
        }
        // Along k first, so that a tile is finished soon; along columns last.
        let old = phase.chapter.index;
        let mut index = old;
        for axis in [2, 0, 1] {
            index[axis] += 1;
            if index[axis] < self.plan.chapters[axis] {
                let along_k = index[2] != old[2];
                let fresh = [along_k || index[0] != old[0], along_k || index[1] != old[1]];
                return Some(self.phase(Chapter { index, fresh }, true, start));
            }
            index[axis] = 0;
        }
        None
    }

    /// The part of each operand that belongs to a chapter.
    fn ranges(&self, chapter: Chapter) -> [Range; 2] {
        let Plan { rows, columns, depth, .. } = self.plan;
        let [i, j, p] = chapter.index;
        let step = p * depth;
        let steps = depth.min(self.problem.k - step);
        let range = |lane: usize, most: usize, total: usize| {
            let lanes = most.min(total - lane);
            Range { lane, lanes, step, steps }
        };
        [
            range(i * rows, rows, self.problem.lhs.lanes),
            range(j * columns, columns, self.problem.rhs.lanes),
        ]
    }
}
