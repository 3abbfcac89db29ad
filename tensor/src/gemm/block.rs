//! Products of small blocks that a fused kernel keeps in cache: no packing, no threads.
//!
//! The microkernels of the large product, applied to row-major blocks in the accumulator's type whose
//! rows are padded to [`PAD`] elements, and the packing routines that make such blocks.

use super::Accum;
use super::kernel::{Compute, Kernels, Level, Tile};
use super::pack::{Finish, Strip};
use crate::{Element, Real};
use std::any::{Any, TypeId};
use std::slice;

/// Rows of a block hold a multiple of this many elements: the widest register.
pub(crate) const PAD: usize = 16;

/// The block routines of one accumulator, f32 or f64, for the best instruction set.
pub(crate) struct Blocks<A: 'static> {
    kernels: &'static Kernels<A>,
}

/// The left factor of a block product: element (i, p) is at `data + i * row + p * step`.
#[derive(Clone, Copy)]
pub(crate) struct Factor<A> {
    pub data: *const A,
    pub row: usize,
    pub step: usize,
}

impl<A: Real + Element<Acc = A>> Blocks<A> {
    /// The routines of this processor's best instruction set.
    pub(crate) fn best() -> Self {
        let level = Level::best();
        let kernels: &dyn Any = if TypeId::of::<A>() == TypeId::of::<f64>() {
            f64::kernels(level)
        } else {
            f32::kernels(level)
        };
        Blocks { kernels: kernels.downcast_ref().expect("an accumulator is f32 or f64") }
    }

    /// dst = \[dst +\] alpha * lhs * rhs for `size` = (rows, columns, depth). Rows of `rhs` and `dst`,
    /// `rhs_row` and `dst_row` apart, are contiguous.
    ///
    /// # Safety
    /// The blocks hold their elements, `rhs` and `dst` with columns rounded up to [`PAD`]; the columns
    /// added by the rounding are read and written with arbitrary values. `dst` overlaps nothing.
    #[inline]
    pub(crate) unsafe fn product(
        &self,
        size: (usize, usize, usize),
        (dst, dst_row, accum): (*mut A, usize, Accum),
        alpha: A,
        lhs: Factor<A>,
        (rhs, rhs_row): (*const A, usize),
    ) {
        let (rows, columns, depth) = size;
        if rows == 0 || columns == 0 {
            return;
        }
        if depth == 0 {
            for row in (0..rows).filter(|_| accum == Accum::Replace) {
                // SAFETY: rows of the destination hold their columns.
                unsafe { slice::from_raw_parts_mut(dst.add(row * dst_row), columns).fill(A::ZERO) };
            }
            return;
        }
        let lanes = self.kernels.lanes;
        let registers = columns.div_ceil(lanes);
        // Panels of equal width: 4 registers are 2 + 2, not 3 + 1.
        let panel = registers.div_ceil(registers.div_ceil(self.kernels.vectors()));
        let tallest = self.kernels.tiles.len();
        for first in (0..registers).step_by(panel) {
            let vectors = panel.min(registers - first);
            for row in (0..rows).step_by(tallest) {
                let height = tallest.min(rows - row);
                // SAFETY: all offsets are inside the blocks that the caller vouches for.
                unsafe {
                    self.kernels.tiles[height - 1][vectors - 1](&Tile {
                        depth,
                        a: lhs.data.add(row * lhs.row),
                        a_row: lhs.row as isize,
                        a_step: lhs.step as isize,
                        b: rhs.add(first * lanes),
                        b_step: rhs_row as isize,
                        c: dst.add(row * dst_row + first * lanes),
                        c_row: dst_row as isize,
                        add: accum == Accum::Add,
                        to: dst.add(row * dst_row + first * lanes).cast(),
                        to_row: dst_row as isize,
                        dtype: A::DTYPE,
                        last_lanes: lanes,
                        alpha,
                        bias: std::ptr::null(),
                    });
                }
            }
        }
    }

    /// Widens `rows` rows of `columns` elements, `row_stride` apart, into rows `to_row` apart.
    ///
    /// # Safety
    /// `from` holds its elements, `to` rows of `to_row` elements, a multiple of [`PAD`] not less than
    /// `columns`.
    pub(crate) unsafe fn widen<S: Element<Acc = A>>(
        &self,
        (from, row_stride): (*const S, usize),
        (rows, columns): (usize, usize),
        (to, to_row): (*mut A, usize),
    ) {
        // SAFETY: one panel holds all lanes.
        unsafe {
            (self.kernels.widen)(S::DTYPE)(&Strip {
                from: from.cast(),
                step_stride: row_stride as isize,
                lane_stride: 1,
                depth: rows,
                elements: rows,
                count: columns,
                to,
                width: to_row,
                panel_stride: 0,
            });
        }
    }

    /// As [`Blocks::widen`], transposed: column j of the source becomes row j of `to`.
    ///
    /// # Safety
    /// `from` holds its elements, `to` `columns` rows of `to_row` elements, a multiple of [`PAD`] not
    /// less than `rows`.
    pub(crate) unsafe fn widen_transposed<S: Element<Acc = A>>(
        &self,
        (from, row_stride): (*const S, usize),
        (rows, columns): (usize, usize),
        (to, to_row): (*mut A, usize),
    ) {
        // SAFETY: one panel holds all lanes.
        unsafe {
            (self.kernels.widen)(S::DTYPE)(&Strip {
                from: from.cast(),
                step_stride: 1,
                lane_stride: row_stride as isize,
                depth: columns,
                elements: columns,
                count: rows,
                to,
                width: to_row,
                panel_stride: 0,
            });
        }
    }

    /// Rounds rows of `columns` elements, `from_row` apart, into rows `row_stride` apart.
    ///
    /// # Safety
    /// Both hold their elements; nobody else uses those of `to`.
    pub(crate) unsafe fn round<D: Element<Acc = A>>(
        &self,
        (from, from_row): (*const A, usize),
        (rows, columns): (usize, usize),
        (to, row_stride): (*mut D, usize),
    ) {
        // SAFETY: the caller's promise, passed on.
        unsafe {
            (self.kernels.finish)(D::DTYPE)(&Finish {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, bf16};

    #[test]
    fn small_blocks_are_multiplied_as_by_hand() {
        // Small integers: every order of summation gives the same bits.
        let blocks = Blocks::<f32>::best();
        for (rows, columns, depth) in
            [(1_usize, 1_usize, 1_usize), (3, 17, 5), (9, 70, 33), (64, 64, 64), (8, 80, 4)]
        {
            let row = columns.next_multiple_of(PAD);
            let lhs: Vec<f32> = (0..rows * depth).map(|i| (i % 7) as f32 - 3.0).collect();
            let rhs: Vec<f32> = (0..depth * row).map(|i| (i % 5) as f32 - 2.0).collect();
            let mut dst = vec![1.0_f32; rows * row];
            // Stored transposed: element (i, p) at p * rows + i.
            let lhs_block = Factor { data: lhs.as_ptr(), row: 1, step: rows };
            // SAFETY: the vectors have just been made of these sizes.
            unsafe {
                let dst = (dst.as_mut_ptr(), row, Accum::Add);
                blocks.product((rows, columns, depth), dst, 2.0, lhs_block, (rhs.as_ptr(), row));
            }
            for i in 0..rows {
                for j in 0..columns {
                    let sum: f32 = (0..depth).map(|p| lhs[p * rows + i] * rhs[p * row + j]).sum();
                    assert_eq!(dst[i * row + j], 1.0 + 2.0 * sum, "({rows}, {columns}) {i} {j}");
                }
            }
        }
    }

    #[test]
    fn widening_and_rounding_keep_the_elements() {
        let blocks = Blocks::<f32>::best();
        assert_eq!(<f32 as crate::Scalar>::DTYPE, DType::F32);
        let (rows, columns, stride) = (19, 21, 23);
        let from: Vec<bf16> = (0..rows * stride).map(|i| bf16::from_f32(i as f32)).collect();
        let (mut wide, mut turned) = (vec![9.0; rows * 32], vec![9.0; columns * 32]);
        let mut back = vec![bf16::ZERO; rows * columns];
        // SAFETY: the vectors have just been made of these sizes.
        unsafe {
            let source = (from.as_ptr(), stride);
            blocks.widen(source, (rows, columns), (wide.as_mut_ptr(), 32));
            blocks.widen_transposed(source, (rows, columns), (turned.as_mut_ptr(), 32));
            blocks.round((wide.as_ptr(), 32), (rows, columns), (back.as_mut_ptr(), columns));
        }
        for i in 0..rows {
            for j in 0..columns {
                let want = from[i * stride + j];
                assert_eq!(wide[i * 32 + j], want.to_f32());
                assert_eq!(turned[j * 32 + i], want.to_f32());
                assert_eq!(back[i * columns + j], want);
            }
        }
    }
}
