//! Softmax of a panel of queries, by blocks of keys with a running maximum.

use super::panels::{KEY_PANELS, PanelLimits};
use super::vectors::{RIGHT, SIDE, exp2, narrow, row_of};
use crate::gemm::tiles::{LANES, STEP_BYTES, SUMS_FLOATS};
use crate::numeric::lanes::fold_lanes;
use crate::numeric::simd::with_avx512_bf16;
use std::arch::x86_64::*;

/// Bytes from the first 16 lanes of a step to the others.
const LANES_BYTES: usize = STEP_BYTES / 2;

/// A panel of 32 queries and up to four panels of keys.
pub(super) struct SoftmaxPanel<'a> {
    /// Sums q k of each panel of keys.
    pub scores: &'a [f32],
    /// Factor of the scores, with log2(e).
    pub scale: f32,
    /// Keys that each query sees, from the first of these panels on, if one does not see them all.
    pub visible: Option<&'a PanelLimits>,
    /// Factors of the probabilities: rows of [`KEY_PANELS`] panels.
    pub factors: Option<&'a [f32]>,
    /// Largest score so far, by the scale, and sum of the powers of two of the differences.
    pub maxima: &'a mut [f32],
    pub totals: &'a mut [f32],
    /// Sums p v so far, for each panel of the width, which are rescaled with the totals.
    pub sums: &'a mut [f32],
    /// Row tiles, a step for each panel of keys.
    pub probabilities: &'a mut [f32],
}

impl SoftmaxPanel<'_> {
    /// Turns scores into probabilities by the largest score so far.
    ///
    /// # Safety
    /// The processor has AVX512-BF16.
    pub(super) unsafe fn run(&mut self, panels: usize) {
        assert!(
            panels <= KEY_PANELS
                && self.factors.is_none_or(|factors| factors.len() >= LANES * KEY_PANELS * LANES)
                && self.scores.len() >= panels * SUMS_FLOATS
                && self.probabilities.len() * 4 >= panels * STEP_BYTES
                && self.maxima.len() >= LANES
                && self.totals.len() >= LANES
        );
        // SAFETY: the caller's promise, and the lengths above.
        unsafe {
            match self.visible {
                None => self.rows::<false>(panels),
                Some(_) => self.rows::<true>(panels),
            }
        }
    }

    with_avx512_bf16! { enabled!
        /// All rows. Maxima and sums of 16 rows are found together: within a row each one waits for the one before.
        unsafe fn rows<const MASKED: bool>(&mut self, panels: usize) {
            let scale = _mm512_set1_ps(self.scale);
            for half in 0..LANES / SIDE {
                let mut rows = [_mm512_setzero_ps(); SIDE];
                // SAFETY: the caller has checked the lengths.
                unsafe {
                    for (i, most) in rows.iter_mut().enumerate() {
                        *most = _mm512_set1_ps(f32::NEG_INFINITY);
                        for c in 0..2 * panels {
                            let (seen, score) = self.score::<MASKED>(half * SIDE + i, c, scale);
                            *most = _mm512_mask_max_ps(*most, seen, *most, score);
                        }
                    }
                    let most = fold(rows, |a, b| _mm512_max_ps(a, b));
                    let new = self.raise_maxima(half, most);
                    for (i, sum) in rows.iter_mut().enumerate() {
                        let max = _mm512_set1_ps(new[i]);
                        *sum = _mm512_setzero_ps();
                        let row = half * SIDE + i;
                        for panel in (0..panels - panels % 2).step_by(2) {
                            let part = self.powers::<MASKED, 4>(row, panel, scale, max);
                            *sum = _mm512_add_ps(*sum, part);
                        }
                        if panels % 2 == 1 {
                            let part = self.powers::<MASKED, 2>(row, panels - 1, scale, max);
                            *sum = _mm512_add_ps(*sum, part);
                        }
                    }
                    let totals = self.totals.as_mut_ptr().add(half * SIDE);
                    let sum = fold(rows, |a, b| _mm512_add_ps(a, b));
                    _mm512_storeu_ps(totals, _mm512_add_ps(_mm512_loadu_ps(totals), sum));
                }
            }
        }
    }

    /// The keys that a query sees, of 16 from key 16 `c` on, and their scores. These are rounded before the largest is
    /// subtracted, which must give 0 however large it is.
    #[inline(always)]
    unsafe fn score<const MASKED: bool>(
        &self,
        row: usize,
        c: usize,
        scale: __m512,
    ) -> (__mmask16, __m512) {
        // SAFETY: the caller has checked the lengths.
        unsafe {
            let at = c / 2 * SUMS_FLOATS + c % 2 * RIGHT + row_of(row);
            let score = _mm512_mul_ps(_mm512_loadu_ps(self.scores.as_ptr().add(at)), scale);
            let seen = match (MASKED, self.visible) {
                (true, Some(PanelLimits { starts, ends })) => {
                    let first = _mm512_set1_epi32((c * SIDE) as i32);
                    let lane =
                        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
                    let key = _mm512_add_epi32(lane, first);
                    _mm512_cmplt_epi32_mask(key, _mm512_set1_epi32(ends[row]))
                        & _mm512_cmpge_epi32_mask(key, _mm512_set1_epi32(starts[row]))
                }
                _ => !0,
            };
            (seen, score)
        }
    }

    /// Writes the probabilities of a row for `N` registers of keys, and returns their sum.
    #[inline(always)]
    unsafe fn powers<const MASKED: bool, const N: usize>(
        &mut self,
        row: usize,
        panel: usize,
        scale: __m512,
        max: __m512,
    ) -> __m512 {
        // SAFETY: the caller has checked the lengths.
        unsafe {
            let mut x = [_mm512_set1_ps(f32::NEG_INFINITY); N];
            for (c, x) in x.iter_mut().enumerate() {
                let (seen, score) = self.score::<MASKED>(row, 2 * panel + c, scale);
                *x = _mm512_mask_mov_ps(*x, seen, _mm512_sub_ps(score, max));
            }
            x = exp2(x);
            let mut sum = x[0];
            for x in &x[1..] {
                sum = _mm512_add_ps(sum, *x);
            }
            if let Some(factors) = self.factors {
                let factors = &factors[(row * KEY_PANELS + panel) * LANES..];
                for (c, x) in x.iter_mut().enumerate() {
                    *x = _mm512_mul_ps(*x, _mm512_loadu_ps(factors.as_ptr().add(c * SIDE)));
                }
            }
            let to = self.probabilities.as_mut_ptr().cast::<u8>();
            let to = to.add(row / SIDE * LANES_BYTES + row % SIDE * 64);
            for c in (0..N).step_by(2) {
                let to = to.add((panel + c / 2) * STEP_BYTES);
                _mm512_storeu_si512(to.cast(), narrow(x[c], x[c + 1]));
            }
            sum
        }
    }

    /// Raises the maxima of 16 rows to those of their new scores, and rescales what was summed by lower ones. Returns
    /// them, with 0 for a row that has seen nothing, whose differences would be NaN.
    #[inline(always)]
    unsafe fn raise_maxima(&mut self, half: usize, most: __m512) -> [f32; SIDE] {
        // SAFETY: the caller has checked the lengths.
        unsafe {
            let maxima = self.maxima.as_mut_ptr().add(half * SIDE);
            let totals = self.totals.as_mut_ptr().add(half * SIDE);
            let old = _mm512_loadu_ps(maxima);
            // A NaN shows in the sums; here the second operand replaces it.
            let new = _mm512_max_ps(most, old);
            let raised = _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(old, new);
            // As a rule maxima are found early.
            if raised != 0 {
                let [shrink] = exp2([_mm512_sub_ps(old, new)]);
                let shrink = _mm512_mask_mov_ps(_mm512_set1_ps(1.0), raised, shrink);
                let total = _mm512_loadu_ps(totals);
                _mm512_storeu_ps(maxima, new);
                _mm512_storeu_ps(totals, _mm512_mul_ps(total, shrink));
                let summed = raised & _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(total, _mm512_setzero_ps());
                let factors: [f32; SIDE] = std::mem::transmute(shrink);
                for (i, factor) in factors.into_iter().enumerate() {
                    if summed >> i & 1 == 0 {
                        continue;
                    }
                    for sums in self.sums.chunks_exact_mut(SUMS_FLOATS) {
                        for right in [0, RIGHT] {
                            let at = row_of(half * SIDE + i) + right;
                            sums[at..at + SIDE].iter_mut().for_each(|sum| *sum *= factor);
                        }
                    }
                }
            }
            let seen = _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(new, _mm512_set1_ps(f32::NEG_INFINITY));
            std::mem::transmute(_mm512_maskz_mov_ps(seen, new))
        }
    }
}

/// Lane i of the result is `f` of all lanes of row i.
#[inline(always)]
unsafe fn fold(mut rows: [__m512; SIDE], f: impl Fn(__m512, __m512) -> __m512) -> __m512 {
    // SAFETY: the processor has AVX-512.
    unsafe { crate::gemm::tiles::transpose(&mut rows) };
    fold_lanes(&mut rows, f)
}
