//! Runs a product with the microkernels that read panels of accumulators or words of pairs. Sets up its operands,
//! blocking and scratch, and hands the work to the scheduler.

use super::Accum;
use super::blocking::{CacheBlocking, GemmShape};
use super::kernel::{Compute, GemmKernels};
use super::macrokernel::GemmTask;
use super::packed_operand::{Access, PackedOperand, Range};
use super::problem::{Bias, Problem};
use super::scheduler::{self, CacheBlock, Work};
use super::workspace::with_workspace;
use crate::Result;

/// Computes the problem with up to `threads` threads of the current rayon pool. Errors if there is no memory for
/// packed operands.
///
/// # Safety
/// Data and strides describe valid, non-overlapping memory; the processor has the instruction set
/// of the kernels.
pub(super) unsafe fn run<T: Compute>(
    kernels: &'static GemmKernels<T>,
    threads: usize,
    problem: Problem,
    alpha: T,
) -> Result<()> {
    let problem = problem.oriented();
    let Problem { k, lhs, rhs, target, .. } = problem;
    let threads = scheduler::useful_threads(threads, [lhs.lanes, k, rhs.lanes]);
    let mr = kernels.tiles.len();
    let mut size = GemmShape {
        rows: lhs.lanes,
        columns: rhs.lanes,
        k,
        threads,
        bytes: size_of::<T>(),
        lanes: kernels.lanes,
        mr,
        vectors: kernels.vectors(),
    };
    let lhs_access = Access::for_rows::<T>(&lhs, &size);
    let rhs_access = Access::for_columns(&rhs, &size, kernels);
    let streamed = rhs_access == Access::Streamed;
    if streamed {
        size.vectors = 1;
    }
    let plan = CacheBlocking::new(
        size,
        !streamed && [lhs_access, rhs_access].contains(&Access::PackedShared),
    );

    let mut lhs = PackedOperand {
        operand: lhs,
        access: lhs_access,
        pack: (kernels.pack)(lhs.dtype),
        kc: plan.kc,
        width: mr,
        unit: mr.max(kernels.lanes),
        padded: plan.rows.next_multiple_of(mr.max(kernels.lanes)),
        panels: std::ptr::null_mut(),
    };
    let mut rhs = PackedOperand {
        operand: rhs,
        access: rhs_access,
        pack: (kernels.pack)(rhs.dtype),
        kc: plan.kc,
        width: plan.nr,
        unit: plan.nr,
        padded: plan.columns,
        panels: std::ptr::null_mut(),
    };
    let contiguous = target.column_stride == 1 || rhs.operand.lanes == 1;
    let direct = target.dtype == T::DTYPE && contiguous;
    let stores_result = contiguous && !matches!(problem.bias, Bias::Rows(_));
    let needs_sums = problem.accum == Accum::Add || k > plan.kc || !stores_result;
    let slots =
        if plan.cache_blocks[2] == 1 { threads } else { plan.tiles(plan.rows, plan.columns) };
    let tile_elements = plan.mc * plan.nc;
    let scratch_elements = if direct || !needs_sums { 0 } else { slots * tile_elements };
    let lhs_elements = lhs.panel_elements(plan.depth, threads);
    let rhs_elements = rhs.panel_elements(plan.depth, threads);

    with_workspace((lhs_elements + rhs_elements + scratch_elements) * size.bytes, |memory| {
        lhs.panels = memory.cast::<T>();
        rhs.panels = lhs.panels.wrapping_add(lhs_elements);
        let scratch = (!direct).then(|| rhs.panels.wrapping_add(rhs_elements));
        let job = GemmTask { kernels, problem, plan, alpha, lhs, rhs, scratch, stores_result };
        // SAFETY: threads write disjoint chunks of the panels, then disjoint tiles.
        unsafe { scheduler::run(threads, &job) };
    })
}

impl<T: Compute> Work for GemmTask<T> {
    fn cache_blocks(&self) -> [usize; 3] {
        self.plan.cache_blocks
    }

    fn packing_pieces(&self, block: CacheBlock) -> usize {
        let [rows, columns] = self.ranges(block);
        let of_columns = if block.fresh[1] { self.rhs.chunks(columns) } else { 0 };
        self.row_chunks(block, rows) + of_columns
    }

    fn computing_pieces(&self, block: CacheBlock) -> usize {
        let [rows, columns] = self.ranges(block);
        self.plan.tiles(rows.lanes, columns.lanes)
    }

    unsafe fn pack(&self, block: CacheBlock, number: usize) {
        let [rows, columns] = self.ranges(block);
        let of_rows = self.row_chunks(block, rows);
        // SAFETY: the ranges lie within the operands; otherwise the caller's promise.
        unsafe {
            if number < of_rows {
                self.lhs.pack_chunk(rows, number);
            } else {
                self.rhs.pack_chunk(columns, number - of_rows);
            }
        }
    }

    unsafe fn compute(&self, block: CacheBlock, number: usize, thread: usize) {
        let [rows, columns] = self.ranges(block);
        let [.., k] = block.index;
        let ends = [k == 0, k + 1 == self.plan.cache_blocks[2]];
        // SAFETY: the caller's promise, passed on.
        unsafe { self.compute_tile(rows, columns, ends, number, thread) };
    }
}

impl<T: Compute> GemmTask<T> {
    fn row_chunks(&self, block: CacheBlock, rows: Range) -> usize {
        if block.fresh[0] { self.lhs.chunks(rows) } else { 0 }
    }

    /// The part of each operand that belongs to a cache block.
    fn ranges(&self, block: CacheBlock) -> [Range; 2] {
        let CacheBlocking { rows, columns, depth, .. } = self.plan;
        let [i, j, p] = block.index;
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
