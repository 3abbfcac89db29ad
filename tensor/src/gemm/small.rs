//! Products of small blocks that a fused kernel keeps in cache: no threads, no cuts.
//!
//! The microkernels of the large product, applied to blocks that the caller has packed: operands of type `T`
//! in the accumulator's type or, where the instruction set multiplies pairs of bf16, in words of two (see
//! [`super::vnni`]). Lengths along the sum are counted in steps: elements or words.

mod operands;
#[cfg(test)]
mod tests;

use super::Accum;
use super::blocking::panel_vectors;
use super::isa::Isa;
use super::kernel::{GemmKernels, MicroTile};
use super::kernel_table::{KernelTable, pair_kernels};
use super::pack::Epilogue;
use super::vnni;
use crate::{DType, Element, Real, Scalar};
use std::any::{Any, TypeId};
use std::slice;

/// Rows of a block hold a multiple of this many elements: the widest register.
pub(crate) const PAD: usize = 16;

/// The block routines for operands of one type.
pub(crate) struct SmallGemm<T: Element> {
    kernels: &'static GemmKernels<T::Acc>,
    /// Elements that make a step.
    per_step: usize,
    has_tiles: bool,
}

/// The left factor of a block product: row i has step p at `data + i * row + p * step`.
#[derive(Clone, Copy)]
pub(crate) struct Factor<A> {
    pub data: *const A,
    pub row: usize,
    pub step: usize,
}

impl<A> Factor<A> {
    /// The factor from row `i` and step `p` on.
    pub(crate) fn at(self, i: usize, p: usize) -> Self {
        Factor { data: self.data.wrapping_add(i * self.row + p * self.step), ..self }
    }
}

impl<T: Element> SmallGemm<T> {
    /// The routines of this processor's best instruction set.
    pub(crate) fn best() -> Self {
        SmallGemm::at(Isa::best())
    }

    /// The routines of each instruction set that can be tested here, with its name.
    #[cfg(test)]
    pub(crate) fn available() -> impl Iterator<Item = (String, Self)> {
        Isa::available().map(|level| (format!("{level:?}"), SmallGemm::at(level)))
    }

    /// The routines of an instruction set, which the processor must have.
    fn at(level: Isa) -> Self {
        let pairs = (T::DTYPE == DType::BF16).then(|| pair_kernels(level)).flatten();
        let kernels: &dyn Any = if TypeId::of::<T::Acc>() == TypeId::of::<f64>() {
            f64::kernels(level)
        } else {
            pairs.unwrap_or_else(|| f32::kernels(level))
        };
        let kernels = kernels.downcast_ref().expect("an accumulator is f32 or f64");
        SmallGemm {
            kernels,
            per_step: if pairs.is_some() { vnni::PAIR } else { 1 },
            has_tiles: T::DTYPE == DType::BF16 && level.has_tiles_of_blocks(),
        }
    }

    /// Whether the kernel should multiply in tile registers instead (`super::tiles`).
    pub(crate) fn has_tiles(&self) -> bool {
        self.has_tiles
    }

    /// The steps that `elements` make; the last may be half empty, which counts as zero.
    pub(crate) fn steps(&self, elements: usize) -> usize {
        elements.div_ceil(self.per_step)
    }

    /// The step that an element belongs to.
    pub(crate) fn step_of(&self, element: usize) -> usize {
        element / self.per_step
    }

    /// dst = \[dst +\] alpha * lhs * rhs for `size` = (rows, columns, steps). Rows of `rhs` and `dst`,
    /// `rhs_row` and `dst_row` apart, are contiguous.
    ///
    /// # Safety
    /// The blocks hold their elements, `rhs` and `dst` with columns rounded up to [`PAD`]; the columns
    /// added by the rounding are read and written with arbitrary values. `dst` overlaps nothing.
    #[inline]
    pub(crate) unsafe fn product(
        &self,
        size: (usize, usize, usize),
        (dst, dst_row, accum): (*mut T::Acc, usize, Accum),
        alpha: T::Acc,
        lhs: Factor<T::Acc>,
        (rhs, rhs_row): (*const T::Acc, usize),
    ) {
        let (rows, columns, depth) = size;
        if rows == 0 || columns == 0 {
            return;
        }
        if depth == 0 {
            for row in (0..rows).filter(|_| accum == Accum::Replace) {
                // SAFETY: rows of the destination hold their columns.
                let row = unsafe { slice::from_raw_parts_mut(dst.add(row * dst_row), columns) };
                row.fill(T::Acc::ZERO);
            }
            return;
        }
        let lanes = self.kernels.lanes;
        let registers = columns.div_ceil(lanes);
        let most = self.kernels.vectors();
        let tallest = self.kernels.tiles.len();
        let panel = match registers <= most {
            true => registers, // without the time of divisions
            false => panel_vectors(registers, most, tallest.min(rows)),
        };
        for first in (0..registers).step_by(panel) {
            let vectors = panel.min(registers - first);
            for row in (0..rows).step_by(tallest) {
                let height = tallest.min(rows - row);
                // SAFETY: all offsets are inside the blocks that the caller vouches for.
                unsafe {
                    self.kernels.tiles[height - 1][vectors - 1](&MicroTile {
                        depth,
                        a: lhs.at(row, 0).data,
                        a_row: lhs.row as isize,
                        a_step: lhs.step as isize,
                        b: rhs.add(first * lanes),
                        b_step: rhs_row as isize,
                        c: dst.add(row * dst_row + first * lanes),
                        c_row: dst_row as isize,
                        add: accum == Accum::Add,
                        to: dst.add(row * dst_row + first * lanes).cast(),
                        to_row: dst_row as isize,
                        dtype: T::Acc::DTYPE,
                        last_lanes: lanes,
                        alpha,
                        bias: std::ptr::null(),
                    });
                }
            }
        }
    }

    /// Rounds rows of `columns` elements, `from_row` apart, into rows `row_stride` apart.
    ///
    /// # Safety
    /// Both hold their elements; no other code uses those of `to`, which may be where `from` is.
    pub(crate) unsafe fn round<D: Element<Acc = T::Acc>>(
        &self,
        (from, from_row): (*const T::Acc, usize),
        (rows, columns): (usize, usize),
        (to, row_stride): (*mut D, usize),
    ) {
        // SAFETY: the caller's promise, passed on.
        unsafe {
            (self.kernels.epilogue)(D::DTYPE)(&Epilogue {
                from,
                from_row: from_row as isize,
                rows,
                columns,
                to: to.cast(),
                row_stride: row_stride as isize,
                column_stride: 1,
                bias: std::ptr::null(),
                bias_row: 0,
                bias_column: 0,
            });
        }
    }
}
