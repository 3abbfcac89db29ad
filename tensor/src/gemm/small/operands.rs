//! The factors of block products: how they are packed, and how sums become factors again.

use super::super::pack_task::PackTask;
use super::{Factor, SmallGemm};
use crate::{Element, Real};

/// The same rows packed for either side: on the left they are the rows, on the right the sum runs over them.
#[derive(Clone, Copy)]
pub(crate) struct Both<A> {
    pub left: Factor<A>,
    pub right: *const A,
}

impl<T: Element> SmallGemm<T> {
    /// Packs `rows` rows of `columns` elements, `row_stride` apart, for the right: the sum runs over the
    /// rows. Steps come to lie `to_row` apart.
    ///
    /// # Safety
    /// `from` holds its elements, `to` the rows' steps of `to_row` elements, a multiple of [`super::PAD`] not less
    /// than `columns`.
    pub(crate) unsafe fn pack(
        &self,
        (from, row_stride): (*const T, usize),
        (rows, columns): (usize, usize),
        (to, to_row): (*mut T::Acc, usize),
    ) {
        // SAFETY: one panel holds all lanes.
        unsafe { self.pack_strip(from, [row_stride, 1], [rows, columns], (to, to_row)) }
    }

    /// Packs like [`SmallGemm::pack`], transposed: the sum runs over the columns.
    ///
    /// # Safety
    /// `from` holds its elements, `to` the columns' steps of `to_row` elements, a multiple of [`super::PAD`] not
    /// less than `rows`.
    pub(crate) unsafe fn pack_transposed(
        &self,
        (from, row_stride): (*const T, usize),
        (rows, columns): (usize, usize),
        (to, to_row): (*mut T::Acc, usize),
    ) {
        // SAFETY: one panel holds all lanes.
        unsafe { self.pack_strip(from, [1, row_stride], [columns, rows], (to, to_row)) }
    }

    /// Packs `elements` along the sum by `lanes` across it, so many elements apart.
    unsafe fn pack_strip(
        &self,
        from: *const T,
        [stride, lane_stride]: [usize; 2],
        [elements, lanes]: [usize; 2],
        (to, to_row): (*mut T::Acc, usize),
    ) {
        // SAFETY: the caller's promise, passed on.
        unsafe {
            (self.kernels.pack)(T::DTYPE)(&PackTask {
                from: from.cast(),
                step_stride: (self.per_step * stride) as isize,
                lane_stride: lane_stride as isize,
                depth: self.steps(elements),
                elements,
                count: lanes,
                to,
                width: to_row,
                panel_stride: 0,
            });
        }
    }

    /// Packs `rows` rows of `columns` elements, `row_stride` apart, for the left: the sum runs over the columns.
    ///
    /// # Safety
    /// `from` holds its elements, `to` rows of `to_row` elements, not less than the columns' steps; where a step is an
    /// element, as [`SmallGemm::pack`].
    pub(crate) unsafe fn pack_left(
        &self,
        (from, row_stride): (*const T, usize),
        (rows, columns): (usize, usize),
        (to, to_row): (*mut T::Acc, usize),
    ) -> Factor<T::Acc> {
        if self.per_step == 1 {
            // SAFETY: the caller's promise, passed on.
            unsafe { self.pack((from, row_stride), (rows, columns), (to, to_row)) };
        } else {
            for i in 0..rows {
                let to = to.wrapping_add(i * to_row);
                // SAFETY: elements lie in a row as they do in words; the last word may have one of two.
                unsafe {
                    if !columns.is_multiple_of(self.per_step) {
                        to.add(columns / self.per_step).write(T::Acc::ZERO);
                    }
                    from.add(i * row_stride).copy_to_nonoverlapping(to.cast(), columns);
                }
            }
        }
        Factor { data: to, row: to_row, step: 1 }
    }

    /// Packs rows for both sides, those of the right `to_row` apart. Where that is the same, it is done once.
    ///
    /// # Safety
    /// The conditions of [`SmallGemm::pack`], with room for an even number of rows of `to_row` elements.
    pub(crate) unsafe fn pack_both(
        &self,
        from: (*const T, usize),
        (rows, columns): (usize, usize),
        (to, to_row): (*mut T::Acc, usize),
    ) -> Both<T::Acc> {
        // SAFETY: the caller's promise, passed on: steps of two elements take half the room, twice.
        unsafe {
            self.pack(from, (rows, columns), (to, to_row));
            let left = if self.per_step == 1 {
                Factor { data: to.cast_const(), row: to_row, step: 1 }
            } else {
                let half = to_row / self.per_step;
                let to = to.wrapping_add(self.steps(rows) * to_row);
                self.pack_left(from, (rows, columns), (to, half))
            };
            Both { left, right: to }
        }
    }

    /// Makes sums operands where they lie, and rounds them if they must be. They are a left factor of `rows` rows,
    /// `row` apart as before; the sum runs over `columns`.
    ///
    /// # Safety
    /// The block holds its rows; columns of the last step that are not counted are zeros.
    pub(crate) unsafe fn operands(
        &self,
        (block, row): (*mut T::Acc, usize),
        (rows, columns): (usize, usize),
    ) -> Factor<T::Acc> {
        if self.per_step > 1 {
            let columns = self.steps(columns) * self.per_step;
            // SAFETY: the caller's promise, passed on: an element is written after it was read.
            unsafe {
                self.round((block, row), (rows, columns), (block.cast::<T>(), self.per_step * row));
            }
        }
        Factor { data: block, row, step: 1 }
    }

    /// The transposed of a block of [`SmallGemm::operands`], rows `row` apart: a left factor for sums over
    /// the rows. Where it cannot be read in place, `to` takes what [`SmallGemm::transpose`] is called for.
    pub(crate) fn transposed(
        &self,
        (block, row): (*const T::Acc, usize),
        to: *mut T::Acc,
    ) -> Factor<T::Acc> {
        let data = if self.per_step == 1 { block } else { to };
        Factor { data, row: 1, step: row }
    }

    /// Elements that a block of `rows` rows, `row` apart, takes transposed.
    pub(crate) fn transposed_elements(&self, rows: usize, row: usize) -> usize {
        if self.per_step == 1 { 0 } else { self.steps(rows) * row }
    }

    /// Puts `rows` rows of such a block, in `columns` columns, into its transposed, from the step on where `to` begins.
    ///
    /// # Safety
    /// The block holds these operands, `row` apart, and `to` is part of what [`SmallGemm::transposed`] gave, with room.
    pub(crate) unsafe fn transpose(
        &self,
        (block, row): (*const T::Acc, usize),
        (rows, columns): (usize, usize),
        to: Factor<T::Acc>,
    ) {
        if self.per_step == 1 {
            return;
        }
        // SAFETY: the caller's promise, passed on: rows of words lie as far apart as those of the sums.
        unsafe {
            (self.kernels.pack)(T::DTYPE)(&PackTask {
                from: block.cast(),
                step_stride: (self.per_step * self.per_step * row) as isize,
                lane_stride: 1,
                depth: self.steps(rows),
                elements: rows,
                count: columns,
                to: to.data.cast_mut(),
                width: to.step,
                panel_stride: to.row,
            });
        }
    }
}
