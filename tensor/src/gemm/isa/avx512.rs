//! AVX-512: 8 rows by 48 (f32) or 24 (f64) columns in 24 of the 32 registers.

mod tile_loop;

use crate::gemm::isa::vector::{Steps, TileLoop, Vector};
use crate::numeric::simd::with_avx512;
use crate::{DType, Element};
use std::arch::x86_64::*;

#[derive(Clone, Copy)]
#[repr(transparent)]
pub(in crate::gemm) struct F32x16(pub(in crate::gemm) __m512);

#[derive(Clone, Copy)]
#[repr(transparent)]
struct F64x8(__m512d);

impl Vector for F32x16 {
    type Scalar = f32;
    type Mask = __mmask16;
    type Square = [Self; 16];
    const LANES: usize = 16;
    const FREE_MASKS: bool = true;
    const LOOPS: &'static [TileLoop<Self>] = &[
        TileLoop { rows: 8, vectors: 2, run: f32_by_2 },
        TileLoop { rows: 8, vectors: 3, run: f32_by_3 },
    ];

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: the processor has AVX-512, as for every function here.
        F32x16(unsafe { _mm512_set1_ps(value) })
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller vouches for the lanes.
        F32x16(unsafe { _mm512_loadu_ps(from) })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller vouches for the lanes.
        unsafe { _mm512_storeu_ps(to, self.0) }
    }
    #[inline(always)]
    unsafe fn first(count: usize) -> __mmask16 {
        (0xffff_u32 >> (16 - count)) as __mmask16
    }
    #[inline(always)]
    unsafe fn load_first(from: *const f32, mask: __mmask16) -> Self {
        // SAFETY: the caller vouches for the masked lanes, others are not read.
        F32x16(unsafe { _mm512_maskz_loadu_ps(mask, from) })
    }
    #[inline(always)]
    unsafe fn store_first(self, to: *mut f32, mask: __mmask16) {
        // SAFETY: the caller vouches for the masked lanes, others are not written.
        unsafe { _mm512_mask_storeu_ps(to, mask, self.0) }
    }
    #[inline(always)]
    unsafe fn store_halves(self, low: *mut f32, high: *mut f32) {
        // SAFETY: the caller vouches for eight elements each.
        unsafe {
            _mm256_storeu_ps(low, _mm512_castps512_ps256(self.0));
            _mm256_storeu_ps(high, _mm512_extractf32x8_ps::<1>(self.0));
        }
    }
    #[inline(always)]
    unsafe fn join_halves(self, other: Self) -> [Self; 2] {
        // SAFETY: arithmetic only.
        unsafe {
            [
                F32x16(_mm512_shuffle_f32x4::<0x44>(self.0, other.0)),
                F32x16(_mm512_shuffle_f32x4::<0xee>(self.0, other.0)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
        // SAFETY: arithmetic only.
        F32x16(unsafe { _mm512_fmadd_ps(self.0, factor.0, addend.0) })
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: arithmetic only.
        F32x16(unsafe { _mm512_add_ps(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn square() -> [Self; 16] {
        // SAFETY: arithmetic only.
        [F32x16(unsafe { _mm512_setzero_ps() }); 16]
    }
    #[inline(always)]
    unsafe fn transpose(square: &mut [Self; 16]) {
        // SAFETY: arithmetic only.
        unsafe {
            // Transpose the 4x4 blocks within the 128-bit lanes, then the lanes.
            let mut blocks = [_mm512_setzero_ps(); 16];
            for i in 0..4 {
                let [a, b, c, d] = std::array::from_fn(|j| square[4 * i + j].0);
                let (ab_low, ab_high) = (_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
                let (cd_low, cd_high) = (_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
                blocks[4 * i] = _mm512_shuffle_ps::<0x44>(ab_low, cd_low);
                blocks[4 * i + 1] = _mm512_shuffle_ps::<0xee>(ab_low, cd_low);
                blocks[4 * i + 2] = _mm512_shuffle_ps::<0x44>(ab_high, cd_high);
                blocks[4 * i + 3] = _mm512_shuffle_ps::<0xee>(ab_high, cd_high);
            }
            for i in 0..4 {
                let [a, b, c, d] = std::array::from_fn(|j| blocks[4 * j + i]);
                let even_ab = _mm512_shuffle_f32x4::<0x88>(a, b);
                let even_cd = _mm512_shuffle_f32x4::<0x88>(c, d);
                let odd_ab = _mm512_shuffle_f32x4::<0xdd>(a, b);
                let odd_cd = _mm512_shuffle_f32x4::<0xdd>(c, d);
                square[i] = F32x16(_mm512_shuffle_f32x4::<0x88>(even_ab, even_cd));
                square[4 + i] = F32x16(_mm512_shuffle_f32x4::<0x88>(odd_ab, odd_cd));
                square[8 + i] = F32x16(_mm512_shuffle_f32x4::<0xdd>(even_ab, even_cd));
                square[12 + i] = F32x16(_mm512_shuffle_f32x4::<0xdd>(odd_ab, odd_cd));
            }
        }
    }
    #[inline(always)]
    unsafe fn transposed<S: Element<Acc = f32>>(from: *const S, stride: isize) -> [Self; 16] {
        // SAFETY: the caller vouches for 16 rows of 16 elements of the type that the dtype names.
        unsafe {
            let mut square = Self::square();
            if S::DTYPE != DType::F32 {
                for (i, row) in square.iter_mut().enumerate() {
                    *row = Self::widen(from.offset(i as isize * stride));
                }
                Self::transpose(&mut square);
                return square;
            }
            // Quarters of the rows i, i + 4, i + 8 and i + 12 are put together while loading, which
            // saves half of the shuffles: what is left is to transpose 4x4 blocks in the lanes.
            let from = from.cast::<f32>();
            for j in 0..4 {
                let [a, b, c, d] = std::array::from_fn(|i| {
                    let quarter = from.offset(i as isize * stride).add(4 * j);
                    let at = |row: isize| _mm_loadu_ps(quarter.offset(row * stride));
                    let rows = _mm512_castps128_ps512(at(0));
                    let rows = _mm512_mask_broadcast_f32x4(rows, 0x00f0, at(4));
                    let rows = _mm512_mask_broadcast_f32x4(rows, 0x0f00, at(8));
                    _mm512_mask_broadcast_f32x4(rows, 0xf000, at(12))
                });
                let (ab_low, ab_high) = (_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
                let (cd_low, cd_high) = (_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
                square[4 * j] = F32x16(_mm512_shuffle_ps::<0x44>(ab_low, cd_low));
                square[4 * j + 1] = F32x16(_mm512_shuffle_ps::<0xee>(ab_low, cd_low));
                square[4 * j + 2] = F32x16(_mm512_shuffle_ps::<0x44>(ab_high, cd_high));
                square[4 * j + 3] = F32x16(_mm512_shuffle_ps::<0xee>(ab_high, cd_high));
            }
            square
        }
    }
    #[inline(always)]
    unsafe fn widen<S: Element<Acc = f32>>(from: *const S) -> Self {
        // SAFETY: the caller vouches for 16 elements of the type that the dtype names.
        F32x16(unsafe {
            match S::DTYPE {
                DType::BF16 => {
                    let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
                    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
                }
                DType::F16 => _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())),
                _ => _mm512_loadu_ps(from.cast()),
            }
        })
    }
    #[inline(always)]
    unsafe fn narrow<D: Element<Acc = f32>>(self, to: *mut D) {
        // SAFETY: the caller vouches for 16 elements of the type that the dtype names.
        unsafe {
            match D::DTYPE {
                DType::BF16 => {
                    // To nearest even: add half of what is cut off, minus one when the kept part
                    // is even. A NaN keeps its upper half and becomes quiet.
                    let bits = _mm512_castps_si512(self.0);
                    let upper = _mm512_srli_epi32::<16>(bits);
                    let odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
                    let half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
                    let rounded = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, half));
                    let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(self.0, self.0);
                    let quiet = _mm512_or_si512(upper, _mm512_set1_epi32(0x40));
                    let chosen = _mm512_mask_mov_epi32(rounded, nan, quiet);
                    _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(chosen));
                }
                DType::F16 => _mm256_storeu_si256(
                    to.cast(),
                    _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0),
                ),
                _ => _mm512_storeu_ps(to.cast(), self.0),
            }
        }
    }
}

impl Vector for F64x8 {
    type Scalar = f64;
    type Mask = __mmask8;
    type Square = [Self; 8];
    const LANES: usize = 8;
    const FREE_MASKS: bool = true;
    const LOOPS: &'static [TileLoop<Self>] = &[
        TileLoop { rows: 8, vectors: 2, run: f64_by_2 },
        TileLoop { rows: 8, vectors: 3, run: f64_by_3 },
    ];

    #[inline(always)]
    unsafe fn splat(value: f64) -> Self {
        // SAFETY: the processor has AVX-512, as for every function here.
        F64x8(unsafe { _mm512_set1_pd(value) })
    }
    #[inline(always)]
    unsafe fn load(from: *const f64) -> Self {
        // SAFETY: the caller vouches for the lanes.
        F64x8(unsafe { _mm512_loadu_pd(from) })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f64) {
        // SAFETY: the caller vouches for the lanes.
        unsafe { _mm512_storeu_pd(to, self.0) }
    }
    #[inline(always)]
    unsafe fn first(count: usize) -> __mmask8 {
        (0xff_u32 >> (8 - count)) as __mmask8
    }
    #[inline(always)]
    unsafe fn load_first(from: *const f64, mask: __mmask8) -> Self {
        // SAFETY: the caller vouches for the masked lanes, others are not read.
        F64x8(unsafe { _mm512_maskz_loadu_pd(mask, from) })
    }
    #[inline(always)]
    unsafe fn store_first(self, to: *mut f64, mask: __mmask8) {
        // SAFETY: the caller vouches for the masked lanes, others are not written.
        unsafe { _mm512_mask_storeu_pd(to, mask, self.0) }
    }
    #[inline(always)]
    unsafe fn store_halves(self, low: *mut f64, high: *mut f64) {
        // SAFETY: the caller vouches for four elements each.
        unsafe {
            _mm256_storeu_pd(low, _mm512_castpd512_pd256(self.0));
            _mm256_storeu_pd(high, _mm512_extractf64x4_pd::<1>(self.0));
        }
    }
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
        // SAFETY: arithmetic only.
        F64x8(unsafe { _mm512_fmadd_pd(self.0, factor.0, addend.0) })
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: arithmetic only.
        F64x8(unsafe { _mm512_add_pd(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn square() -> [Self; 8] {
        // SAFETY: arithmetic only.
        [F64x8(unsafe { _mm512_setzero_pd() }); 8]
    }
    #[inline(always)]
    unsafe fn transpose(square: &mut [Self; 8]) {
        // SAFETY: arithmetic only.
        unsafe {
            let [a, b, c, d, e, f, g, h] = square.map(|row| row.0);
            let pairs = [(a, b), (c, d), (e, f), (g, h)];
            let even = pairs.map(|(x, y)| _mm512_unpacklo_pd(x, y));
            let odd = pairs.map(|(x, y)| _mm512_unpackhi_pd(x, y));
            for (i, [ab, cd, ef, gh]) in [even, odd].into_iter().enumerate() {
                let abcd_04 = _mm512_shuffle_f64x2::<0x88>(ab, cd);
                let abcd_26 = _mm512_shuffle_f64x2::<0xdd>(ab, cd);
                let efgh_04 = _mm512_shuffle_f64x2::<0x88>(ef, gh);
                let efgh_26 = _mm512_shuffle_f64x2::<0xdd>(ef, gh);
                square[i] = F64x8(_mm512_shuffle_f64x2::<0x88>(abcd_04, efgh_04));
                square[2 + i] = F64x8(_mm512_shuffle_f64x2::<0x88>(abcd_26, efgh_26));
                square[4 + i] = F64x8(_mm512_shuffle_f64x2::<0xdd>(abcd_04, efgh_04));
                square[6 + i] = F64x8(_mm512_shuffle_f64x2::<0xdd>(abcd_26, efgh_26));
            }
        }
    }
}

/// Defines a [`TileLoop`]'s function for a type that wraps its register.
macro_rules! tile_loop {
    ($name:ident, $vector:ty, $scalar:ty) => {
        with_avx512! { enabled!
            #[inline]
            unsafe fn $name(steps: &Steps<$scalar>, sums: *mut $vector) {
                // SAFETY: the caller's promise; the type has the layout of the register.
                unsafe { tile_loop::$name(steps, sums.cast()) }
            }
        }
    };
}
tile_loop!(f32_by_2, F32x16, f32);
tile_loop!(f32_by_3, F32x16, f32);
tile_loop!(f64_by_2, F64x8, f64);
tile_loop!(f64_by_3, F64x8, f64);

crate::gemm::compile::isa!(F32x16, F64x8, [1, 2, 3, 4, 5, 6, 7, 8], with_avx512);
