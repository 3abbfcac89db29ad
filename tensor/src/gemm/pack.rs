//! Copying operands into panels, and results out of scratch.

use super::copy_rows::copy_rows;
use super::isa::vector::Vector;
use super::pack_task::{PackTask, is_far};
use crate::numeric::prefetch::{self, LINE};
use crate::{Element, Real};

/// Packs a part of an operand of type `S`.
///
/// # Safety
/// The task's source holds its elements, and its panels have room for `count` lanes rounded up to
/// whole registers.
#[inline(always)]
pub(super) unsafe fn pack<V: Vector, S: Element<Acc = V::Scalar>>(task: &PackTask<V::Scalar>) {
    // SAFETY: the caller's promise, passed on.
    unsafe {
        if task.lane_stride == 1 {
            copy_rows::<V, S>(task);
        } else if task.step_stride == 1 {
            transpose_rows::<V, S>(task);
        } else {
            gather::<V, S>(task);
        }
    }
}

/// Stores the register that begins at the address `to` of a panel.
#[inline(always)]
unsafe fn put<V: Vector>(task: &PackTask<V::Scalar>, vector: V, to: *mut V::Scalar) {
    // SAFETY: the panels have room for whole registers of lanes.
    unsafe {
        if task.width < V::LANES {
            vector.store_halves(to, to.add(task.panel_stride));
        } else {
            vector.store(to);
        }
    }
}

/// The steps of a lane lie together: transpose square blocks.
#[inline(always)]
unsafe fn transpose_rows<V: Vector, S: Element<Acc = V::Scalar>>(task: &PackTask<V::Scalar>) {
    let PackTask { lane_stride, depth, count, to, width, panel_stride, .. } = *task;
    let from = task.from.cast::<S>();
    let far = is_far::<S>(count, lane_stride);
    for lane in (0..count).step_by(V::LANES) {
        let lanes = (count - lane).min(V::LANES);
        let mut from = from.wrapping_offset(lane as isize * lane_stride);
        let mut to = to.wrapping_add(lane / width * panel_stride + lane % width);
        let mut left = depth;
        // SAFETY: the blocks' elements lie within the operand, and panels have whole registers.
        unsafe {
            while left >= V::LANES && lanes == V::LANES {
                // The lanes that are transposed next; a block may be shorter than a line of the cache.
                if far && from.addr() % LINE < V::LANES * size_of::<S>() {
                    for i in 0..V::LANES {
                        prefetch::to_l2(
                            from.wrapping_offset((V::LANES + i) as isize * lane_stride),
                        );
                    }
                }
                for &mut column in V::transposed(from, lane_stride).as_mut() {
                    put(task, column, to);
                    to = to.wrapping_add(width);
                }
                from = from.wrapping_add(V::LANES);
                left -= V::LANES;
            }
            while left > 0 {
                let steps = left.min(V::LANES);
                let mut square = square::<V, S>(from, lane_stride, lanes, steps);
                for &mut column in square.as_mut().iter_mut().take(steps) {
                    put(task, column, to);
                    to = to.wrapping_add(width);
                }
                from = from.wrapping_add(steps);
                left -= steps;
            }
        }
    }
}

/// The transposed block of `lanes` rows by `steps` elements of a storage type, neither more than a register has; the rest
/// is zero. Rows are `stride` elements apart.
///
/// # Safety
/// The block is there.
#[inline(always)]
pub(super) unsafe fn square<V: Vector, S: Element<Acc = V::Scalar>>(
    from: *const S,
    stride: isize,
    lanes: usize,
    steps: usize,
) -> V::Square {
    // SAFETY: the caller's promise.
    unsafe {
        let mut square = V::square();
        for (i, row) in square.as_mut().iter_mut().enumerate().take(lanes) {
            *row = V::widen_first(from.offset(i as isize * stride), steps);
        }
        V::transpose(&mut square);
        square
    }
}

/// No two elements lie together.
#[inline(always)]
unsafe fn gather<V: Vector, S: Element<Acc = V::Scalar>>(task: &PackTask<V::Scalar>) {
    let PackTask { step_stride, lane_stride, depth, count, to, width, panel_stride, .. } = *task;
    let from = task.from.cast::<S>();
    for lane in (0..count).step_by(V::LANES) {
        let mut to = to.wrapping_add(lane / width * panel_stride + lane % width);
        for step in 0..depth {
            let mut lanes = [V::Scalar::ZERO; 16];
            let valid = (count - lane).min(V::LANES);
            for (i, value) in lanes.iter_mut().enumerate().take(valid) {
                let offset = step as isize * step_stride + (lane + i) as isize * lane_stride;
                // SAFETY: the element lies within the operand.
                *value = unsafe { *from.offset(offset) }.acc();
            }
            // SAFETY: 16 lanes are there and LANES is at most 16.
            unsafe { put(task, V::load(lanes.as_ptr()), to) };
            to = to.wrapping_add(width);
        }
    }
}

/// A block of sums and the place that they are rounded to.
pub(super) struct Epilogue<T> {
    /// Row i is contiguous at `from + i * from_row`.
    pub from: *const T,
    pub from_row: isize,
    pub rows: usize,
    pub columns: usize,
    /// First element of the destination; its type is that of the routine. It may be `from`.
    pub to: *mut u8,
    pub row_stride: isize,
    pub column_stride: isize,
    /// First element of a bias of the destination's type, or null.
    pub bias: *const u8,
    /// 1 for the stride along which the bias runs, 0 for the other.
    pub bias_row: usize,
    pub bias_column: usize,
}

/// to = round(from + bias), `D` being the destination's type.
///
/// # Safety
/// The pointers of `task` hold what its documentation says.
#[inline(always)]
pub(super) unsafe fn epilogue<V: Vector, D: Element<Acc = V::Scalar>>(task: &Epilogue<V::Scalar>) {
    let Epilogue { from, from_row, rows, columns, .. } = *task;
    let Epilogue { row_stride, column_stride, bias_row, bias_column, .. } = *task;
    let bias = task.bias.cast::<D>();
    for i in 0..rows {
        // SAFETY: row, column and bias index lie within what the caller vouches for.
        unsafe {
            let from = from.offset(i as isize * from_row);
            let to = task.to.cast::<D>().offset(i as isize * row_stride);
            let mut done = 0;
            while column_stride == 1 && done < columns {
                let lanes = (columns - done).min(V::LANES);
                let whole = lanes == V::LANES;
                let mut value = if whole {
                    V::load(from.add(done))
                } else {
                    V::widen_first(from.add(done), lanes)
                };
                if bias_row == 1 {
                    value = value.add(V::splat((*bias.add(i)).acc()));
                } else if bias_column == 1 {
                    let bias = bias.add(done);
                    value =
                        value.add(if whole { V::widen(bias) } else { V::widen_first(bias, lanes) });
                }
                if whole {
                    value.narrow(to.add(done));
                } else {
                    value.narrow_first(to.add(done), lanes);
                }
                done += lanes;
            }
            for j in done..columns {
                let mut value = *from.add(j);
                if !bias.is_null() {
                    value += (*bias.add(i * bias_row + j * bias_column)).acc();
                }
                *to.offset(j as isize * column_stride) = D::from_acc(value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::isa::Isa;
    use crate::gemm::kernel_table::KernelTable;
    use crate::{DType, bf16, f16};

    /// Numbers around every tie of bf16 and f16, the ends of their ranges, infinities and NaNs.
    fn numbers() -> Vec<f32> {
        let exponents = [0_u32, 1, 100, 102, 112, 113, 127, 142, 143, 254, 255];
        let fractions = [
            0x0_u32, 0x1, 0xFFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0x18000,
            0x7F_7FFF, 0x7F_8000, 0x7F_FFFF,
        ];
        let all = exponents.into_iter().flat_map(|exponent| {
            fractions.into_iter().flat_map(move |fraction| {
                [0, 1].map(|sign| f32::from_bits(sign << 31 | exponent << 23 | fraction))
            })
        });
        all.collect()
    }

    fn check<D: Element<Acc = f32>>(isa: Isa) {
        let numbers = numbers();
        // Whole registers and every number of lanes behind them.
        for columns in 1..=numbers.len() {
            let mut rounded = vec![D::from_acc(0.0); columns];
            let task = Epilogue {
                from: numbers.as_ptr(),
                from_row: 0,
                rows: 1,
                columns,
                to: rounded.as_mut_ptr().cast(),
                row_stride: 0,
                column_stride: 1,
                bias: std::ptr::null(),
                bias_row: 0,
                bias_column: 0,
            };
            // SAFETY: both vectors have `columns` elements, and `isa` is available.
            unsafe { (f32::kernels(isa).epilogue)(D::DTYPE)(&task) };
            for (got, &number) in rounded.iter().zip(&numbers) {
                let want = D::from_acc(number).acc();
                let same = got.acc().to_bits() == want.to_bits()
                    || (D::DTYPE == DType::F16 && want.is_nan() && got.acc().is_nan());
                assert!(
                    same,
                    "{isa:?} {}: {number:e} {:x} became {}",
                    D::DTYPE,
                    number.to_bits(),
                    got.acc()
                );
            }
        }
    }

    #[test]
    fn numbers_are_rounded_as_one_by_one() {
        for isa in Isa::available() {
            check::<bf16>(isa);
            check::<f16>(isa);
        }
    }
}
