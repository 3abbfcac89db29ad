//! Fills and copies of whole tensors, on either device and in either kind of memory.

use std::borrow::Cow;

use crate::cuda;
use crate::kernel_span::kernel_span;
use crate::ops::rows::{CHEAP, for_rows, for_runs};
use crate::ops::table::Unary;
use crate::{DType, Device, Element, Error, Real, Result, Tensor, dispatch_any, dispatch_float};

impl Tensor {
    /// A tensor of zeros.
    pub fn zeros(device: &Device, dtype: DType, dims: &[usize]) -> Result<Tensor> {
        let mut tensor = Self::empty(device, dtype, dims)?;
        tensor.zero_fill()?;
        Ok(tensor)
    }

    /// A tensor filled with one value.
    ///
    /// Errors if `dtype` is an integer and `value` is none of its values.
    pub fn full(device: &Device, dtype: DType, dims: &[usize], value: f64) -> Result<Tensor> {
        if !dtype.is_float() {
            let (least, most) = match dtype {
                DType::U8 => (0.0, f64::from(u8::MAX)),
                DType::U32 => (0.0, f64::from(u32::MAX)),
                _ => (i64::MIN as f64, (i64::MAX - 1023) as f64), // the largest f64 below 2^63
            };
            if value.fract() != 0.0 || !(least..=most).contains(&value) {
                return Err(Error::value("full", format!("{value} is no value of {dtype}")));
            }
            let one = Self::constant(device, &[value], &[])?.cast(dtype)?;
            let mut tensor = Self::empty(device, dtype, dims)?;
            tensor.copy_from(&one.broadcast_to(dims)?)?;
            return Ok(tensor);
        }
        if device.gpu().is_some() {
            let zeros = Self::zeros(device, dtype, dims)?;
            let mut tensor = Self::empty(device, dtype, dims)?;
            cuda::pointwise::unary(Unary::AddScalar, value, &zeros, &mut tensor)?;
            return Ok(tensor);
        }
        let mut tensor = Self::empty(device, dtype, dims)?;
        // Large tensors of a fake device are not touched; single numbers are, since the host reads some of them.
        if device.is_fake() && tensor.numel() > 1024 {
            return Ok(tensor);
        }
        dispatch_float!("full", dtype, T => {
            tensor.as_mut_slice::<T>()?.fill(T::from_acc(Real::from_f64(value)));
        });
        Ok(tensor)
    }

    /// The same elements, dense in row-major order: this tensor if it is contiguous, else a copy.
    pub fn contiguous(&self) -> Result<Tensor> {
        self.to_contiguous().map(Cow::into_owned)
    }

    /// [`Tensor::contiguous`] for a kernel, which need not hold the tensor itself.
    pub(crate) fn to_contiguous(&self) -> Result<Cow<'_, Tensor>> {
        if self.is_contiguous() {
            return Ok(Cow::Borrowed(self));
        }
        let mut out = Self::empty(self.device(), self.dtype(), self.dims())?;
        if self.device().gpu().is_some() {
            cuda::copy::copy(self, &mut out)?;
            return Ok(Cow::Owned(out));
        }
        let _span = kernel_span!("copy", self.dtype(), 0, [self] => [&out]);
        dispatch_any!(self.dtype(), T => {
            let (width, stride) = self.layout().row();
            let source = self.buffer_slice::<T>()?;
            let device = self.device().clone();
            device.for_each_rows(out.as_mut_slice::<T>()?, width, |first, rows| {
                for (i, row) in rows.chunks_exact_mut(width).enumerate() {
                    let start = self.layout().row_offset(first + i);
                    if stride == 1 {
                        row.copy_from_slice(&source[start..start + width]);
                    } else {
                        for (j, x) in row.iter_mut().enumerate() {
                            *x = source[start + j * stride];
                        }
                    }
                }
            });
        });
        Ok(Cow::Owned(out))
    }

    /// A contiguous copy in a buffer of its own.
    pub fn copy(&self) -> Result<Tensor> {
        let dense = self.contiguous()?;
        if dense.is_unique() {
            return Ok(dense);
        }
        let mut out = Self::empty(self.device(), self.dtype(), self.dims())?;
        out.copy_from(&dense)?;
        Ok(out)
    }

    /// Sets every element of this unique, contiguous tensor to zero.
    pub fn zero_fill(&mut self) -> Result<()> {
        if self.device().gpu().is_some() {
            return cuda::copy::zero_fill(self);
        }
        dispatch_any!(self.dtype(), T => {
            let device = self.device().clone();
            device.for_each_rows(self.as_mut_slice::<T>()?, 1, |_, chunk| chunk.fill(bytemuck::Zeroable::zeroed()));
        });
        Ok(())
    }

    /// Overwrites this unique tensor with the elements of `source`.
    ///
    /// Errors if dims or dtype differ, or the buffer has another holder.
    pub fn copy_from(&mut self, source: &Tensor) -> Result<()> {
        if self.dims() != source.dims() || self.dtype() != source.dtype() {
            return Err(Error::shape("copy_from", format!("{source:?} does not fill {self:?}")));
        }
        if self.device().gpu().is_some() {
            return cuda::copy::copy(source, self);
        }
        let source = source.to_contiguous()?;
        let device = self.device().clone();
        dispatch_any!(self.dtype(), T => {
            let source = source.as_slice::<T>()?;
            if !self.is_contiguous() {
                return for_runs(self, source, |x, source| match (x, source) {
                    ([x], [source]) => *x = *source,
                    (x, source) => x.copy_from_slice(source),
                });
            }
            let work = source.len() / CHEAP;
            for_rows(&device, (self.as_mut_slice::<T>()?, 1), work, |first, part| {
                part.copy_from_slice(&source[first..][..part.len()]);
            });
        });
        Ok(())
    }

    /// Copies into a contiguous `target` of equal dims and dtype, in either kind of memory. It does not use the
    /// device's threads, which may be busy; on a GPU the copy is enqueued in the compute stream.
    ///
    /// Errors if dims or dtypes differ, if a tensor is not contiguous, or if `target` has another holder.
    pub fn move_to(&self, target: &mut Tensor) -> Result<()> {
        if self.dims() != target.dims() || self.dtype() != target.dtype() {
            return Err(Error::shape("move_to", format!("{self:?} does not fill {target:?}")));
        }
        if self.device().is_fake() {
            return Ok(());
        }
        if self.device().gpu().is_some() {
            return cuda::copy::copy(self, target);
        }
        target.write_bytes(|bytes| {
            bytes.copy_from_slice(&self.bytes()?);
            Ok(())
        })
    }
}

/// The tensor itself if it is unique and contiguous, so that it can be written, else a copy.
pub fn into_unique(x: Tensor) -> Result<Tensor> {
    if x.is_unique() && x.is_contiguous() { Ok(x) } else { x.copy() }
}
