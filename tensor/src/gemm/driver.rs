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
use crate::{Result, ThreadTeam};
use std::sync::atomic::AtomicUsize;

/// Computes an oriented problem with so many threads of a team. Errors if there is no memory for packed operands.
///
/// # Safety
/// Data and strides describe valid, non-overlapping memory; the processor has the instruction set
/// of the kernels.
pub(super) unsafe fn run<T: Compute>(
    kernels: &'static GemmKernels<T>,
    team: &ThreadTeam,
    threads: usize,
    problem: Problem,
    alpha: T,
) -> Result<()> {
    let Problem { k, lhs, rhs, target, .. } = problem;
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
    let mut lhs_access = Access::for_rows::<T>(&lhs, &size);
    let mut rhs_access = Access::for_columns(&rhs, &size, kernels);
    let streamed = rhs_access == Access::Streamed;
    if streamed {
        size.vectors = 1;
    }
    let packed = [lhs_access, rhs_access].map(|access| !streamed && access == Access::PackedShared);
    let plan = CacheBlocking::new(size, packed);
    if let Some(own) = plan.own {
        *[&mut lhs_access, &mut rhs_access][own] = Access::PackedPerTile;
    }
    // Lanes that are packed at a time.
    let rows = if plan.own == Some(0) { plan.mc } else { plan.rows };
    let columns = if plan.own == Some(1) { plan.nc } else { plan.columns };

    let mut lhs = PackedOperand {
        operand: lhs,
        access: lhs_access,
        pack: (kernels.pack)(lhs.dtype),
        kc: plan.kc,
        width: mr,
        unit: mr.max(kernels.lanes),
        padded: rows.next_multiple_of(mr.max(kernels.lanes)),
        panels: std::ptr::null_mut(),
    };
    let mut rhs = PackedOperand {
        operand: rhs,
        access: rhs_access,
        pack: (kernels.pack)(rhs.dtype),
        kc: plan.kc,
        width: plan.nr,
        unit: plan.nr,
        padded: columns,
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
        let held = (0..threads).map(|_| AtomicUsize::new(usize::MAX)).collect();
        let job =
            GemmTask { kernels, problem, plan, alpha, lhs, rhs, scratch, stores_result, held };
        // SAFETY: threads write disjoint chunks of the panels, then disjoint tiles.
        unsafe { scheduler::run(team, threads, &job) };
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

#[cfg(test)]
mod tests {
    use crate::ThreadTeam;
    use crate::gemm::isa::Isa;
    use crate::gemm::{Accum, MatMut, MatRef, gemm_at};

    /// Sums of whole numbers below 2^24, so that every order has the same bits.
    #[test]
    fn operands_that_each_thread_packs_for_itself_are_those_of_the_product() {
        let (m, k, n) = (601, 70, 521);
        let numbers = |len: usize, step: usize| -> Vec<f32> {
            (0..len).map(|i| (i * step % 23) as f32 - 11.0).collect()
        };
        let (a, b) = (numbers(m * k, 7), numbers(k * n, 5));
        let mut want = numbers(m * n, 3);
        for (i, row) in want.chunks_exact_mut(n).enumerate() {
            for (j, sum) in row.iter_mut().enumerate() {
                *sum += (0..k).map(|p| a[i * k + p] * b[p * n + j]).sum::<f32>();
            }
        }
        let turned = |from: &[f32], rows: usize, columns: usize| -> Vec<f32> {
            (0..from.len()).map(|i| from[i % rows * columns + i / rows]).collect()
        };
        let (a_turned, b_turned) = (turned(&a, m, k), turned(&b, k, n));
        let lhs = [
            MatRef::row_major(a.as_ptr(), m, k),
            MatRef::row_major(a_turned.as_ptr(), k, m).transposed(),
        ];
        let rhs = [
            MatRef::row_major(b.as_ptr(), k, n),
            MatRef::row_major(b_turned.as_ptr(), n, k).transposed(),
        ];
        for isa in Isa::available() {
            for threads in [1, 2, 5] {
                let team = ThreadTeam::new(threads).unwrap();
                for (i, j) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                    let mut got = numbers(m * n, 3);
                    let (target, lhs, rhs) =
                        (MatMut::row_major(got.as_mut_ptr(), m, n), lhs[i], rhs[j]);
                    // SAFETY: vectors of the sizes of the matrices, and an instruction set that is here.
                    unsafe { gemm_at(isa, &team, target, Accum::Add, 1.0, lhs, rhs, None) }
                        .unwrap();
                    assert_eq!(got, want, "{isa:?}, {threads} threads, operands {i} {j}");
                }
            }
        }
    }
}
