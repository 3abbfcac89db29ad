//! AVX2 with FMA and F16C: 4 rows by 24 (f32) or 12 (f64) columns in 12 of the 16 registers.

use crate::gemm::isa::vector::{Steps, TileLoop, Vector};
use crate::{DType, Element};
use std::arch::asm;
use std::arch::x86_64::*;

#[derive(Clone, Copy)]
struct F32x8(__m256);

#[derive(Clone, Copy)]
struct F64x4(__m256d);

impl Vector for F32x8 {
    type Scalar = f32;
    type Mask = __m256i;
    type Square = [Self; 8];
    const LANES: usize = 8;
    const FREE_MASKS: bool = false;
    const LOOPS: &'static [TileLoop<Self>] =
        &[TileLoop { rows: 4, vectors: 3, run: tile_loop_f32 }];

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: the processor has AVX2, as for every function here.
        F32x8(unsafe { _mm256_set1_ps(value) })
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller vouches for the lanes.
        F32x8(unsafe { _mm256_loadu_ps(from) })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller vouches for the lanes.
        unsafe { _mm256_storeu_ps(to, self.0) }
    }
    #[inline(always)]
    unsafe fn first(count: usize) -> __m256i {
        // SAFETY: arithmetic only.
        unsafe {
            let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            _mm256_cmpgt_epi32(_mm256_set1_epi32(count as i32), lanes)
        }
    }
    #[inline(always)]
    unsafe fn load_first(from: *const f32, mask: __m256i) -> Self {
        // SAFETY: the caller vouches for the masked lanes, others are not read.
        F32x8(unsafe { _mm256_maskload_ps(from, mask) })
    }
    #[inline(always)]
    unsafe fn store_first(self, to: *mut f32, mask: __m256i) {
        // SAFETY: the caller vouches for the masked lanes, others are not written.
        unsafe { _mm256_maskstore_ps(to, mask, self.0) }
    }
    #[inline(always)]
    unsafe fn store_halves(self, low: *mut f32, high: *mut f32) {
        // SAFETY: the caller vouches for four elements each.
        unsafe {
            _mm_storeu_ps(low, _mm256_castps256_ps128(self.0));
            _mm_storeu_ps(high, _mm256_extractf128_ps::<1>(self.0));
        }
    }
    #[inline(always)]
    unsafe fn join_halves(self, other: Self) -> [Self; 2] {
        // SAFETY: arithmetic only.
        unsafe {
            [
                F32x8(_mm256_permute2f128_ps::<0x20>(self.0, other.0)),
                F32x8(_mm256_permute2f128_ps::<0x31>(self.0, other.0)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
        // SAFETY: arithmetic only.
        F32x8(unsafe { _mm256_fmadd_ps(self.0, factor.0, addend.0) })
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: arithmetic only.
        F32x8(unsafe { _mm256_add_ps(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn square() -> [Self; 8] {
        // SAFETY: arithmetic only.
        [F32x8(unsafe { _mm256_setzero_ps() }); 8]
    }
    #[inline(always)]
    unsafe fn transpose(square: &mut [Self; 8]) {
        // SAFETY: arithmetic only.
        unsafe {
            // Transpose the 4x4 blocks within the 128-bit lanes, then the lanes.
            let mut blocks = [_mm256_setzero_ps(); 8];
            for i in 0..2 {
                let [a, b, c, d] = std::array::from_fn(|j| square[4 * i + j].0);
                let (ab_low, ab_high) = (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
                let (cd_low, cd_high) = (_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
                blocks[4 * i] = _mm256_shuffle_ps::<0x44>(ab_low, cd_low);
                blocks[4 * i + 1] = _mm256_shuffle_ps::<0xee>(ab_low, cd_low);
                blocks[4 * i + 2] = _mm256_shuffle_ps::<0x44>(ab_high, cd_high);
                blocks[4 * i + 3] = _mm256_shuffle_ps::<0xee>(ab_high, cd_high);
            }
            for i in 0..4 {
                let (upper, lower) = (blocks[i], blocks[4 + i]);
                square[i] = F32x8(_mm256_permute2f128_ps::<0x20>(upper, lower));
                square[4 + i] = F32x8(_mm256_permute2f128_ps::<0x31>(upper, lower));
            }
        }
    }
    #[inline(always)]
    unsafe fn widen<S: Element<Acc = f32>>(from: *const S) -> Self {
        // SAFETY: the caller vouches for 8 elements of the type that the dtype names.
        F32x8(unsafe {
            match S::DTYPE {
                DType::BF16 => {
                    let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
                }
                DType::F16 => _mm256_cvtph_ps(_mm_loadu_si128(from.cast())),
                _ => _mm256_loadu_ps(from.cast()),
            }
        })
    }
    #[inline(always)]
    unsafe fn narrow<D: Element<Acc = f32>>(self, to: *mut D) {
        // SAFETY: the caller vouches for 8 elements of the type that the dtype names.
        unsafe {
            match D::DTYPE {
                DType::F16 => _mm_storeu_si128(
                    to.cast(),
                    _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0),
                ),
                DType::BF16 => {
                    // To nearest even: add half of what is cut off, minus one when the kept part
                    // is even. A NaN keeps its upper half and becomes quiet.
                    let bits = _mm256_castps_si256(self.0);
                    let upper = _mm256_srli_epi32::<16>(bits);
                    let odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
                    let half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
                    let rounded = _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, half));
                    let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(self.0, self.0));
                    let quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
                    let chosen = _mm256_blendv_epi8(rounded, quiet, nan);
                    let (low, high) =
                        (_mm256_castsi256_si128(chosen), _mm256_extracti128_si256::<1>(chosen));
                    // No lane exceeds 16 bits, so none saturates.
                    _mm_storeu_si128(to.cast(), _mm_packus_epi32(low, high));
                }
                _ => _mm256_storeu_ps(to.cast(), self.0),
            }
        }
    }
}

impl Vector for F64x4 {
    type Scalar = f64;
    type Mask = __m256i;
    type Square = [Self; 4];
    const LANES: usize = 4;
    const FREE_MASKS: bool = false;
    const LOOPS: &'static [TileLoop<Self>] =
        &[TileLoop { rows: 4, vectors: 3, run: tile_loop_f64 }];

    #[inline(always)]
    unsafe fn splat(value: f64) -> Self {
        // SAFETY: the processor has AVX2, as for every function here.
        F64x4(unsafe { _mm256_set1_pd(value) })
    }
    #[inline(always)]
    unsafe fn load(from: *const f64) -> Self {
        // SAFETY: the caller vouches for the lanes.
        F64x4(unsafe { _mm256_loadu_pd(from) })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f64) {
        // SAFETY: the caller vouches for the lanes.
        unsafe { _mm256_storeu_pd(to, self.0) }
    }
    #[inline(always)]
    unsafe fn first(count: usize) -> __m256i {
        // SAFETY: arithmetic only.
        unsafe {
            let lanes = _mm256_setr_epi64x(0, 1, 2, 3);
            _mm256_cmpgt_epi64(_mm256_set1_epi64x(count as i64), lanes)
        }
    }
    #[inline(always)]
    unsafe fn load_first(from: *const f64, mask: __m256i) -> Self {
        // SAFETY: the caller vouches for the masked lanes, others are not read.
        F64x4(unsafe { _mm256_maskload_pd(from, mask) })
    }
    #[inline(always)]
    unsafe fn store_first(self, to: *mut f64, mask: __m256i) {
        // SAFETY: the caller vouches for the masked lanes, others are not written.
        unsafe { _mm256_maskstore_pd(to, mask, self.0) }
    }
    #[inline(always)]
    unsafe fn store_halves(self, low: *mut f64, high: *mut f64) {
        // SAFETY: the caller vouches for two elements each.
        unsafe {
            _mm_storeu_pd(low, _mm256_castpd256_pd128(self.0));
            _mm_storeu_pd(high, _mm256_extractf128_pd::<1>(self.0));
        }
    }
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
        // SAFETY: arithmetic only.
        F64x4(unsafe { _mm256_fmadd_pd(self.0, factor.0, addend.0) })
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: arithmetic only.
        F64x4(unsafe { _mm256_add_pd(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn square() -> [Self; 4] {
        // SAFETY: arithmetic only.
        [F64x4(unsafe { _mm256_setzero_pd() }); 4]
    }
    #[inline(always)]
    unsafe fn transpose(square: &mut [Self; 4]) {
        // SAFETY: arithmetic only.
        unsafe {
            let [a, b, c, d] = square.map(|row| row.0);
            let (ab_02, ab_13) = (_mm256_unpacklo_pd(a, b), _mm256_unpackhi_pd(a, b));
            let (cd_02, cd_13) = (_mm256_unpacklo_pd(c, d), _mm256_unpackhi_pd(c, d));
            *square = [
                F64x4(_mm256_permute2f128_pd::<0x20>(ab_02, cd_02)),
                F64x4(_mm256_permute2f128_pd::<0x20>(ab_13, cd_13)),
                F64x4(_mm256_permute2f128_pd::<0x31>(ab_02, cd_02)),
                F64x4(_mm256_permute2f128_pd::<0x31>(ab_13, cd_13)),
            ];
        }
    }
}

/// Defines a [`TileLoop`]'s function. A step takes 16 registers: 12 sums, 3 vectors of columns and one factor. The
/// compiler loads a factor before the one in use is done with and therefore keeps two sums in memory, at half the speed.
macro_rules! tile_loop {
    ($name:ident, $vector:ident, $scalar:ty, $broadcast:literal, $multiply_add:literal) => {
        #[target_feature(enable = "avx2", enable = "fma")]
        #[inline]
        unsafe fn $name(steps: &Steps<$scalar>, sums: *mut $vector) {
            let Steps { depth, a, a_row, a_step, b, b_step } = *steps;
            let bytes = size_of::<$scalar>() as isize;
            // SAFETY: the caller vouches for the operands, which are read, and for 12 sums; only what is named changes.
            unsafe {
                asm!(
                    "2:",
                    "vmovups {c0}, [{b}]",
                    "vmovups {c1}, [{b} + 32]",
                    "vmovups {c2}, [{b} + 64]",
                    concat!($broadcast, " {f}, [{a}]"),
                    concat!($multiply_add, " {s0}, {f}, {c0}"),
                    concat!($multiply_add, " {s1}, {f}, {c1}"),
                    concat!($multiply_add, " {s2}, {f}, {c2}"),
                    concat!($broadcast, " {f}, [{a} + {row}]"),
                    concat!($multiply_add, " {s3}, {f}, {c0}"),
                    concat!($multiply_add, " {s4}, {f}, {c1}"),
                    concat!($multiply_add, " {s5}, {f}, {c2}"),
                    concat!($broadcast, " {f}, [{a} + 2 * {row}]"),
                    concat!($multiply_add, " {s6}, {f}, {c0}"),
                    concat!($multiply_add, " {s7}, {f}, {c1}"),
                    concat!($multiply_add, " {s8}, {f}, {c2}"),
                    concat!($broadcast, " {f}, [{a} + {row3}]"),
                    concat!($multiply_add, " {s9}, {f}, {c0}"),
                    concat!($multiply_add, " {s10}, {f}, {c1}"),
                    concat!($multiply_add, " {s11}, {f}, {c2}"),
                    "add {a}, {a_step}",
                    "add {b}, {b_step}",
                    "dec {depth}",
                    "jnz 2b",
                    s0 = inout(ymm_reg) (*sums).0,
                    s1 = inout(ymm_reg) (*sums.add(1)).0,
                    s2 = inout(ymm_reg) (*sums.add(2)).0,
                    s3 = inout(ymm_reg) (*sums.add(3)).0,
                    s4 = inout(ymm_reg) (*sums.add(4)).0,
                    s5 = inout(ymm_reg) (*sums.add(5)).0,
                    s6 = inout(ymm_reg) (*sums.add(6)).0,
                    s7 = inout(ymm_reg) (*sums.add(7)).0,
                    s8 = inout(ymm_reg) (*sums.add(8)).0,
                    s9 = inout(ymm_reg) (*sums.add(9)).0,
                    s10 = inout(ymm_reg) (*sums.add(10)).0,
                    s11 = inout(ymm_reg) (*sums.add(11)).0,
                    c0 = out(ymm_reg) _,
                    c1 = out(ymm_reg) _,
                    c2 = out(ymm_reg) _,
                    f = out(ymm_reg) _,
                    depth = inout(reg) depth => _,
                    a = inout(reg) a => _,
                    b = inout(reg) b => _,
                    row = in(reg) bytes * a_row,
                    row3 = in(reg) 3 * bytes * a_row,
                    a_step = in(reg) bytes * a_step,
                    b_step = in(reg) bytes * b_step,
                    options(nostack, readonly)
                );
            }
        }
    };
}
tile_loop!(tile_loop_f32, F32x8, f32, "vbroadcastss", "vfmadd231ps");
tile_loop!(tile_loop_f64, F64x4, f64, "vbroadcastsd", "vfmadd231pd");

crate::gemm::compile::isa!(F32x8, F64x4, [1, 2, 3, 4], with_avx2);
