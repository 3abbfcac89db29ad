//! Comparisons, and choices between elements of two tensors by a condition.

use super::zip_rows;
use crate::core::layout::broadcast_dims;
use crate::core::tensor::{check_device, check_pair};
use crate::cuda;
use crate::numeric::simd::vectorized;
use crate::ops::rows::{CHEAP, for_rows};
use crate::ops::table::Comparison;
use crate::{DType, Error, Result, Scalar, Tensor, dispatch_any};

vectorized! {
    /// Elements of `yes` where `conditions` are not 0, else of `no`, each with a stride.
    fn select_row<T: Scalar>(out: &mut [T], conditions: (&[u8], usize), yes: (&[T], usize), no: (&[T], usize)) {
        let ((conditions, c), (yes, y), (no, n)) = (conditions, yes, no);
        match (c, y, n) {
            (1, 1, 1) => {
                for (((out, &c), &y), &n) in out.iter_mut().zip(conditions).zip(yes).zip(no) {
                    *out = if c != 0 { y } else { n };
                }
            }
            (1, 0, 1) => {
                let y = yes[0];
                for ((out, &c), &n) in out.iter_mut().zip(conditions).zip(no) {
                    *out = if c != 0 { y } else { n };
                }
            }
            (1, 1, 0) => {
                let n = no[0];
                for ((out, &c), &y) in out.iter_mut().zip(conditions).zip(yes) {
                    *out = if c != 0 { y } else { n };
                }
            }
            _ => {
                for (i, out) in out.iter_mut().enumerate() {
                    *out = if conditions[i * c] != 0 { yes[i * y] } else { no[i * n] };
                }
            }
        }
    }
}

/// A u8 tensor that is 1 where the comparison holds; broadcasts, any dtype.
pub fn compare(comparison: Comparison, lhs: &Tensor, rhs: &Tensor) -> Result<Tensor> {
    check_pair("compare", lhs, rhs)?;
    let dims = broadcast_dims("compare", lhs.dims(), rhs.dims())?;
    let mut out = Tensor::empty(lhs.device(), DType::U8, &dims)?;
    if lhs.device().gpu().is_some() {
        cuda::pointwise::compare(comparison, lhs, rhs, &mut out)?;
        return Ok(out);
    }
    dispatch_any!(lhs.dtype(), T => zip_rows::<T, u8>(&mut out, lhs, rhs, CHEAP, |out, a, a_stride, b, b_stride| {
        for (i, y) in out.iter_mut().enumerate() {
            let (a, b) = (a[i * a_stride], b[i * b_stride]);
            *y = u8::from(match comparison {
                Comparison::Eq => a == b,
                Comparison::Ne => a != b,
                Comparison::Lt => a < b,
                Comparison::Le => a <= b,
                Comparison::Gt => a > b,
                Comparison::Ge => a >= b,
            });
        }
    })?);
    Ok(out)
}

/// Elements of `yes` where the u8 `condition` is not 0, else of `no`; all three broadcast.
pub fn where_cond(condition: &Tensor, yes: &Tensor, no: &Tensor) -> Result<Tensor> {
    check_pair("where", yes, no)?;
    check_device("where", condition, yes)?;
    if condition.dtype() != DType::U8 {
        let message =
            format!("the condition is {}: it must be u8, as `gt` gives", condition.dtype());
        return Err(Error::dtype("where", message));
    }
    let dims = broadcast_dims(
        "where",
        condition.dims(),
        &broadcast_dims("where", yes.dims(), no.dims())?,
    )?;
    let mut out = Tensor::empty(yes.device(), yes.dtype(), &dims)?;
    if yes.device().gpu().is_some() {
        cuda::pointwise::where_cond(condition, yes, no, &mut out)?;
        return Ok(out);
    }
    let (work, device) = (out.numel() / CHEAP, out.device().clone());
    let layouts = [condition, yes, no].map(|x| x.layout().broadcast_to(&dims));
    let [flags, first, second] = layouts;
    let layouts = [flags?, first?, second?];
    // One row of all elements, if each operand is dense or one number.
    let flat = layouts.iter().all(|x| x.is_contiguous() || x.strides().iter().all(|&s| s == 0));
    let width = if flat { 1 } else { layouts[0].row().0 };
    let strides = layouts.each_ref().map(|x| match flat {
        true => usize::from(x.is_contiguous()),
        false => x.row().1,
    });
    let conditions = condition.buffer_slice::<u8>()?;
    dispatch_any!(yes.dtype(), T => {
        let (yes, no) = (yes.buffer_slice::<T>()?, no.buffer_slice::<T>()?);
        for_rows(&device, (out.as_mut_slice::<T>()?, width), work, |row, rows| {
            let length = if flat { rows.len() } else { width };
            for (i, out) in rows.chunks_exact_mut(length).enumerate() {
                let [c, y, n] = [0, 1, 2].map(|operand| match flat {
                    true => layouts[operand].offset() + row * strides[operand],
                    false => layouts[operand].row_offset(row + i),
                });
                select_row(out, (&conditions[c..], strides[0]), (&yes[y..], strides[1]), (&no[n..], strides[2]));
            }
        });
    });
    Ok(out)
}
