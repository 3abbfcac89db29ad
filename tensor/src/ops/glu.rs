//! Gated linear units: y = f(gate) up, where gate and up are the halves of the last dim of x (Shazeer, arXiv 2002.05202).
//!
//! f is [`Unary::Silu`](super::table::Unary::Silu) for SwiGLU, [`Unary::GeluTanh`](super::table::Unary::GeluTanh) for GeGLU.
//! dgate = dy up f'(gate) and dup = dy f(gate); they need x. Values are computed in [`Element::Acc`]; f(gate) and dy up are
//! rounded before they are factors, as separate operations would round them.

use super::pointwise::into_unique;
use super::rows::for_rows;
use super::table::{UnaryRow, unary};
use crate::core::tensor::check_pair;
use crate::cuda;
use crate::kernel_span::kernel_span;
use crate::numeric::simd::vectorized;
use crate::{Element, Error, Real, Result, Tensor, dispatch_float};

/// The function of the gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GluKind {
    /// silu(gate) up
    SwiGlu,
    /// gelu(gate) up, with GELU in its tanh form
    GeGlu,
}

impl GluKind {
    /// The name, as in error messages.
    pub const fn name(self) -> &'static str {
        match self {
            GluKind::SwiGlu => "swiglu",
            GluKind::GeGlu => "geglu",
        }
    }

    const fn backward_name(self) -> &'static str {
        match self {
            GluKind::SwiGlu => "swiglu_backward",
            GluKind::GeGlu => "geglu_backward",
        }
    }
}

vectorized! {
    fn forward_row<T: Element, Op: UnaryRow>(y: &mut [T], x: &[T]) {
        let (gate, up) = x.split_at(y.len());
        for ((y, gate), up) in y.iter_mut().zip(gate).zip(up) {
            let value = T::from_acc(Op::value(gate.acc(), T::Acc::ONE));
            *y = T::from_acc(value.acc() * up.acc());
        }
    }

    fn gradient_row<T: Element, Op: UnaryRow>(x: &mut [T], dy: &[T]) {
        let (gate, up) = x.split_at_mut(dy.len());
        for ((gate, up), dy) in gate.iter_mut().zip(up).zip(dy) {
            let value = T::from_acc(Op::value(gate.acc(), T::Acc::ONE));
            let inner = T::from_acc(dy.acc() * up.acc());
            *up = T::from_acc(dy.acc() * value.acc());
            *gate = T::from_acc(inner.acc() * Op::derivative(gate.acc(), T::Acc::ONE));
        }
    }
}

/// silu(gate) up, (.., F), for x (.., 2F) of gate and up side by side.
///
/// ```
/// use ferrotron_tensor::{Device, Tensor, ops::glu::swiglu};
/// let x = Tensor::from_slice(&Device::cpu(1)?, &[0.0_f64, 1.0, 3.0, 2.0], &[1, 4])?;
/// let y = swiglu(&x)?.to_vec::<f64>()?;
/// assert_eq!(y[0], 0.0);
/// assert!((y[1] - 2.0 / (1.0 + (-1.0_f64).exp())).abs() < 1e-15);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
///
/// Errors if x has no dims, or an odd last dim.
pub fn swiglu(x: &Tensor) -> Result<Tensor> {
    forward(GluKind::SwiGlu, x)
}

/// gelu(gate) up, like [`swiglu`], with GELU in its tanh form.
pub fn geglu(x: &Tensor) -> Result<Tensor> {
    forward(GluKind::GeGlu, x)
}

fn forward(kind: GluKind, x: &Tensor) -> Result<Tensor> {
    let x = x.contiguous()?;
    let dims = halved(kind.name(), &x)?;
    let width = dims[dims.len() - 1];
    let mut y = Tensor::empty(x.device(), x.dtype(), &dims)?;
    if x.device().gpu().is_some() {
        cuda::glu::forward(kind.name(), &x, &mut y)?;
        return Ok(y);
    }
    let _span = kernel_span!(kind.name(), x.dtype(), 0, [&x] => [&y]);
    dispatch_float!(kind.name(), x.dtype(), T => {
        let row: fn(&mut [T], &[T]) = match kind {
            GluKind::SwiGlu => forward_row::<T, unary::Silu>,
            GluKind::GeGlu => forward_row::<T, unary::GeluTanh>,
        };
        let (source, work) = (x.as_slice::<T>()?, y.numel());
        for_rows(x.device(), (y.as_mut_slice::<T>()?, width), work, |first, out| {
            for (i, y) in out.chunks_exact_mut(width).enumerate() {
                let start = 2 * width * (first + i);
                row(y, &source[start..start + 2 * width]);
            }
        });
    });
    Ok(y)
}

/// dx (.., 2F) of [`swiglu`] or [`geglu`], from x and dy (.., F). It overwrites x if that has no other holder.
pub fn glu_backward(kind: GluKind, x: Tensor, dy: &Tensor) -> Result<Tensor> {
    let op = kind.backward_name();
    check_pair(op, &x, dy)?;
    let dims = halved(op, &x)?;
    if dims != dy.dims() {
        let message = format!("needs dy {dims:?} for x {:?}, got {:?}", x.dims(), dy.dims());
        return Err(Error::shape(op, message));
    }
    let width = dims[dims.len() - 1];
    let (dy, mut dx) = (dy.contiguous()?, into_unique(x)?);
    let device = dx.device().clone();
    if device.gpu().is_some() {
        cuda::glu::backward(op, &mut dx, &dy)?;
        return Ok(dx);
    }
    let _span = kernel_span!(op, dx.dtype(), 0, [&dx, &dy] => [&dx]);
    dispatch_float!(op, dx.dtype(), T => {
        let row: fn(&mut [T], &[T]) = match kind {
            GluKind::SwiGlu => gradient_row::<T, unary::Silu>,
            GluKind::GeGlu => gradient_row::<T, unary::GeluTanh>,
        };
        let (source, work) = (dy.as_slice::<T>()?, dx.numel());
        for_rows(&device, (dx.as_mut_slice::<T>()?, 2 * width), work, |first, rows| {
            for (i, x) in rows.chunks_exact_mut(2 * width).enumerate() {
                let start = width * (first + i);
                row(x, &source[start..start + width]);
            }
        });
    });
    Ok(dx)
}

/// The dims of x, the last one halved.
fn halved(op: &'static str, x: &Tensor) -> Result<Vec<usize>> {
    let mut dims = x.dims().to_vec();
    match dims.last_mut() {
        Some(width) if width.is_multiple_of(2) => *width /= 2,
        _ => {
            let message = format!("needs gate and up, (.., 2F), got {:?}", x.dims());
            return Err(Error::shape(op, message));
        }
    }
    Ok(dims)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{message, tensor, values};
    use crate::{DType, Device};

    #[test]
    fn halves_give_the_bits_of_separate_operations() -> Result<()> {
        let device = Device::cpu(2)?;
        for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
            for (rows, width) in [(3, 1), (5, 16), (2, 37), (0, 4), (4, 0)] {
                let x = tensor(&device, dtype, &[rows, 2 * width], &values(2 * rows * width, 1));
                let dy = tensor(&device, dtype, &[rows, width], &values(rows * width, 2));
                let [gate, up] = [0, width].map(|start| x.narrow(1, start, width));
                let (gate, up) = (gate?, up?);
                for kind in [GluKind::SwiGlu, GluKind::GeGlu] {
                    let op = match kind {
                        GluKind::SwiGlu => crate::ops::table::Unary::Silu,
                        GluKind::GeGlu => crate::ops::table::Unary::GeluTanh,
                    };
                    let value = super::super::pointwise::unary(op, 0.0, &gate)?;
                    let y = forward(kind, &x)?;
                    assert_eq!(y.to_f64()?, value.mul(&up)?.to_f64()?, "{kind:?} {dtype}");
                    let inner = dy.mul(&up)?;
                    let dgate =
                        super::super::pointwise::unary_backward(op, 0.0, inner, Some(&gate))?;
                    let want = crate::ops::concat::concat(&[&dgate, &dy.mul(&value)?], 1)?;
                    let dx = glu_backward(kind, x.clone(), &dy)?;
                    assert_eq!(dx.to_f64()?, want.to_f64()?, "{kind:?} {dtype}");
                    assert_eq!(glu_backward(kind, x.copy()?, &dy)?.to_f64()?, want.to_f64()?);
                }
            }
        }
        Ok(())
    }

    #[test]
    fn other_dims_are_refused() -> Result<()> {
        let device = Device::cpu(1)?;
        let zeros = |dims: &[usize]| Tensor::zeros(&device, DType::F32, dims);
        let odd = swiglu(&zeros(&[2, 3])?);
        assert_eq!(message(odd), "swiglu: needs gate and up, (.., 2F), got [2, 3]");
        assert_eq!(message(geglu(&zeros(&[])?)), "geglu: needs gate and up, (.., 2F), got []");
        let dy = glu_backward(GluKind::SwiGlu, zeros(&[2, 4])?, &zeros(&[2, 4])?);
        let want = "swiglu_backward: needs dy [2, 2] for x [2, 4], got [2, 4]";
        assert_eq!(message(dy), want);
        Ok(())
    }
}
