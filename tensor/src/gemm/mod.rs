//! Matrix multiplication: dst = \[dst +\] alpha * lhs * rhs \[+ bias\].
//!
//! Operands are packed into panels of the accumulator's type. A microkernel holds a microtile of the product in
//! registers while it runs along k (Goto and van de Geijn, "Anatomy of high-performance matrix multiplication", 2008).
//! Five loops surround it, in the symbols of Van Zee and van de Geijn, "BLIS: a framework for rapidly instantiating
//! BLAS functionality", 2015:
//!
//! ```text
//! for each cache block, along k first, then rows, then columns      all threads pack its panels, or each for itself
//!   for each tile of mc x nc                                        one thread: the macrokernel
//!     for each kc of the cache block's k
//!       for each mr of mc                                           a panel of the left operand
//!         for each nr of nc                                         a panel of the right one: the microkernel
//! ```
//!
//! | symbols | what has this size | f32 with AVX-512, at most | where it stays |
//! |---|---|---|---|
//! | mr x nr | microtile | 8 x 48 | registers |
//! | mr x kc | panel of the left operand | 8 x 512, 16 KiB | L1 |
//! | kc x nc | panels of the right operand, for a tile | 512 x 192, 384 KiB | L2 |
//! | mc x nc | tile of the result | 128 x 192 | L2 |
//! | | cache block of an operand | 2048 x 1024, 8 MiB | L3 |
//!
//! Each thread packs the longer operand for itself, a tile's lanes at a time, unless that were too often. They stay in its
//! L2 while it computes the tiles that have them. Panels for all threads go through L3 or from core to core. Where rows are
//! more than columns, each thread begins with a band of rows: the operations before and after give it the same rows.
//!
//! `blocking.rs` chooses the sizes, `scheduler.rs` runs the two outer loops, `macrokernel.rs` the three inner ones. The
//! microkernel applies the epilogue to the last sums: bias and rounding. For small weight gradients, each thread sums other blocks
//! of k (`split_k.rs`). Products of few rows read columns where they lie (`stream.rs`). Products of bf16 in AMX tiles have
//! loops of their own, in `isa/amx/product.rs`, and in `isa/amx/stream.rs` if rows are few.
//!
//! **The bits of an element depend only on its row of `lhs`, its column of `rhs`, k, alpha, what it held before, and
//! the instruction set**: kc is a function of k alone, kc elements are summed in order, and these sums are added in
//! order. Neither the number of threads, nor other rows and columns, nor strides change anything.

mod blocking;
mod compile;
mod copy_rows;
mod driver;
mod isa;
mod kernel;
mod kernel_table;
mod macrokernel;
mod matrix;
mod pack;
mod pack_task;
mod packed_operand;
pub(crate) mod peak;
mod problem;
mod scheduler;
pub(crate) mod small;
mod split_k;
mod stream;
#[cfg(test)]
mod tests;
mod vnni;
pub(crate) mod workspace;

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub(crate) use isa::amx::block as tiles;
pub use matrix::{Accum, MatMut, MatRef};

use crate::{DType, Element, Error, Result, Scalar, ThreadTeam};
use isa::Isa;
use kernel::{Compute, GemmKernels};
use kernel_table::{KernelTable, pair_kernels};
use problem::{Bias, Operand, Problem, Target};

/// Instruction sets that products use on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InstructionSets {
    /// The set for f32, and for f16, whose elements are widened.
    pub f32: &'static str,
    /// The set for two bf16 operands.
    pub bf16: &'static str,
    /// The reason for which a better one that the processor has cannot be used, as a sentence for the user.
    pub refusal: Option<String>,
}

/// Returns the instruction sets that products use on this machine.
pub fn instruction_sets() -> InstructionSets {
    let best = Isa::best();
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    let refusal = isa::amx::permission().refusal();
    #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
    let refusal = None;
    InstructionSets { f32: best.for_f32().name(), bf16: best.name(), refusal }
}

/// Uses no better instruction set than the one of this name in this process, for all kernels: to compare processors on
/// one, or to get the bits of another. To be called before the first tensor; case and hyphens do not matter.
///
/// ```
/// use ferrotron_tensor::gemm::{instruction_sets, limit_instruction_set};
/// limit_instruction_set("portable")?;
/// assert_eq!(instruction_sets().bf16, "portable");
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
///
/// Errors, naming those of this processor, if it has none of this name.
pub fn limit_instruction_set(name: &str) -> Result<()> {
    Isa::limit(name)
}

/// dst = \[dst +\] alpha * lhs * rhs \[+ bias\], summed in the accumulator's type.
///
/// `lhs` is (m, k), `rhs` (k, n), `dst` (m, n), and `bias`, of length n, is added to every row. A
/// 16-bit destination is rounded once. The result does not depend on the number of threads, bitwise.
///
/// ```
/// use ferrotron_tensor::ThreadTeam;
/// use ferrotron_tensor::gemm::{Accum, MatMut, MatRef, gemm};
/// let (lhs, rhs) = ([1.0_f32, 2.0, 3.0, 4.0], [5.0_f32, 6.0, 7.0, 8.0]);
/// let mut dst = [0.0_f32; 4];
/// // SAFETY: three arrays of 2 x 2 elements.
/// unsafe {
///     gemm(
///         ThreadTeam::alone(),
///         MatMut::row_major(dst.as_mut_ptr(), 2, 2),
///         Accum::Replace,
///         1.0,
///         MatRef::row_major(lhs.as_ptr(), 2, 2),
///         MatRef::row_major(rhs.as_ptr(), 2, 2),
///         Some(&[100.0, 200.0]),
///     )?;
/// }
/// assert_eq!(dst, [119.0, 222.0, 143.0, 250.0]);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
///
/// Errors if the dimensions do not fit together, or if there is no memory to pack operands.
///
/// # Safety
/// Every element that a matrix describes must be valid, for reads in `lhs` and `rhs`, for writes in
/// `dst` (and for reads with [`Accum::Add`]). Elements of `dst` must not overlap each other, nor those
/// of the operands or the bias, and no other code may use them meanwhile.
pub unsafe fn gemm<L, R, D>(
    team: &ThreadTeam,
    dst: MatMut<D>,
    accum: Accum,
    alpha: L::Acc,
    lhs: MatRef<L>,
    rhs: MatRef<R>,
    bias: Option<&[D]>,
) -> Result<()>
where
    L: Element,
    R: Element<Acc = L::Acc>,
    D: Element<Acc = L::Acc>,
{
    // SAFETY: the caller's promise, passed on; the level is one that the processor has.
    unsafe { gemm_at(Isa::best(), team, dst, accum, alpha, lhs, rhs, bias) }
}

/// [`gemm`] with a chosen instruction set, which the processor must have.
#[expect(clippy::too_many_arguments, reason = "those of gemm and the level")]
unsafe fn gemm_at<L, R, D>(
    level: Isa,
    team: &ThreadTeam,
    dst: MatMut<D>,
    accum: Accum,
    alpha: L::Acc,
    lhs: MatRef<L>,
    rhs: MatRef<R>,
    bias: Option<&[D]>,
) -> Result<()>
where
    L: Element,
    R: Element<Acc = L::Acc>,
    D: Element<Acc = L::Acc>,
{
    let (m, n, k) = (dst.rows, dst.cols, lhs.cols);
    let bias_len = bias.map(<[D]>::len);
    if (lhs.rows, rhs.cols, rhs.rows, bias_len.unwrap_or(n)) != (m, n, k, n) {
        let (lhs, rhs) = ((lhs.rows, k), (rhs.rows, rhs.cols));
        let message = format!("dst ({m}, {n}), lhs {lhs:?}, rhs {rhs:?}, bias {bias_len:?}");
        return Err(Error::shape("gemm", message));
    }
    if m == 0 || n == 0 {
        return Ok(());
    }
    if k == 0 {
        // SAFETY: `dst` is valid for writes, and for reads when adding.
        unsafe { add_nothing(dst, accum, bias) };
        return Ok(());
    }
    let bf16 = L::DTYPE == DType::BF16 && R::DTYPE == DType::BF16;
    // AMX packs elements into tiles by itself.
    let pairs = (bf16 && !level.has_tiles()).then(|| pair_kernels(level)).flatten();
    let per_step = if pairs.is_some() { vnni::PAIR } else { 1 };
    let problem = Problem {
        k: k.div_ceil(per_step),
        lhs: Operand {
            data: lhs.data.cast(),
            dtype: L::DTYPE,
            lanes: m,
            lane_stride: lhs.row_stride,
            step_stride: lhs.col_stride * per_step as isize,
            elements: k,
            per_step,
        },
        rhs: Operand {
            data: rhs.data.cast(),
            dtype: R::DTYPE,
            lanes: n,
            lane_stride: rhs.col_stride,
            step_stride: rhs.row_stride * per_step as isize,
            elements: k,
            per_step,
        },
        target: Target {
            data: dst.data.cast(),
            dtype: D::DTYPE,
            row_stride: dst.row_stride,
            column_stride: dst.col_stride,
        },
        accum,
        bias: bias.map_or(Bias::None, |bias| Bias::Columns(bias.as_ptr().cast())),
    }
    .oriented();
    let dims = [problem.lhs.lanes, problem.k, problem.rhs.lanes];
    let threads = scheduler::useful_threads(team.threads(), dims);
    // SAFETY: the caller's promise, passed on. The accumulator is named by its dtype.
    unsafe {
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        if bf16 && level.has_tiles() {
            return isa::amx::product::run(team, threads, problem, crate::Real::f64(alpha) as f32);
        }
        if L::Acc::DTYPE == DType::F64 {
            run(f64::kernels(level), team, threads, problem, crate::Real::f64(alpha))
        } else {
            let kernels = pairs.unwrap_or_else(|| f32::kernels(level));
            run(kernels, team, threads, problem, crate::Real::f64(alpha) as f32)
        }
    }
}

/// Computes an oriented problem with so many threads, by blocks of k if that pays. Errors if there is no memory for sums or
/// packed operands.
///
/// # Safety
/// The conditions of [`driver::run`].
unsafe fn run<T: Compute>(
    kernels: &'static GemmKernels<T>,
    team: &ThreadTeam,
    threads: usize,
    problem: Problem,
    alpha: T,
) -> Result<()> {
    // SAFETY: the caller's promise, passed on.
    unsafe {
        match split_k::blocks(&problem, threads, alpha) {
            Some(blocks) => split_k::run(kernels, team, threads, problem, blocks),
            None => driver::run(kernels, team, threads, problem, alpha),
        }
    }
}

/// A product over k = 0: dst = \[dst +\] 0 \[+ bias\].
unsafe fn add_nothing<D: Element>(dst: MatMut<D>, accum: Accum, bias: Option<&[D]>) {
    use crate::Real;
    for i in 0..dst.rows {
        for j in 0..dst.cols {
            let offset = i as isize * dst.row_stride + j as isize * dst.col_stride;
            // SAFETY: an element of `dst`, valid for writes and, when adding, for reads.
            unsafe {
                let element = dst.data.offset(offset);
                let held = if accum == Accum::Add { (*element).acc() } else { D::Acc::ZERO };
                let bias = bias.map_or(D::Acc::ZERO, |bias| bias[j].acc());
                element.write(D::from_acc(held + bias));
            }
        }
    }
}
