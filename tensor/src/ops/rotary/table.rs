//! The angles of a rotary embedding, and the direction of a rotation.

use tracing::{Dispatch, dispatcher};

use crate::{Category, DType, Device, Element, Error, Result, Scalar, Tensor, dispatch_float};

/// The direction of a rotation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Rotate by the angle: the embedding.
    Forward,
    /// Rotate by minus the angle: the inverse, which is also the gradient.
    Backward,
}

/// Cosines and sines of each position. Their memory counts as [`Category::Tables`].
#[derive(Debug, Clone)]
pub struct RotaryTable {
    pub(super) cos: Tensor, // (T, R/2)
    pub(super) sin: Tensor, // (T, R/2)
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
        Self::with_frequencies(device, dtype, positions, &Self::frequencies(dim, base)?)
    }

    /// The frequencies base^(-2i / dim) of the dim / 2 pairs.
    ///
    /// Errors if `dim` is odd or `base` is not positive.
    pub fn frequencies(dim: usize, base: f64) -> Result<Vec<f64>> {
        if !dim.is_multiple_of(2) {
            return Err(Error::shape("rotary_table", format!("the dim must be even, got {dim}")));
        }
        if !(base.is_finite() && base > 0.0) {
            return Err(Error::value("rotary_table", format!("base must be positive, got {base}")));
        }
        Ok((0..dim / 2).map(|i| base.powf(-2.0 * i as f64 / dim as f64)).collect())
    }

    /// The table of these positions whose angles are position times frequency, for models that scale the frequencies.
    ///
    /// The device computes it from the positions and the frequencies, with 16 bytes an angle beside the table while it
    /// does. Recordings of a step leave this work out, since a table is computed once a run.
    ///
    /// An angle is rounded once, to f64: by 5.8e-11 at most below position 10^6. Sines and cosines are within 1 ulp of f64
    /// on the CPU and 2 ulp on a GPU (CUDA C++ Programming Guide, double-precision functions, full range), and are
    /// then rounded to the accumulator type: tables of CPU and GPU differ by 1 ulp of f32 or 3 ulp of f64.
    ///
    /// Errors if `dtype` is not a float.
    pub fn with_frequencies(
        device: &Device,
        dtype: DType,
        positions: impl IntoIterator<Item = usize>,
        frequencies: &[f64],
    ) -> Result<RotaryTable> {
        let positions: Vec<f64> = positions.into_iter().map(|position| position as f64).collect();
        let accumulator = dispatch_float!("rotary_table", dtype, T => <T as Element>::Acc::DTYPE);
        dispatcher::with_default(&Dispatch::none(), || {
            let positions = Tensor::constant(device, &positions, &[positions.len(), 1])?;
            let frequencies = Tensor::constant(device, frequencies, &[1, frequencies.len()])?;
            let angles = positions.mul(&frequencies)?; // (T, R/2)
            let table = |values: Tensor| {
                let table = values.cast(accumulator)?;
                table.set_category(Category::Tables);
                Ok::<_, Error>(table)
            };
            Ok(RotaryTable { cos: table(angles.cos()?)?, sin: table(angles.sin()?)? })
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

    /// Cosines and sines, each (T, R/2).
    pub fn tensors(&self) -> [&Tensor; 2] {
        [&self.cos, &self.sin]
    }

    /// Number of elements of each head that are rotated.
    pub fn dim(&self) -> usize {
        2 * self.cos.dims()[1]
    }
}
