//! Packs operands of bf16 into dense tiles of 1 KiB, padded with zeros to 32 lanes and 32 elements of k.
//!
//! ```text
//!  panel      32 lanes; step s (32 elements of k) at s * 2048, lanes 0-15 first, then 16-31
//!  row tile      16 lanes of 32 elements: lane i, element e at 64 i + 2 e
//!  column tile   16 pairs of elements of 16 lanes: lane i, element e at 64 (e / 2) + 4 i + 2 (e % 2)
//! ```
//!
//! In words of two elements a column tile is the transpose of a row tile.

use super::microkernel::{MICROTILE, STEP_BYTES, TILE_BYTES};
use crate::gemm::isa::avx512::F32x16;
use crate::gemm::isa::vector::Vector;
use crate::gemm::problem::Operand;
use crate::numeric::prefetch::{self, LINE};
use crate::numeric::simd::with_avx512;
use std::arch::x86_64::*;

/// Elements of k in a step.
pub(super) const STEP: usize = 32;
/// Lanes of a tile.
const LANES: usize = 16;

/// The kind of tiles that an operand becomes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tiles {
    Rows,
    Columns,
}

/// A part of an operand and where its panels go.
#[derive(Clone, Copy)]
pub(super) struct Panels<'a> {
    pub operand: &'a Operand,
    pub tiles: Tiles,
    /// First lane and number of lanes; those of the last panel may be fewer than 32.
    pub lane: usize,
    pub lanes: usize,
    /// First element and number of steps; elements beyond the operand's are zeros.
    pub element: usize,
    pub steps: usize,
    pub to: *mut u8,
    /// Bytes from one panel to the next.
    pub panel_bytes: usize,
}

with_avx512! { enabled!
    /// Packs panels.
    ///
    /// # Safety
    /// The lanes lie within the operand, whose elements are there; `to` has room; the processor has AVX-512.
    pub(super) unsafe fn pack(panels: &Panels) {
        // SAFETY: the caller's promise, passed on.
        unsafe {
            if panels.operand.lane_stride == 1 {
                // All panels a step at a time: what lies together in memory is read together.
                for step in 0..panels.steps {
                    let mut ahead = Ahead::step(panels, step);
                    for (lane, to) in panels.each() {
                        let to = to.wrapping_add(step * STEP_BYTES);
                        interleave(panels, lane, step, to, &mut ahead);
                    }
                }
            } else if panels.operand.step_stride == 1 {
                for (lane, to) in panels.each() {
                    match panels.tiles {
                        Tiles::Rows => copy(panels, lane, to),
                        Tiles::Columns => transpose(panels, lane, to),
                    }
                }
            } else {
                for (lane, to) in panels.each() {
                    gather(panels, lane, to);
                }
            }
        }
    }
}

impl Panels<'_> {
    /// The first lane of each panel, counted from the operand's, and where the panel goes.
    fn each(self) -> impl Iterator<Item = (usize, *mut u8)> {
        let first = self.lane;
        (0..self.lanes.div_ceil(MICROTILE))
            .map(move |i| (first + i * MICROTILE, self.to.wrapping_add(i * self.panel_bytes)))
    }

    /// Valid lanes from `lane` on, at most `most`.
    fn valid_lanes(&self, lane: usize, most: usize) -> usize {
        (self.lane + self.lanes).saturating_sub(lane).min(most)
    }

    /// Valid elements of a step.
    fn valid_elements(&self, step: usize) -> usize {
        self.operand.elements.saturating_sub(self.element + step * STEP).min(STEP)
    }
}

/// The lowest `count` of 32 bits.
fn mask(count: usize) -> __mmask32 {
    ((1_u64 << count) - 1) as __mmask32
}

/// Memory that is packed next, fetched to the L2 cache in the order in which it lies, a line at a time.
struct Ahead {
    from: *const u8,
    row_bytes: isize,
    line: usize,
    /// Lines of a row.
    lines: usize,
}

impl Ahead {
    /// The lanes of the next panel.
    fn panel(panels: &Panels, lane: usize) -> Ahead {
        let from = panels.operand.at(lane + MICROTILE, panels.element);
        Ahead { from, row_bytes: 2 * panels.operand.lane_stride, line: 0, lines: panels.steps }
    }

    /// The elements of the next step.
    fn step(panels: &Panels, step: usize) -> Ahead {
        let from = panels.operand.at(panels.lane, panels.element + (step + 1) * STEP);
        let lines = panels.lanes.div_ceil(MICROTILE);
        Ahead { from, row_bytes: 2 * panels.operand.step_stride, line: 0, lines }
    }

    #[inline(always)]
    fn fetch(&mut self) {
        prefetch::to_l2(self.from.wrapping_add(self.line * LINE));
        self.line += 1;
        if self.line == self.lines {
            self.line = 0;
            self.from = self.from.wrapping_offset(self.row_bytes);
        }
    }
}

/// A panel of row tiles whose lanes' elements lie together.
#[inline(always)]
unsafe fn copy(panels: &Panels, lane: usize, to: *mut u8) {
    let valid = panels.valid_lanes(lane, MICROTILE);
    let mut ahead = Ahead::panel(panels, lane);
    for step in 0..panels.steps {
        let elements = panels.valid_elements(step);
        let to = to.wrapping_add(step * STEP_BYTES);
        let from = panels.operand.at(lane, panels.element + step * STEP);
        for i in 0..MICROTILE {
            let mask = if i < valid { mask(elements) } else { 0 };
            // SAFETY: only valid elements are read, and the panel has room for all steps.
            unsafe {
                let from = from.wrapping_offset(2 * i as isize * panels.operand.lane_stride);
                let row = _mm512_maskz_loadu_epi16(mask, from.cast());
                _mm512_storeu_si512(to.add(i * 64).cast(), row);
            }
            ahead.fetch();
        }
    }
}

/// A panel of column tiles whose lanes' elements lie together.
#[inline(always)]
unsafe fn transpose(panels: &Panels, lane: usize, to: *mut u8) {
    let mut ahead = Ahead::panel(panels, lane);
    for half in 0..2 {
        let lane = lane + half * LANES;
        let valid = panels.valid_lanes(lane, LANES);
        let from = panels.operand.at(lane, panels.element);
        let stride = panels.operand.lane_stride * 2;
        for step in 0..panels.steps {
            let mask = mask(panels.valid_elements(step));
            // SAFETY: only valid elements are read, and the panel has room for all steps.
            unsafe {
                let mut tile = [F32x16::splat(0.0); LANES];
                for (i, row) in tile.iter_mut().enumerate().take(valid) {
                    let from = from.wrapping_offset(i as isize * stride).wrapping_add(step * 64);
                    let words = _mm512_maskz_loadu_epi16(mask, from.cast());
                    ahead.fetch();
                    *row = F32x16(_mm512_castsi512_ps(words));
                }
                F32x16::transpose(&mut tile);
                store(&tile, to.add(step * STEP_BYTES + half * TILE_BYTES));
            }
        }
    }
}

/// One step of a panel of either kind of tiles, of an operand whose lanes lie together.
#[inline(always)]
unsafe fn interleave(panels: &Panels, lane: usize, step: usize, to: *mut u8, ahead: &mut Ahead) {
    let lanes = mask(panels.valid_lanes(lane, MICROTILE));
    let elements = panels.valid_elements(step);
    let first = panels.element + step * STEP;
    // SAFETY: only valid elements are read, prefetches have no effect but on caches, and the panel has room.
    unsafe {
        let low = _mm512_loadu_si512(LOW.as_ptr().cast());
        let high = _mm512_loadu_si512(HIGH.as_ptr().cast());
        let mut row = |element: usize| {
            let from = panels.operand.at(lane, first + element);
            ahead.fetch();
            let lanes = if element < elements { lanes } else { 0 };
            _mm512_maskz_loadu_epi16(lanes, from.cast())
        };
        let mut tiles = [[F32x16::splat(0.0); LANES]; 2];
        let [lower, upper] = &mut tiles;
        for (pair, (lower, upper)) in lower.iter_mut().zip(upper).enumerate() {
            let (even, odd) = (row(2 * pair), row(2 * pair + 1));
            let words = [low, high].map(|words| _mm512_permutex2var_epi16(even, words, odd));
            *lower = F32x16(_mm512_castsi512_ps(words[0]));
            *upper = F32x16(_mm512_castsi512_ps(words[1]));
        }
        for (half, tile) in tiles.iter_mut().enumerate() {
            if panels.tiles == Tiles::Rows {
                F32x16::transpose(tile);
            }
            store(tile, to.add(half * TILE_BYTES));
        }
    }
}

/// Sources of the words of lanes 0 to 15, and of lanes 16 to 31, in two registers of 32 lanes.
static LOW: [u16; 32] = interleaving(0);
static HIGH: [u16; 32] = interleaving(16);

const fn interleaving(first: u16) -> [u16; 32] {
    let mut indices = [0; 32];
    let mut i = 0;
    while i < 32 {
        indices[i] = first + i as u16 / 2 + i as u16 % 2 * 32;
        i += 1;
    }
    indices
}

#[inline(always)]
unsafe fn store(tile: &[F32x16; LANES], to: *mut u8) {
    for (i, row) in tile.iter().enumerate() {
        // SAFETY: the caller vouches for room for a tile.
        unsafe { row.store(to.add(i * 64).cast()) };
    }
}

/// Packs a panel of an operand without adjacent elements.
unsafe fn gather(panels: &Panels, lane: usize, to: *mut u8) {
    let valid = panels.valid_lanes(lane, MICROTILE);
    for step in 0..panels.steps {
        for i in 0..MICROTILE {
            for element in 0..STEP {
                let place = match panels.tiles {
                    Tiles::Rows => i % LANES * 64 + 2 * element,
                    Tiles::Columns => element / 2 * 64 + i % LANES * 4 + element % 2 * 2,
                };
                let place = step * STEP_BYTES + i / LANES * TILE_BYTES + place;
                let is_valid = i < valid && element < panels.valid_elements(step);
                let from = panels.operand.at(lane + i, panels.element + step * STEP + element);
                // SAFETY: valid elements are there, and the panel has room for all steps.
                unsafe {
                    let value = if is_valid { from.cast::<u16>().read_unaligned() } else { 0 };
                    to.add(place).cast::<u16>().write(value);
                }
            }
        }
    }
}
