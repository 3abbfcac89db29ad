//! Transfers between host memory and tensors on any device.

use ferrotron_cuda::device_scalars::BadIndex;
use std::borrow::Cow;

use crate::core::layout::count;
use crate::{Device, Element, Error, Real, Result, Scalar, Tensor, dispatch_any, dispatch_float};

impl Tensor {
    /// A tensor of `dims` with the elements of `data` in row-major order.
    ///
    /// Errors if the number of elements differs.
    pub fn from_slice<T: Scalar>(device: &Device, data: &[T], dims: &[usize]) -> Result<Tensor> {
        check_len("from_slice", data.len(), dims)?;
        device.expect_no_capture("from_slice")?;
        let mut tensor = Self::empty(device, T::DTYPE, dims)?;
        tensor.write_slice(data)?;
        Ok(tensor)
    }

    /// Like [`Tensor::from_slice`], for data that depends only on an operation's arguments. A captured graph replays
    /// it unchanged.
    pub fn constant<T: Scalar>(device: &Device, data: &[T], dims: &[usize]) -> Result<Tensor> {
        let (Some(capture), Some(gpu)) = (device.capture(), device.gpu()) else {
            return Self::from_slice(device, data, dims);
        };
        check_len("constant", data.len(), dims)?;
        let tensor = Self::empty(device, T::DTYPE, dims)?;
        let bytes = bytemuck::cast_slice::<T, u8>(data);
        let from = capture.constant(bytes)?;
        // SAFETY: both have the same length. The buffer is new and used in the order of the compute stream; the
        // capture holds both.
        unsafe { gpu.compute().copy(tensor.address(), from, bytes.len()) }
            .map_err(Error::from_gpu)?;
        Ok(tensor)
    }

    /// Overwrites this unique, contiguous tensor with the elements of `data`. On a GPU the copy is enqueued in the
    /// compute stream, and the host waits only for more than 4 MiB.
    ///
    /// Errors if the dtype or number of elements differs, the buffer has another holder, or the view is not
    /// contiguous.
    ///
    /// ```
    /// use ferrotron_tensor::{Device, Tensor};
    /// let mut x = Tensor::from_slice(&Device::cpu(1)?, &[1_u32, 2], &[2])?;
    /// x.write_slice(&[3_u32, 4])?;
    /// assert_eq!(x.to_vec::<u32>()?, [3, 4]);
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn write_slice<T: Scalar>(&mut self, data: &[T]) -> Result<()> {
        self.check_dtype::<T>("write_slice")?;
        if data.len() != self.numel() {
            let message = format!("{} elements do not fill {self:?}", data.len());
            return Err(Error::shape("write_slice", message));
        }
        if self.device().gpu().is_some() {
            return self.upload("write_slice", bytemuck::cast_slice(data));
        }
        self.as_mut_slice()?.copy_from_slice(data);
        Ok(())
    }

    /// A copy on another device, through host memory; this tensor itself if it is there already.
    ///
    /// ```
    /// use ferrotron_tensor::{Device, Tensor};
    /// let (here, there) = (Device::cpu(1)?, Device::cpu(2)?);
    /// let x = Tensor::from_slice(&here, &[1_i64, 2], &[2])?;
    /// assert_eq!(x.to_device(&there)?.device(), &there);
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn to_device(&self, device: &Device) -> Result<Tensor> {
        if self.device() == device {
            return Ok(self.clone());
        }
        dispatch_any!(self.dtype(), T => Self::from_slice(device, &self.to_vec::<T>()?, self.dims()))
    }

    /// A copy of the elements in row-major order.
    pub fn to_vec<T: Scalar>(&self) -> Result<Vec<T>> {
        self.check_dtype::<T>("to_vec")?;
        let dense = self.contiguous()?;
        if dense.device().gpu().is_none() {
            return Ok(dense.as_slice::<T>()?.to_vec());
        }
        let mut elements = vec![T::zeroed(); self.numel()];
        dense.download("to_vec", bytemuck::cast_slice_mut(&mut elements))?;
        Ok(elements)
    }

    /// A copy of the elements of a floating-point tensor as f64.
    pub fn to_f64(&self) -> Result<Vec<f64>> {
        dispatch_float!("to_f64", self.dtype(), T => {
            Ok(self.to_vec::<T>()?.iter().map(|x| x.acc().f64()).collect())
        })
    }

    /// The value of a floating-point tensor with one element.
    pub fn item(&self) -> Result<f64> {
        match self.to_f64()?[..] {
            [value] => Ok(value),
            ref values => Err(Error::shape(
                "item",
                format!("needs one element, got {} in {:?}", values.len(), self.dims()),
            )),
        }
    }

    /// The bytes of a contiguous tensor: borrowed if the host can read them, else a copy.
    pub fn bytes(&self) -> Result<Cow<'_, [u8]>> {
        if self.device().gpu().is_none() {
            return dispatch_any!(self.dtype(), T => Ok(bytemuck::cast_slice(self.as_slice::<T>()?).into()));
        }
        let mut bytes = vec![0; self.numel() * self.dtype().size()];
        self.download("bytes", &mut bytes)?;
        Ok(bytes.into())
    }

    /// Passes the bytes of this unique, contiguous tensor to `f` for writing. If the host cannot write them, `f` gets
    /// zeros, which are copied to the device afterwards.
    ///
    /// Errors if `f` does, the buffer has another holder, or the view is not contiguous.
    pub fn write_bytes<R>(&mut self, f: impl FnOnce(&mut [u8]) -> Result<R>) -> Result<R> {
        if self.device().gpu().is_none() {
            return dispatch_any!(self.dtype(), T => f(bytemuck::cast_slice_mut(self.as_mut_slice::<T>()?)));
        }
        let mut bytes = vec![0; self.numel() * self.dtype().size()];
        let result = f(&mut bytes)?;
        self.upload("write_bytes", &bytes)?;
        Ok(result)
    }

    /// The address of the view's first element, for device work. A capture in progress keeps the allocation.
    pub(crate) fn address(&self) -> u64 {
        if let Some(capture) = self.device().capture() {
            capture.uses(self.buffer().allocation());
        }
        self.buffer().pointer() as u64 + (self.layout().offset() * self.dtype().size()) as u64
    }

    /// Copies a contiguous GPU tensor to the host, after waiting for all enqueued work.
    ///
    /// Errors if any of that work failed, or an operation has found an index out of range since the last call.
    fn download(&self, op: &'static str, to: &mut [u8]) -> Result<()> {
        let gpu = self.device().expect_gpu(op)?;
        self.device().expect_no_capture(op)?;
        self.expect_contiguous(op)?;
        // SAFETY: a contiguous view's bytes are within its buffer, and only kernels of this stream write them.
        match unsafe { gpu.download(to, self.address()) }.map_err(Error::from_gpu)? {
            None => Ok(()),
            Some(BadIndex { op, position }) => {
                let message =
                    format!("the index at position {position} in row-major order is out of range");
                Err(Error::value(op, message))
            }
        }
    }

    fn upload(&mut self, op: &'static str, from: &[u8]) -> Result<()> {
        self.device().expect_no_capture(op)?;
        self.expect_contiguous(op)?;
        if !self.is_unique() {
            return Err(Error::memory(op, format!("{self:?} has other holders")));
        }
        let gpu = self.device().expect_gpu(op)?;
        // SAFETY: as above, and the buffer has no other holder.
        unsafe { gpu.upload(self.address(), from) }.map_err(Error::from_gpu)
    }

    pub(crate) fn expect_contiguous(&self, op: &'static str) -> Result<()> {
        match self.is_contiguous() {
            true => Ok(()),
            false => {
                Err(Error::shape(op, format!("the view {:?} is not contiguous", self.layout())))
            }
        }
    }
}

/// Errors unless `dims` has `len` elements.
fn check_len(op: &'static str, len: usize, dims: &[usize]) -> Result<()> {
    match len == count(op, dims)? {
        true => Ok(()),
        false => Err(Error::shape(op, format!("{len} elements do not fill {dims:?}"))),
    }
}
