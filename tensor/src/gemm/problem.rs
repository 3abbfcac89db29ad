//! The description of a product, free of element types.

use super::Accum;
use crate::{DType, Element};

/// Lanes below which vectors are hardly filled.
const NARROW: usize = 16;

/// One operand: a lane is a row of the left or a column of the right one, a step one or two indices of k.
#[derive(Clone, Copy)]
pub(super) struct Operand {
    pub data: *const u8,
    pub dtype: DType,
    pub lanes: usize,
    pub lane_stride: isize,
    pub step_stride: isize,
    /// Indices of k in all.
    pub elements: usize,
    /// Indices of k in a step.
    pub per_step: usize,
}

/// The destination of the product.
#[derive(Clone, Copy)]
pub(super) struct Target {
    pub data: *mut u8,
    pub dtype: DType,
    pub row_stride: isize,
    pub column_stride: isize,
}

/// A vector of the target's type to add, and the index it runs along.
#[derive(Clone, Copy)]
pub(super) enum Bias {
    None,
    Rows(*const u8),
    Columns(*const u8),
}

/// target = \[target +\] alpha * lhs * rhs \[+ bias\], with every dimension at least 1.
#[derive(Clone, Copy)]
pub(super) struct Problem {
    pub k: usize,
    pub lhs: Operand,
    pub rhs: Operand,
    pub target: Target,
    pub accum: Accum,
    pub bias: Bias,
}

impl Problem {
    /// The transposed product.
    fn transposed(self) -> Problem {
        let Target { data, dtype, row_stride, column_stride } = self.target;
        Problem {
            lhs: self.rhs,
            rhs: self.lhs,
            target: Target { data, dtype, row_stride: column_stride, column_stride: row_stride },
            bias: match self.bias {
                Bias::None => Bias::None,
                Bias::Rows(data) => Bias::Columns(data),
                Bias::Columns(data) => Bias::Rows(data),
            },
            ..self
        }
    }

    /// Turned so that columns, which fill the vectors, are contiguous, or the longer side of a narrow
    /// target.
    pub(super) fn oriented(self) -> Problem {
        let (m, n) = (self.lhs.lanes, self.rhs.lanes);
        let turn = if m.min(n) < NARROW {
            n < m
        } else {
            self.target.column_stride != 1 && self.target.row_stride == 1
        };
        if turn { self.transposed() } else { self }
    }
}

impl Operand {
    /// Whether a step is an element of `T`, or two that lie together, at a multiple of their size from others.
    pub(super) fn has_steps_of<T: Element>(&self) -> bool {
        match self.per_step {
            1 => self.dtype == T::DTYPE,
            _ => {
                let together = self.step_stride == self.per_step as isize;
                let multiple = self.lane_stride % self.per_step as isize == 0;
                together && multiple && self.elements.is_multiple_of(self.per_step)
            }
        }
    }

    /// Whether the steps of a lane lie together: elements of any type, or words of two.
    pub(super) fn has_steps_together<T: Element>(&self) -> bool {
        match self.per_step {
            1 => self.step_stride == 1,
            _ => self.has_steps_of::<T>(),
        }
    }

    /// The address of an element.
    pub(super) fn at(&self, lane: usize, step: usize) -> *const u8 {
        let offset = lane as isize * self.lane_stride + step as isize * self.step_stride;
        self.data.wrapping_offset(offset * self.dtype.size() as isize)
    }
}

impl Target {
    /// The address of an element.
    pub(super) fn at(&self, row: usize, column: usize) -> *mut u8 {
        let offset = row as isize * self.row_stride + column as isize * self.column_stride;
        self.data.wrapping_offset(offset * self.dtype.size() as isize)
    }
}
