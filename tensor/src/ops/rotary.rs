//! Rotary position embedding (Su et al., 2021), in the rotate-half convention of Hugging Face.
//!
//! With h = R/2 for a rotary dim R <= D, position p and i < h: `angle = p base^(-2i/R)` and
//!
//! - forward: `y[i] = x[i] cos - x[i+h] sin`, `y[i+h] = x[i+h] cos + x[i] sin`;
//! - backward: the inverse rotation, the same with -sin.
//!
//! Elements from R on, and heads beyond the rotated ones, are unchanged. A gradient needs only the table. Angles,
//! sines and cosines are computed in f64, rotations in Acc.

pub(crate) mod table;

pub use table::{Direction, RotaryTable};

use crate::core::tensor::check_device;
use crate::cuda;
use crate::kernel_span::kernel_span;
use crate::numeric::simd::vectorized;
use crate::{Element, Error, Real, Result, Scalar, Tensor, dispatch_float};

/// Rotates the first `heads` heads of x (B, T, H, D) by the table row of each position and copies the other heads.
/// With a packed x (B, T, H + 2G, D) and `heads` = H + G, it rotates queries and keys and leaves values unchanged.
/// The result is contiguous.
///
/// Errors if the table does not have T rows, its dim exceeds D, or `heads` exceeds H.
pub fn rotary(
    x: &Tensor,
    table: &RotaryTable,
    heads: usize,
    direction: Direction,
) -> Result<Tensor> {
    let &[_, positions, all, width] = x.dims() else {
        return Err(Error::shape("rotary", format!("x must be (B, T, H, D), got {:?}", x.dims())));
    };
    if table.positions() != positions || table.dim() > width || heads > all {
        return Err(Error::shape(
            "rotary",
            format!(
                "x {:?} does not go with {heads} heads and a table of {} positions and dim {}",
                x.dims(),
                table.positions(),
                table.dim()
            ),
        ));
    }
    check_device("rotary", x, &table.cos)?;
    // Rows of D elements are read in place; only a strided last dim needs a copy.
    let x = if x.layout().row().1 == 1 || width == 1 { x.clone() } else { x.contiguous()? };
    let device = x.device();
    let mut y = Tensor::empty(device, x.dtype(), x.dims())?;
    if y.numel() == 0 {
        return Ok(y);
    }
    dispatch_float!("rotary", x.dtype(), T => {
        type Acc = <T as Element>::Acc;
        if table.cos.dtype() != Acc::DTYPE {
            let (table, x) = (table.cos.dtype(), x.dtype());
            return Err(Error::dtype(
                "rotary",
                format!("the table is {table}, x is {x}: it needs a table of {}", Acc::DTYPE),
            ));
        }
        if device.gpu().is_some() {
            cuda::rotary::rotary(&x, table, heads, direction, &mut y)?;
            return Ok(y);
        }
        let _span = kernel_span!("rotary", x.dtype(), 0, [&x, &table.cos, &table.sin] => [&y]);
        let (cos, sin) = (table.cos.as_slice::<Acc>()?, table.sin.as_slice::<Acc>()?);
        let half = table.dim() / 2;
        let source = x.buffer_slice::<T>()?;
        let sign = match direction {
            Direction::Forward => Acc::ONE,
            Direction::Backward => -Acc::ONE,
        };
        let stride = x.layout().strides()[2];
        // One row of the loop is one position, whose heads share the angles.
        let position_layout = x.narrow(2, 0, 1)?;
        device.for_each_rows(y.as_mut_slice::<T>()?, all * width, |first, rows| {
            for (i, y) in rows.chunks_exact_mut(all * width).enumerate() {
                let t = (first + i) % positions;
                let angles = t * half..(t + 1) * half;
                let start = position_layout.layout().row_offset(first + i);
                let x = &source[start..start + (all - 1) * stride + width];
                turn_heads(x, stride, heads, width, &cos[angles.clone()], &sin[angles], sign, y);
            }
        });
        Ok(y)
    })
}

vectorized! {
    fn turn_heads<T: Element>(
        x: &[T],
        stride: usize,
        heads: usize,
        width: usize,
        cos: &[T::Acc],
        sin: &[T::Acc],
        sign: T::Acc,
        y: &mut [T],
    ) {
        let half = cos.len();
        for (head, y) in y.chunks_exact_mut(width).enumerate() {
            let x = &x[head * stride..head * stride + width];
            if head >= heads {
                y.copy_from_slice(x);
                continue;
            }
            let (x, rest) = x.split_at(2 * half);
            let (y, y_rest) = y.split_at_mut(2 * half);
            y_rest.copy_from_slice(rest);
            let (low, high) = x.split_at(half);
            let (y_low, y_high) = y.split_at_mut(half);
            let angles = cos.iter().zip(sin);
            for (((&a, &b), (c, d)), (&cos, &sin)) in
                low.iter().zip(high).zip(y_low.iter_mut().zip(y_high)).zip(angles)
            {
                let (a, b, sin) = (a.acc(), b.acc(), sign * sin);
                *c = T::from_acc(a * cos - b * sin);
                *d = T::from_acc(b * cos + a * sin);
            }
        }
    }
}
