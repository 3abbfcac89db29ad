//! Rotary position embedding (Su et al., 2021), in the rotate-half convention of Hugging Face.
//!
//! With h = R/2 for a rotary dim R <= D, position p and i < h: `angle = p base^(-2i/R)` and
//!
//! - forward: `y[i] = x[i] cos - x[i+h] sin`, `y[i+h] = x[i+h] cos + x[i] sin`;
//! - backward: the inverse rotation, the same with -sin.
//!
//! Elements from R on, and heads beyond the rotated ones, are unchanged. A gradient needs only the table. Angles are
//! computed in f64, rotations in Acc.

use crate::core::tensor::check_device;
use crate::cuda;
use crate::numeric::simd::vectorized;
use crate::{DType, Device, Element, Error, Real, Result, Scalar, Tensor, dispatch_float};

/// The direction of a rotation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Rotate by the angle: the embedding.
    Forward,
    /// Rotate by minus the angle: the inverse, which is also the gradient.
    Backward,
}

/// Cosines and sines of each position, computed once for all layers and steps.
#[derive(Debug, Clone)]
pub struct RotaryTable {
    cos: Tensor, // (T, R/2)
    sin: Tensor, // (T, R/2)
}

impl RotaryTable {
    /// The table of these positions for tensors of `dtype`, which rotates the first `dim` elements of each head.
    ///
    /// Errors if `dim` is odd, `base` is not positive or `dtype` is not a float.
    ///
    /// ```
    /// use ferrotron_tensor::{DType, Device, ops::rotary::RotaryTable};
    /// let table = RotaryTable::new(&Device::cpu(1)?, DType::F32, 0..1024, 64, 10_000.0)?;
    /// assert_eq!(table.narrow(1000, 24)?.positions(), 24);
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn new(
        device: &Device,
        dtype: DType,
        positions: impl IntoIterator<Item = usize>,
        dim: usize,
        base: f64,
    ) -> Result<RotaryTable> {
        if !dim.is_multiple_of(2) {
            return Err(Error::shape("rotary_table", format!("the dim must be even, got {dim}")));
        }
        if !(base.is_finite() && base > 0.0) {
            return Err(Error::value("rotary_table", format!("base must be positive, got {base}")));
        }
        let half = dim / 2;
        let frequencies: Vec<f64> =
            (0..half).map(|i| base.powf(-2.0 * i as f64 / dim as f64)).collect();
        let positions: Vec<f64> = positions.into_iter().map(|position| position as f64).collect();
        dispatch_float!("rotary_table", dtype, T => {
            type Acc = <T as Element>::Acc;
            let make = |f: fn(f64) -> f64| {
                let fill = |table: &mut [Acc]| {
                    device.for_each_rows(table, half, |first, rows| {
                        let rows = rows.chunks_exact_mut(half).zip(&positions[first..]);
                        for (row, position) in rows {
                            for (x, frequency) in row.iter_mut().zip(&frequencies) {
                                *x = Real::from_f64(f(position * frequency));
                            }
                        }
                    });
                };
                let dims = [positions.len(), half];
                if device.gpu().is_some() {
                    let mut table = vec![Acc::ZERO; dims[0] * dims[1]];
                    fill(&mut table);
                    return Tensor::constant(device, &table, &dims);
                }
                let mut table = Tensor::empty(device, Acc::DTYPE, &dims)?;
                fill(table.as_mut_slice()?);
                Ok::<_, Error>(table)
            };
            Ok(RotaryTable { cos: make(f64::cos)?, sin: make(f64::sin)? })
        })
    }

    /// Rows `start..start + len`, for a tensor that begins later in the sequence.
    pub fn narrow(&self, start: usize, len: usize) -> Result<RotaryTable> {
        Ok(RotaryTable {
            cos: self.cos.narrow(0, start, len)?,
            sin: self.sin.narrow(0, start, len)?,
        })
    }

    /// Number of positions in the table.
    pub fn positions(&self) -> usize {
        self.cos.dims()[0]
    }

    /// A table from cosines and sines, each (T, R/2).
    ///
    /// Errors if their dims or dtypes differ.
    pub fn from_tensors(cos: Tensor, sin: Tensor) -> Result<RotaryTable> {
        if cos.rank() != 2 || (cos.dims(), cos.dtype()) != (sin.dims(), sin.dtype()) {
            let message = format!("needs two of (T, R/2), got {cos:?} and {sin:?}");
            return Err(Error::shape("rotary_table", message));
        }
        Ok(RotaryTable { cos, sin })
    }

    /// Cosines and sines, each (T, R/2).
    pub fn tensors(&self) -> [&Tensor; 2] {
        [&self.cos, &self.sin]
    }

    /// Number of elements of each head that are rotated.
    pub fn dim(&self) -> usize {
        2 * self.cos.dims()[1]
    }
}

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
