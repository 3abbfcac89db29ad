//! Split-K: threads sum different blocks of k, and then add the sums of an element in the order of its blocks.
//!
//! A weight gradient sums over tokens. In a small model, much of its time goes to reading tokens that another core has written.
//! Here each thread begins with a run of tokens, as in the operations before, and only sums go from core to core. Blocks are the
//! kc steps of every product, so the result has the same bits. One exception: a block's sum that underflows to -0 is added as 0,
//! which shows if all else is -0 too.

use super::Accum;
use super::blocking::kc_steps;
use super::driver;
use super::kernel::{Compute, GemmKernels};
use super::problem::{Bias, Operand, Problem};
use super::scheduler::{self, CacheBlock, Work};
use super::workspace::with_workspace;
use crate::numeric::real::add;
use crate::{Error, Result, ThreadTeam};
use std::sync::{Mutex, PoisonError};

/// Bytes of waiting sums, at most: they stay in L2.
const WAITING_BYTES: usize = 512 << 10;
/// Pieces of a block, along the longer side of the target: a thread that is done takes over one of another's.
const PIECES: usize = 2;
/// Pieces begin at multiples of so many lanes.
const GRAIN: usize = 16;
/// Bands of rows in which waiting sums are added, for each thread.
const BANDS_PER_THREAD: usize = 2;

/// A product and the sums of its blocks.
struct SplitK<T: 'static> {
    kernels: &'static GemmKernels<T>,
    problem: Problem,
    kc: usize,
    blocks: usize,
    bands: usize,
    /// The sums of each block but the first, one matrix after the other.
    waiting: *mut T,
    /// The error of a piece.
    error: Mutex<Option<Error>>,
}

// SAFETY: threads write different pieces of the target or of the waiting sums, and then different rows of the target.
unsafe impl<T: Sync> Sync for SplitK<T> {}

/// Blocks of k into which threads split an oriented problem. None if it is not a small sum over rows of both operands, without
/// alpha and bias, into a target of the accumulator's type.
pub(super) fn blocks<T: Compute>(problem: &Problem, threads: usize, alpha: T) -> Option<usize> {
    let Problem { k, lhs, rhs, target, .. } = *problem;
    if threads == 1 {
        return None;
    }
    let blocks = k.div_ceil(kc_steps(k, size_of::<T>()));
    let sums = (blocks - 1).saturating_mul(lhs.lanes).saturating_mul(rhs.lanes);
    let over_rows = [lhs, rhs].iter().all(|side| side.per_step == 1 && side.lane_stride == 1);
    let holds_sums = target.dtype == T::DTYPE && target.column_stride == 1;
    let adds_sums = alpha == T::ONE && matches!(problem.bias, Bias::None);
    let shared = blocks.is_multiple_of(threads)
        && scheduler::useful_threads(blocks, [lhs.lanes, k, rhs.lanes]) == blocks;
    let small = sums.saturating_mul(size_of::<T>()) <= WAITING_BYTES;
    (over_rows && holds_sums && adds_sums && shared && small).then_some(blocks)
}

/// Computes an oriented problem in [`blocks`] of k. Errors if there is no memory for sums or packed operands.
///
/// # Safety
/// The conditions of [`driver::run`].
pub(super) unsafe fn run<T: Compute>(
    kernels: &'static GemmKernels<T>,
    team: &ThreadTeam,
    threads: usize,
    problem: Problem,
    blocks: usize,
) -> Result<()> {
    let [rows, columns] = [problem.lhs.lanes, problem.rhs.lanes];
    let kc = kc_steps(problem.k, size_of::<T>());
    with_workspace((blocks - 1) * rows * columns * size_of::<T>(), |memory| {
        let bands = (BANDS_PER_THREAD * threads).min(rows);
        let (waiting, error) = (memory.cast::<T>(), Mutex::default());
        let work = SplitK { kernels, problem, kc, blocks, bands, waiting, error };
        // SAFETY: pieces of one phase touch different memory.
        unsafe { scheduler::run(team, threads, &work) };
        let error = work.error.into_inner().unwrap_or_else(PoisonError::into_inner);
        error.map_or(Ok(()), Err)
    })?
}

/// The first cache block stands for the sums, the second one for their addition.
impl<T: Compute> Work for SplitK<T> {
    fn cache_blocks(&self) -> [usize; 3] {
        [1, 1, 2]
    }

    fn packing_pieces(&self, _: CacheBlock) -> usize {
        0
    }

    fn computing_pieces(&self, block: CacheBlock) -> usize {
        if block.index[2] == 0 { self.blocks * PIECES } else { self.bands }
    }

    unsafe fn pack(&self, _: CacheBlock, _: usize) {}

    unsafe fn compute(&self, block: CacheBlock, number: usize, _: usize) {
        // SAFETY: the caller's promise, passed on.
        unsafe {
            let error = || self.error.lock().unwrap_or_else(PoisonError::into_inner);
            if block.index[2] == 0 {
                if let Err(failed) = self.sum(number / PIECES, number % PIECES) {
                    *error() = Some(failed);
                }
            } else if error().is_none() {
                self.add(number);
            }
        }
    }
}

impl<T: Compute> SplitK<T> {
    /// The waiting sums of a block after the first.
    fn waiting(&self, block: usize) -> *mut T {
        let Problem { lhs, rhs, .. } = self.problem;
        self.waiting.wrapping_add((block - 1) * lhs.lanes * rhs.lanes)
    }

    /// Sums a piece of a block of k: into the target, or as sums that wait.
    unsafe fn sum(&self, block: usize, piece: usize) -> Result<()> {
        let mut problem = self.problem;
        let [rows, columns] = [problem.lhs.lanes, problem.rhs.lanes];
        let step = block * self.kc;
        problem.k = self.kc.min(problem.k - step);
        if block > 0 {
            problem.target.data = self.waiting(block).cast();
            problem.target.row_stride = columns as isize;
            problem.accum = Accum::Replace;
        }
        let start = |piece: usize, lanes: usize| match piece {
            PIECES => lanes,
            _ => piece * lanes / PIECES / GRAIN * GRAIN,
        };
        let [first, end] = [piece, piece + 1].map(|piece| start(piece, rows.max(columns)));
        if first == end {
            return Ok(());
        }
        let part = |operand: Operand, first: usize, lanes: usize| Operand {
            data: operand.at(first, step),
            lanes,
            elements: problem.k,
            ..operand
        };
        if rows > columns {
            problem.target.data = problem.target.at(first, 0);
            problem.lhs = part(problem.lhs, first, end - first);
            problem.rhs = part(problem.rhs, 0, columns);
        } else {
            problem.target.data = problem.target.at(0, first);
            problem.lhs = part(problem.lhs, 0, rows);
            problem.rhs = part(problem.rhs, first, end - first);
        }
        // The piece is oriented as the whole is: where a side is cut, it keeps at least as many lanes as fill vectors.
        // SAFETY: the piece lies within the operands and the target or the sums, which are this thread's.
        unsafe { driver::run(self.kernels, ThreadTeam::alone(), 1, problem, T::ONE) }
    }

    /// Adds the waiting sums of a band of rows to the target.
    unsafe fn add(&self, band: usize) {
        let Problem { lhs, rhs, target, .. } = self.problem;
        let columns = rhs.lanes;
        let [first, end] = [band, band + 1].map(|band| band * lhs.lanes / self.bands);
        for row in first..end {
            // SAFETY: the band is this thread's, and all blocks are summed.
            unsafe {
                let to = std::slice::from_raw_parts_mut(target.at(row, 0).cast::<T>(), columns);
                for block in 1..self.blocks {
                    let sums = self.waiting(block).wrapping_add(row * columns);
                    add(to, std::slice::from_raw_parts(sums, columns));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::isa::Isa;
    use crate::gemm::problem::Target;
    use crate::gemm::{MatMut, MatRef, gemm_at};
    use crate::{DType, Element, Real, Scalar, f16};

    /// A product of (k, m)^T and (k, n), both in rows of `S`.
    fn problem<S: Element>([m, k, n]: [usize; 3]) -> Problem {
        let operand = |lanes: usize| Operand {
            data: std::ptr::null(),
            dtype: S::DTYPE,
            lanes,
            lane_stride: 1,
            step_stride: lanes as isize,
            elements: k,
            per_step: 1,
        };
        let (data, dtype) = (std::ptr::null_mut(), S::Acc::DTYPE);
        let target = Target { data, dtype, row_stride: n as isize, column_stride: 1 };
        let (lhs, rhs) = (operand(m), operand(n));
        Problem { k, lhs, rhs, target, accum: Accum::Add, bias: Bias::None }
    }

    #[test]
    fn small_sums_over_tokens_are_split() {
        let blocks = |dims, threads| blocks::<f32>(&problem::<f32>(dims), threads, 1.0);
        assert_eq!(blocks([128, 768, 512], 2), Some(2));
        assert_eq!(blocks([512, 768, 128], 2), Some(2));
        assert_eq!(blocks([128, 2048, 128], 4), Some(4));
        // Threads without a block, one block, large weights, little work.
        assert_eq!(blocks([128, 768, 512], 3), None);
        assert_eq!(blocks([128, 768, 512], 1), None);
        assert_eq!(blocks([128, 512, 512], 2), None);
        assert_eq!(blocks([768, 1024, 3072], 2), None);
        assert_eq!(blocks([8, 1024, 8], 2), None);
        assert_eq!(blocks([1 << 62, 1024, 8], 2), None);
        // Products that are no plain sums over rows.
        let is_split = |problem: Problem, alpha: f32| super::blocks(&problem, 2, alpha).is_some();
        let plain = problem::<f32>([128, 768, 512]);
        let apart = Operand { lane_stride: 768, step_stride: 1, ..plain.rhs };
        assert!(is_split(plain, 1.0) && !is_split(plain, 0.5));
        assert!(!is_split(Problem { rhs: apart, ..plain }, 1.0));
        let half = Target { dtype: DType::BF16, ..plain.target };
        assert!(!is_split(Problem { target: half, ..plain }, 1.0));
        assert!(!is_split(Problem { bias: Bias::Columns(std::ptr::null()), ..plain }, 1.0));
    }

    /// Compares a sum over rows of `S` on so many threads with that on one.
    fn check<S: Element<Acc: Compute>>(level: Isa, dims: [usize; 3], threads: usize, accum: Accum) {
        assert!(blocks::<S::Acc>(&problem::<S>(dims), threads, S::Acc::ONE).is_some(), "{dims:?}");
        let [m, k, n] = dims;
        // Every order of their sums rounds differently.
        let numbers = |len: usize, step: usize| -> Vec<S::Acc> {
            (0..len).map(|i| S::Acc::from_f64((i * step % 1009) as f64 / 1009.0 - 0.4)).collect()
        };
        let operand = |len: usize, step: usize| -> Vec<S> {
            numbers(len, step).into_iter().map(S::from_acc).collect()
        };
        let (lhs, rhs) = (operand(k * m, 7), operand(k * n, 11));
        let product = |threads: usize| {
            // Rows of the target lie apart.
            let (mut dst, team) = (numbers(m * (n + 3), 13), ThreadTeam::new(threads).unwrap());
            let to = MatMut { cols: n, ..MatMut::row_major(dst.as_mut_ptr(), m, n + 3) };
            let a = MatRef::row_major(lhs.as_ptr(), k, m).transposed();
            let b = MatRef::row_major(rhs.as_ptr(), k, n);
            // SAFETY: the vectors hold the matrices, and the instruction set is here.
            unsafe { gemm_at(level, &team, to, accum, S::Acc::ONE, a, b, None) }.unwrap();
            dst.iter().map(|x| x.f64().to_bits()).collect::<Vec<_>>()
        };
        let same = product(threads) == product(1);
        assert!(same, "{level:?} {} {dims:?} {accum:?}: {threads} threads", S::DTYPE);
    }

    #[test]
    fn split_sums_have_the_bits_of_whole_ones() {
        // Longer in either direction, ragged, few rows, and two blocks for each thread.
        let sizes = [
            ([128, 768, 512], 2),
            ([512, 770, 45], 2),
            ([150, 1500, 33], 3),
            ([7, 1000, 700], 2),
            ([40, 1600, 64], 2),
        ];
        for level in Isa::available() {
            for (dims, threads) in sizes {
                for accum in [Accum::Replace, Accum::Add] {
                    check::<f32>(level, dims, threads, accum);
                    check::<f16>(level, dims, threads, accum);
                }
            }
            check::<f64>(level, [150, 750, 33], 3, Accum::Add);
            check::<f64>(level, [96, 500, 128], 2, Accum::Replace);
        }
    }
}
