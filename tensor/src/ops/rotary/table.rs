//! The angles of a rotary embedding, and the direction of a rotation.

use crate::ops::rows::for_rows;
use crate::{
    Category, DType, Device, Element, Error, Real, Result, Scalar, Tensor, dispatch_float,
};

/// Nanoseconds of a sine or cosine in f64, roughly.
const TRIGONOMETRIC: usize = 8;

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
    /// Errors if `dtype` is not a float.
    pub fn with_frequencies(
        device: &Device,
        dtype: DType,
        positions: impl IntoIterator<Item = usize>,
        frequencies: &[f64],
    ) -> Result<RotaryTable> {
        let half = frequencies.len();
        let positions: Vec<f64> = positions.into_iter().map(|position| position as f64).collect();
        dispatch_float!("rotary_table", dtype, T => {
            type Acc = <T as Element>::Acc;
            let make = |f: fn(f64) -> f64| {
                let fill = |table: &mut [Acc]| {
                    let work = table.len() * TRIGONOMETRIC;
                    for_rows(device, (table, half), work, |first, rows| {
                        let rows = rows.chunks_exact_mut(half).zip(&positions[first..]);
                        for (row, position) in rows {
                            for (x, frequency) in row.iter_mut().zip(frequencies) {
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
            let (cos, sin) = (make(f64::cos)?, make(f64::sin)?);
            [&cos, &sin].into_iter().for_each(|table| table.set_category(Category::Tables));
            Ok(RotaryTable { cos, sin })
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
