//! Pointwise operations: the kernels that execute the rows of [`super::table`].
//!
//! Values and derivatives are computed in [`Element::Acc`] and rounded once. Binary operations broadcast by NumPy's
//! rule. A gradient reuses the buffer of the incoming one if it has no other holder.

mod choice;

pub use choice::{compare, where_cond};

use super::rows::{CHEAP, for_rows, for_rows2, for_runs};
pub use super::table::Comparison;
use super::table::unary::{GeluTanh, Softcap};
use super::table::{Binary, BinaryRow, Saves, Unary, UnaryRow, with_binary, with_unary};
pub use crate::core::copy::into_unique;
use crate::core::layout::broadcast_dims;
use crate::core::tensor::check_pair;
use crate::cuda;
use crate::kernel_span::kernel_span;
use crate::numeric::simd::vectorized;
use crate::{Element, Error, Real, Result, Scalar, Tensor, dispatch_float};
use std::marker::PhantomData;

vectorized! {
    fn unary_chunk<T: Element, Op: UnaryRow>(out: &mut [T], x: &[T], p: f64) {
        let p = T::Acc::from_f64(p);
        for (y, x) in out.iter_mut().zip(x) {
            *y = T::from_acc(Op::value(x.acc(), p));
        }
    }

    fn softcap_chunk<T: Element>(x: &mut [T], cap: f64) {
        let cap = T::Acc::from_f64(cap);
        for x in x {
            *x = T::from_acc(Softcap::value(x.acc(), cap));
        }
    }

    fn unary_gradient_chunk<T: Element, Op: UnaryRow>(dx: &mut [T], saved: &[T], p: f64) {
        let p = T::Acc::from_f64(p);
        for (d, s) in dx.iter_mut().zip(saved) {
            *d = T::from_acc(d.acc() * Op::derivative(s.acc(), p));
        }
    }

    /// One exponential serves both: they are those of [`unary_chunk`] and [`unary_gradient_chunk`].
    fn value_and_gradient_chunk<T: Element, Op: UnaryRow>(value: &mut [T], dx: &mut [T], x: &[T]) {
        for ((y, d), x) in value.iter_mut().zip(dx).zip(x) {
            let x = x.acc();
            *y = T::from_acc(Op::value(x, T::Acc::ONE));
            *d = T::from_acc(d.acc() * Op::derivative(x, T::Acc::ONE));
        }
    }

    pub(super) fn scale_chunk<T: Element>(dx: &mut [T], factor: f64) {
        let factor = T::Acc::from_f64(factor);
        for d in dx {
            *d = T::from_acc(d.acc() * factor);
        }
    }

    fn binary_row<T: Element, Op: BinaryRow>(out: &mut [T], a: &[T], a_stride: usize, b: &[T], b_stride: usize) {
        for_pairs(out, (a, a_stride), (b, b_stride), |y, a, b| *y = T::from_acc(Op::value(a, b)));
    }

    fn binary_gradient_row<T: Element, D: Derivative>(dx: &mut [T], a: &[T], a_stride: usize, b: &[T], b_stride: usize) {
        for_pairs(dx, (a, a_stride), (b, b_stride), |d, a, b| *d = T::from_acc(d.acc() * D::at(a, b)));
    }

    fn add_chunk<T: Element>(out: &mut [T], x: &[T]) {
        for (y, x) in out.iter_mut().zip(x) {
            *y = T::from_acc(y.acc() + x.acc());
        }
    }
}

/// Calls `f(y, a, b)` for each element of `out` and those of two rows with strides.
#[inline(always)]
fn for_pairs<T: Element>(
    out: &mut [T],
    (a, a_stride): (&[T], usize),
    (b, b_stride): (&[T], usize),
    f: impl Fn(&mut T, T::Acc, T::Acc),
) {
    match (a_stride, b_stride) {
        (1, 1) => out.iter_mut().zip(a).zip(b).for_each(|((y, a), b)| f(y, a.acc(), b.acc())),
        (1, 0) => {
            let b = b[0].acc();
            out.iter_mut().zip(a).for_each(|(y, a)| f(y, a.acc(), b));
        }
        (0, 1) => {
            let a = a[0].acc();
            out.iter_mut().zip(b).for_each(|(y, b)| f(y, a, b.acc()));
        }
        _ => out
            .iter_mut()
            .enumerate()
            .for_each(|(i, y)| f(y, a[i * a_stride].acc(), b[i * b_stride].acc())),
    }
}

/// A partial derivative of a binary row.
trait Derivative: 'static {
    /// The constant of [`BinaryRow::VARIES`].
    const VARIES: bool;
    fn at<R: Real>(a: R, b: R) -> R;
}

struct ByLhs<Op>(PhantomData<Op>);
struct ByRhs<Op>(PhantomData<Op>);

impl<Op: BinaryRow> Derivative for ByLhs<Op> {
    const VARIES: bool = Op::VARIES[0];
    #[inline(always)]
    fn at<R: Real>(a: R, b: R) -> R {
        Op::d_lhs(a, b)
    }
}

impl<Op: BinaryRow> Derivative for ByRhs<Op> {
    const VARIES: bool = Op::VARIES[1];
    #[inline(always)]
    fn at<R: Real>(a: R, b: R) -> R {
        Op::d_rhs(a, b)
    }
}

/// `op(x)`. `p` is the parameter of rows that take one; the others ignore it.
pub fn unary(op: Unary, p: f64, x: &Tensor) -> Result<Tensor> {
    let x = x.contiguous()?;
    let mut out = Tensor::empty(x.device(), x.dtype(), x.dims())?;
    if x.device().gpu().is_some() {
        cuda::pointwise::unary(op, p, &x, &mut out)?;
        return Ok(out);
    }
    let _span = kernel_span!(op.name(), x.dtype(), 0, [&x] => [&out]);
    dispatch_float!(op.name(), x.dtype(), T => {
        let source = x.as_slice::<T>()?;
        let chunk: ChunkFn<T> = with_unary!(op, Op => unary_chunk::<T, Op>);
        for_rows(x.device(), (out.as_mut_slice::<T>()?, 1), source.len(), |start, out| {
            chunk(out, &source[start..start + out.len()], p);
        });
    });
    Ok(out)
}

/// `cap tanh(x / cap)`, which overwrites `x` if it has no other holder.
pub(crate) fn softcap_in_place(cap: f64, x: Tensor) -> Result<Tensor> {
    let mut out = into_unique(x)?;
    let device = out.device().clone();
    if device.gpu().is_some() {
        cuda::pointwise::in_place(Unary::Softcap, cap, &mut out)?;
        return Ok(out);
    }
    let _span = kernel_span!("softcap", out.dtype(), 0, [&out] => [&out]);
    dispatch_float!("softcap", out.dtype(), T => {
        let work = out.numel();
        for_rows(&device, (out.as_mut_slice::<T>()?, 1), work, |_, out| {
            softcap_chunk::<T>(out, cap);
        });
    });
    Ok(out)
}

/// `dy * op'(saved)`, where `saved` is the value named by [`Unary::saves`] (`None` for nothing).
pub fn unary_backward(op: Unary, p: f64, dy: Tensor, saved: Option<&Tensor>) -> Result<Tensor> {
    if op == Unary::DivScalar {
        return unary(op, p, &dy); // a product with 1 / p would round twice
    }
    let mut dx = into_unique(dy)?;
    let saved = saved.map(Tensor::contiguous).transpose()?;
    let constant = || with_unary!(op, Op => <Op as UnaryRow>::derivative(0.0_f64, p));
    let device = dx.device().clone();
    if device.gpu().is_some() {
        match (&saved, op.saves()) {
            (Some(saved), Saves::Input | Saves::Output) => {
                cuda::pointwise::unary_backward(op, p, &mut dx, saved)?;
            }
            _ if constant() != 1.0 => {
                cuda::pointwise::in_place(Unary::MulScalar, constant(), &mut dx)?
            }
            _ => {}
        }
        return Ok(dx);
    }
    let read = saved.as_ref().unwrap_or(&dx);
    let _span = kernel_span!(op.name(), dx.dtype(), 0, [&dx, read] => [&dx]);
    dispatch_float!(op.name(), dx.dtype(), T => match (&saved, with_unary!(op, Op => unary_gradient::<T, Op>())) {
        (Some(saved), Some(chunk)) => {
            let saved = saved.as_slice::<T>()?;
            for_rows(&device, (dx.as_mut_slice::<T>()?, 1), saved.len(), |start, dx| {
                chunk(dx, &saved[start..start + dx.len()], p);
            });
        }
        _ => {
            let factor = constant();
            if factor != 1.0 {
                device.for_each_rows(dx.as_mut_slice::<T>()?, 1, |_, dx| scale_chunk::<T>(dx, factor));
            }
        }
    });
    Ok(dx)
}

/// gelu(x), tanh form, and dy gelu'(x), in one pass on a CPU: the bits of [`unary`] and [`unary_backward`].
pub(crate) fn gelu_and_backward(dy: Tensor, x: &Tensor) -> Result<[Tensor; 2]> {
    if x.device().is_gpu() {
        let dx = unary_backward(Unary::GeluTanh, 0.0, dy, Some(x))?;
        return Ok([unary(Unary::GeluTanh, 0.0, x)?, dx]);
    }
    let (x, mut dx) = (x.contiguous()?, into_unique(dy)?);
    let mut value = Tensor::empty(x.device(), x.dtype(), x.dims())?;
    let _span = kernel_span!("gelu_tanh", x.dtype(), 0, [&dx, &x] => [&value, &dx]);
    dispatch_float!("gelu_tanh", x.dtype(), T => {
        let source = x.as_slice::<T>()?;
        let results = ((value.as_mut_slice::<T>()?, 1), (dx.as_mut_slice::<T>()?, 1));
        for_rows2(x.device(), results.0, results.1, source.len(), |start, value, dx| {
            value_and_gradient_chunk::<T, GeluTanh>(value, dx, &source[start..start + dx.len()]);
        });
    });
    Ok([value, dx])
}

/// `op(lhs, rhs)`, with broadcasting.
pub fn binary(op: Binary, lhs: &Tensor, rhs: &Tensor) -> Result<Tensor> {
    check_pair(op.name(), lhs, rhs)?;
    let dims = broadcast_dims(op.name(), lhs.dims(), rhs.dims())?;
    let mut out = Tensor::empty(lhs.device(), lhs.dtype(), &dims)?;
    if out.device().gpu().is_some() {
        cuda::pointwise::binary(op.name(), lhs, rhs, &mut out)?;
        return Ok(out);
    }
    let _span = kernel_span!(op.name(), lhs.dtype(), 0, [lhs, rhs] => [&out]);
    dispatch_float!(op.name(), lhs.dtype(), T => {
        let row: RowFn<T, T> = with_binary!(op, Op => binary_row::<T, Op>);
        zip_rows(&mut out, lhs, rhs, per_nanosecond(op), row)?;
    });
    Ok(out)
}

/// `dy * d op / d lhs` (`side` 0) or `dy * d op / d rhs` (`side` 1), in the broadcast dims of the result. An operand
/// may be `None` if [`Binary::reads`] says that the derivative does not read it.
pub fn binary_backward(
    op: Binary,
    side: usize,
    dy: Tensor,
    lhs: Option<&Tensor>,
    rhs: Option<&Tensor>,
) -> Result<Tensor> {
    let [reads_lhs, reads_rhs] = op.reads()[side];
    let Some(any) = lhs.filter(|_| reads_lhs).or(rhs.filter(|_| reads_rhs)) else {
        let factor = with_binary!(op, Op => if side == 0 { <Op as BinaryRow>::d_lhs(1.0, 1.0) } else { <Op as BinaryRow>::d_rhs(1.0_f64, 1.0) });
        return if factor == 1.0 {
            Ok(dy)
        } else {
            unary_backward(Unary::MulScalar, factor, dy, None)
        };
    };
    // An operand that is not read may be missing; the other one replaces it.
    let (lhs, rhs) = (lhs.unwrap_or(any), rhs.unwrap_or(any));
    let mut dx = into_unique(dy)?;
    if dx.device().gpu().is_some() {
        cuda::pointwise::binary(op.derivative_names()[side], lhs, rhs, &mut dx)?;
        return Ok(dx);
    }
    let _span = kernel_span!(op.name(), dx.dtype(), 0, [&dx, lhs, rhs] => [&dx]);
    dispatch_float!(op.name(), dx.dtype(), T => {
        let row = with_binary!(op, Op => {
            if side == 0 { binary_gradient::<T, ByLhs<Op>>() } else { binary_gradient::<T, ByRhs<Op>>() }
        });
        // It is there: the derivative reads an operand.
        if let Some(row) = row {
            zip_rows(&mut dx, lhs, rhs, per_nanosecond(op), row)?;
        }
    });
    Ok(dx)
}

/// Elements of a binary operation per nanosecond.
fn per_nanosecond(op: Binary) -> usize {
    if op == Binary::Pow { 1 } else { CHEAP }
}

/// A kernel of a unary operation: a pointer, as [`RowFn`].
type ChunkFn<T> = fn(&mut [T], &[T], f64);

/// The kernel of a derivative. A constant decides, so that constant derivatives, which are factors, have none.
const fn unary_gradient<T: Element, Op: UnaryRow>() -> Option<ChunkFn<T>> {
    const { if Op::VARIES { Some(unary_gradient_chunk::<T, Op> as ChunkFn<T>) } else { None } }
}

/// Like [`unary_gradient`], by one of two operands.
const fn binary_gradient<T: Element, D: Derivative>() -> Option<RowFn<T, T>> {
    const { if D::VARIES { Some(binary_gradient_row::<T, D> as RowFn<T, T>) } else { None } }
}

/// A kernel of [`zip_rows`]: a pointer, so that the loops are compiled once for a type and not once for an operation.
type RowFn<T, O> = fn(&mut [O], &[T], usize, &[T], usize);

/// Calls `f(out_row, lhs_row, lhs_stride, rhs_row, rhs_stride)` for blocks of the contiguous `out`, with the operands
/// broadcast to it; `per_nanosecond` elements take a nanosecond.
fn zip_rows<T: Scalar, O: Scalar>(
    out: &mut Tensor,
    lhs: &Tensor,
    rhs: &Tensor,
    per_nanosecond: usize,
    f: impl Fn(&mut [O], &[T], usize, &[T], usize) + Send + Sync,
) -> Result<()> {
    let (device, work) = (out.device().clone(), out.numel() / per_nanosecond);
    let (a, b) = (lhs.buffer_slice::<T>()?, rhs.buffer_slice::<T>()?);
    let (la, lb) = (lhs.layout().broadcast_to(out.dims())?, rhs.layout().broadcast_to(out.dims())?);
    if la.is_contiguous() && lb.is_contiguous() {
        for_rows(&device, (out.as_mut_slice::<O>()?, 1), work, |start, out| {
            f(out, &a[la.offset() + start..], 1, &b[lb.offset() + start..], 1);
        });
        return Ok(());
    }
    let ((width, a_stride), (_, b_stride)) = (la.row(), lb.row());
    for_rows(&device, (out.as_mut_slice::<O>()?, width), work, |first, rows| {
        for (i, row) in rows.chunks_exact_mut(width).enumerate() {
            f(
                row,
                &a[la.row_offset(first + i)..],
                a_stride,
                &b[lb.row_offset(first + i)..],
                b_stride,
            );
        }
    });
    Ok(())
}

/// Adds `x` to the unique `out`, in place.
///
/// Errors if dims or dtype differ, or `out` has another holder.
pub fn add_assign(out: &mut Tensor, x: &Tensor) -> Result<()> {
    check_pair("add_assign", out, x)?;
    if out.dims() != x.dims() {
        return Err(Error::shape(
            "add_assign",
            format!("dims differ: {:?} += {:?}", out.dims(), x.dims()),
        ));
    }
    let x = x.contiguous()?;
    if x.device().gpu().is_some() {
        return cuda::pointwise::add_assign(out, &x);
    }
    let device = out.device().clone();
    let _span = kernel_span!("add_assign", x.dtype(), 0, [out, &x] => [out]);
    dispatch_float!("add_assign", out.dtype(), T => {
        let source = x.as_slice::<T>()?;
        if out.is_contiguous() {
            let out = out.as_mut_slice::<T>()?;
            device.for_each_rows(out, 1, |start, out| add_chunk::<T>(out, &source[start..start + out.len()]));
        } else {
            for_runs(out, source, |y, x| match (y, x) {
                ([y], [x]) => *y = T::from_acc(y.acc() + x.acc()),
                (y, x) => add_chunk::<T>(y, x),
            })?;
        }
    });
    Ok(())
}

#[cfg(test)]
mod tests;
