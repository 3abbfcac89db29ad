//! The vector code of attention on AMX: powers of two, and the gradient of a panel's softmax.
//!
//! Sums of a panel pair are four dense tiles of 16 x 16 floats: row r of the upper half at 16 r, the columns from 16 on
//! 256 further, the lower half 512 further.

use super::panels::PanelLimits;
use crate::gemm::tiles::{LANES, STEP_BYTES, SUMS_FLOATS};
use crate::numeric::simd::{with_avx512, with_avx512_bf16};
use std::arch::x86_64::*;

/// Floats from the left tile of sums to the right one, and from the upper ones to the lower.
pub(super) const RIGHT: usize = 256;
pub(super) const LOWER: usize = 512;
/// Elements of a tile's row of f32.
pub(super) const SIDE: usize = 16;

/// The start of row `i` of sums.
pub(super) const fn row_of(i: usize) -> usize {
    i / SIDE * LOWER + i % SIDE * SIDE
}

/// 2^x within 2.5 ulp: 0 below -126. The polynomial for 2^r on \[-0.5, 0.5\] is the one of degree 5 with p(0) = 1 whose
/// largest relative error, 9e-8, is least (weighted least squares).
///
/// Each step is taken for all registers before the next one: a chain of ten dependent instructions fills the processor's
/// queues otherwise, and its units wait.
#[inline(always)]
#[expect(clippy::approx_constant, reason = "the coefficient of a minimax polynomial, not ln 2")]
pub(super) unsafe fn exp2<const N: usize>(mut x: [__m512; N]) -> [__m512; N] {
    // SAFETY: the processor has AVX-512, as for every function here.
    unsafe {
        let (mut n, mut p) = ([_mm512_setzero_ps(); N], [_mm512_set1_ps(1.326_472_7e-3); N]);
        let mut normal = [0; N];
        let least = _mm512_set1_ps(f32::MIN_EXP as f32 - 1.0);
        for i in 0..N {
            // True for a NaN, which is the second operand and so the maximum. A result that is not normal, even one that
            // is masked afterwards, takes the processor a hundred cycles.
            normal[i] = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x[i], least);
            x[i] = _mm512_max_ps(least, x[i]);
        }
        for i in 0..N {
            n[i] = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x[i]);
        }
        for i in 0..N {
            x[i] = _mm512_sub_ps(x[i], n[i]);
        }
        for c in [9.671_513e-3, 5.550_733_6e-2, 0.240_222_42, 0.693_147, 1.0] {
            for i in 0..N {
                p[i] = _mm512_fmadd_ps(p[i], x[i], _mm512_set1_ps(c));
            }
        }
        for i in 0..N {
            p[i] = _mm512_maskz_scalef_ps(normal[i], p[i], n[i]);
        }
        p
    }
}

/// The bf16 numbers nearest to 32 floats.
#[inline(always)]
pub(super) unsafe fn narrow(low: __m512, high: __m512) -> __m512i {
    // SAFETY: the processor has AVX512-BF16; both types hold any bits.
    unsafe { std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low)) }
}

/// Rows of a [`GradientPanel`] that are computed together: an even number.
const ROWS: usize = 4;

/// A panel of 32 keys, in rows, and one of 32 queries.
pub(super) struct GradientPanel<'a> {
    /// Sums k q and v dout.
    pub scores: &'a [f32],
    pub dprobabilities: &'a [f32],
    /// Factor of the scores, with log2(e).
    pub scale: f32,
    /// lse log2(e) of each query, infinity for padding, and delta.
    pub lse: &'a [f32],
    pub delta: &'a [f32],
    /// Keys that each query sees, from the first of this panel on, if one does not see them all.
    pub visible: Option<&'a PanelLimits>,
    /// Factors of the probabilities, as sums lie.
    pub factors: Option<&'a [f32]>,
    /// A step of row tiles, each: lanes are keys, elements queries.
    pub probabilities: &'a mut [f32],
    pub dscores: &'a mut [f32],
    /// A step of column tiles: lanes are queries in the order of [`GradientPanel::query`], elements keys.
    pub dscores_across: &'a mut [f32],
}

impl GradientPanel<'_> {
    /// The query in a lane of `dscores_across`.
    pub(super) fn query(lane: usize) -> usize {
        lane % SIDE / 4 * 8 + lane / SIDE * 4 + lane % 4
    }

    /// p = exp(score - lse) and ds = p (dp - delta), in tiles for the products that follow.
    ///
    /// # Safety
    /// The processor has AVX512-BF16.
    pub(super) unsafe fn run(&mut self) {
        assert!(
            self.scores.len() >= SUMS_FLOATS
                && self.dprobabilities.len() >= SUMS_FLOATS
                && self.factors.is_none_or(|factors| factors.len() >= SUMS_FLOATS)
                && self.lse.len() >= LANES
                && self.delta.len() >= LANES
        );
        for to in [&self.probabilities, &self.dscores, &self.dscores_across] {
            assert!(to.len() * 4 >= STEP_BYTES);
        }
        // SAFETY: the caller's promise, and the lengths above.
        unsafe {
            match (self.visible, self.factors) {
                (None, None) => self.pairs::<false, false>(),
                (Some(_), None) => self.pairs::<true, false>(),
                _ => self.pairs::<true, true>(),
            }
        }
    }

    with_avx512_bf16! { enabled!
        /// All rows, masked or all seen, with or without factors.
        unsafe fn pairs<const MASKED: bool, const FACTORS: bool>(&mut self) {
            let (first, all) = ([0; LANES], [i32::MAX; LANES]);
            let starts = self.visible.map_or(&first, |visible| &visible.starts);
            let ends = self.visible.map_or(&all, |visible| &visible.ends);
            let scale = _mm512_set1_ps(self.scale);
            // SAFETY: the caller has checked the lengths.
            unsafe {
                let float = |from: &[f32], c: usize| _mm512_loadu_ps(from.as_ptr().add(c * SIDE));
                let lse = [float(self.lse, 0), float(self.lse, 1)];
                let delta = [float(self.delta, 0), float(self.delta, 1)];
                let limits = |from: &[i32; LANES]| {
                    [0, 1].map(|c| _mm512_loadu_si512(from.as_ptr().add(c * SIDE).cast()))
                };
                let (starts, ends) = (limits(starts), limits(ends));
                let store = |to: &mut [f32], at: usize, value: __m512i| {
                    _mm512_storeu_si512(to.as_mut_ptr().add(at).cast(), value);
                };
                for i in (0..LANES).step_by(ROWS) {
                    // Register 2 r + c: row i + r, queries from 16 c on.
                    let at = |n: usize| row_of(i + n / 2) + n % 2 * RIGHT;
                    let mut p = [_mm512_setzero_ps(); 2 * ROWS];
                    for (n, p) in p.iter_mut().enumerate() {
                        let score = _mm512_loadu_ps(self.scores.as_ptr().add(at(n)));
                        *p = _mm512_fmsub_ps(score, scale, lse[n % 2]);
                    }
                    p = exp2(p);
                    let mut ds = [_mm512_setzero_ps(); 2 * ROWS];
                    for (n, (p, ds)) in p.iter_mut().zip(&mut ds).enumerate() {
                        let mut dp = _mm512_loadu_ps(self.dprobabilities.as_ptr().add(at(n)));
                        let mut kept = *p;
                        if let (true, Some(factors)) = (FACTORS, self.factors) {
                            let factor = _mm512_loadu_ps(factors.as_ptr().add(at(n)));
                            dp = _mm512_mul_ps(dp, factor);
                            kept = _mm512_mul_ps(kept, factor);
                        }
                        *ds = _mm512_mul_ps(*p, _mm512_sub_ps(dp, delta[n % 2]));
                        *p = kept;
                        if MASKED {
                            let key = _mm512_set1_epi32((i + n / 2) as i32);
                            let seen = _mm512_cmpgt_epi32_mask(ends[n % 2], key)
                                & _mm512_cmple_epi32_mask(starts[n % 2], key);
                            *ds = _mm512_maskz_mov_ps(seen, *ds);
                            *p = _mm512_maskz_mov_ps(seen, *p);
                        }
                    }
                    for r in (0..ROWS).step_by(2) {
                        let row = |x: &[__m512], r: usize| narrow(x[2 * r], x[2 * r + 1]);
                        // A row of a tile of 16-bit elements is as long as one of 16 floats.
                        let at = (i + r) / SIDE * RIGHT + (i + r) % SIDE * SIDE;
                        store(self.probabilities, at, row(&p, r));
                        store(self.probabilities, at + SIDE, row(&p, r + 1));
                        let (even, odd) = (row(&ds, r), row(&ds, r + 1));
                        store(self.dscores, at, even);
                        store(self.dscores, at + SIDE, odd);
                        let at = (i + r) / 2 * SIDE;
                        store(self.dscores_across, at, _mm512_unpacklo_epi16(even, odd));
                        store(self.dscores_across, at + RIGHT, _mm512_unpackhi_epi16(even, odd));
                    }
                }
            }
        }
    }
}

with_avx512! { enabled!
    /// Transposes 16 x 16 floats: `from` a dense tile, `to` rows `row` apart, times `scale`. Row j of the result goes to row
    /// `place(j)`.
    ///
    /// # Safety
    /// `from` holds a tile, `to` the rows; the processor has AVX-512.
    pub(super) unsafe fn transpose(
        from: *const f32,
        (to, row): (*mut f32, usize),
        scale: f32,
        place: impl Fn(usize) -> usize,
    ) {
        let scale = _mm512_set1_ps(scale);
        // SAFETY: the caller's promise.
        unsafe {
            let mut tile: [__m512; SIDE] = std::array::from_fn(|i| _mm512_loadu_ps(from.add(i * SIDE)));
            crate::gemm::tiles::transpose(&mut tile);
            for (j, x) in tile.into_iter().enumerate() {
                _mm512_storeu_ps(to.add(place(j) * row), _mm512_mul_ps(x, scale));
            }
        }
    }
}
