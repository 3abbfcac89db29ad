//! AVX512-BF16: pairs of bf16 products in the registers of the AVX-512 kernels.

use crate::gemm::isa::avx512::{F32, F32x16};
use crate::gemm::isa::vector::Vector;
use crate::gemm::kernel::{GemmKernels, MicroTile, Multiply, StoredColumns, TileFn};
use crate::gemm::pack_task::PackTask;
use crate::gemm::vnni;
use crate::numeric::simd::{with_avx512, with_avx512_bf16};
use std::arch::x86_64::*;
use std::mem::transmute;

struct Pairs;

impl Multiply<F32x16> for Pairs {
    #[inline(always)]
    unsafe fn multiply_add(factor: F32x16, column: F32x16, sum: F32x16) -> F32x16 {
        // SAFETY: the processor has AVX512-BF16, and registers of equal size hold any bits.
        F32x16(unsafe {
            let pairs = |words: F32x16| transmute::<__m512, __m512bh>(words.0);
            _mm512_dpbf16_ps(sum.0, pairs(factor), pairs(column))
        })
    }
}

with_avx512_bf16! { enabled!
    unsafe fn tile<const R: usize, const N: usize>(tile: &MicroTile<f32>) {
        // SAFETY: the caller's promise, passed on.
        unsafe { crate::gemm::kernel::tile::<F32x16, Pairs, R, N>(tile) }
    }
}

with_avx512_bf16! { enabled!
    unsafe fn stream<const R: usize>(tile: &MicroTile<f32>, columns: &StoredColumns) {
        // SAFETY: the caller's promise, passed on.
        unsafe { crate::gemm::stream::stream::<F32x16, Pairs, f32, R>(tile, columns) }
    }
}

with_avx512_bf16! { enabled!
    unsafe fn multiply(times: usize) -> usize {
        // SAFETY: the caller's promise, passed on.
        unsafe { crate::gemm::kernel::multiply::<F32x16, Pairs>(times) }
    }
}

with_avx512! { enabled!
    pub(in crate::gemm) unsafe fn pack(task: &PackTask<f32>) {
        // SAFETY: the caller's promise, passed on.
        unsafe { vnni::pack::<F32x16>(task, interleave) }
    }
}

with_avx512! { enabled!
    /// Packs words whose lanes lie together: two rows become one.
    pub(in crate::gemm) unsafe fn interleave(task: &PackTask<f32>) {
        let PackTask { step_stride, depth, elements, count, to, width, panel_stride, .. } = *task;
        let from = task.from.cast::<u16>();
        for lane in (0..count).step_by(F32x16::LANES) {
            let mask = (0xffff_u32 >> (16 - (count - lane).min(16))) as __mmask16;
            let mut from = from.wrapping_add(lane);
            let mut to = to.wrapping_add(lane / width * panel_stride + lane % width);
            for step in 0..depth {
                // SAFETY: masked lanes lie within the operand, and panels have room for whole registers.
                unsafe {
                    let row = |at: *const u16| {
                        _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, at.cast()))
                    };
                    let mut words = row(from);
                    if vnni::PAIR * step + 1 < elements {
                        let upper = row(from.wrapping_offset(step_stride / 2));
                        words = _mm512_or_si512(words, _mm512_slli_epi32::<16>(upper));
                    }
                    let words = F32x16(_mm512_castsi512_ps(words));
                    if width < F32x16::LANES {
                        words.store_halves(to, to.add(panel_stride));
                    } else {
                        words.store(to);
                    }
                }
                from = from.wrapping_offset(step_stride);
                to = to.wrapping_add(width);
            }
        }
    }
}

const fn row<const R: usize>() -> &'static [TileFn<f32>] {
    &[tile::<R, 1>, tile::<R, 2>, tile::<R, 3>]
}

/// Kernels for words of two bf16 elements.
pub(in crate::gemm) static PAIRS: GemmKernels<f32> = GemmKernels {
    tiles: &[
        row::<1>(),
        row::<2>(),
        row::<3>(),
        row::<4>(),
        row::<5>(),
        row::<6>(),
        row::<7>(),
        row::<8>(),
    ],
    stream: |_| {
        &[
            stream::<1>,
            stream::<2>,
            stream::<3>,
            stream::<4>,
            stream::<5>,
            stream::<6>,
            stream::<7>,
            stream::<8>,
        ]
    },
    pack: |_| pack,
    multiply,
    ..F32
};
