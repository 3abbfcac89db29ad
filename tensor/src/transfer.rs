//! Elements from the host to a tensor and back, on any device.

use ferrotron_cuda::cells::BadIndex;
use std::borrow::Cow;

use crate::layout::count;
use crate::{
    Device, Element, Error, MemoryKind, Real, Result, Scalar, Tensor, dispatch_any, dispatch_float,
};

impl Tensor {
    /// A tensor of `dims` with the elements of `data` in row-major order.
    ///
    /// Errors if the number of elements differs.
    pub fn from_slice<T: Scalar>(device: &Device, data: &[T], dims: &[usize]) -> Result<Tensor> {
        if data.len() != count("from_slice", dims)? {
            return Err(Error::shape(
                "from_slice",
                format!("{} elements do not fill {dims:?}", data.len()),
            ));
        }
        let mut tensor = Self::empty(device, T::DTYPE, dims)?;
        tensor.write_bytes(|bytes| {
            bytes.copy_from_slice(bytemuck::cast_slice(data));
            Ok(())
        })?;
        Ok(tensor)
    }

    /// A copy of the elements in row-major order.
    pub fn to_vec<T: Scalar>(&self) -> Result<Vec<T>> {
        self.check_dtype::<T>("to_vec")?;
        let dense = self.contiguous()?;
        if dense.device().gpu().is_none() {
            return Ok(dense.as_slice::<T>()?.to_vec());
        }
        let mut elements = vec![T::zeroed(); self.numel()];
        dense.download(bytemuck::cast_slice_mut(&mut elements))?;
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

    /// The bytes of a contiguous tensor: its own where the host can read them, else a copy.
    pub fn bytes(&self) -> Result<Cow<'_, [u8]>> {
        if self.device().gpu().is_none() {
            return dispatch_any!(self.dtype(), T => Ok(bytemuck::cast_slice(self.as_slice::<T>()?).into()));
        }
        let mut bytes = vec![0; self.numel() * self.dtype().size()];
        self.download(&mut bytes)?;
        Ok(bytes.into())
    }

    /// Lets `f` write the bytes of this unique, contiguous tensor: its own where the host can write them, else zeros
    /// that are copied to the device afterwards.
    ///
    /// Errors if `f` does, somebody else holds the buffer, or the view has gaps.
    pub fn write_bytes<R>(&mut self, f: impl FnOnce(&mut [u8]) -> Result<R>) -> Result<R> {
        if self.device().gpu().is_none() {
            return dispatch_any!(self.dtype(), T => f(bytemuck::cast_slice_mut(self.as_mut_slice::<T>()?)));
        }
        let mut bytes = vec![0; self.numel() * self.dtype().size()];
        let result = f(&mut bytes)?;
        self.upload(&bytes)?;
        Ok(result)
    }

    /// The address of the view's first element.
    pub(crate) fn address(&self) -> u64 {
        self.buffer().pointer() as u64 + (self.layout().offset() * self.dtype().size()) as u64
    }

    /// Copies a contiguous tensor of a GPU, when everything that was given to the GPU is done.
    ///
    /// Errors if any of it has failed, or an operation has found an index out of range since the last time.
    fn download(&self, to: &mut [u8]) -> Result<()> {
        let gpu = self.device().expect_gpu("download")?;
        self.expect_contiguous("download")?;
        // SAFETY: a contiguous view's bytes are within its buffer, and only kernels of this stream write them.
        unsafe { gpu.compute().download(to, self.address()) }.map_err(Error::of_gpu)?;
        match gpu.take_bad_index().map_err(Error::of_gpu)? {
            None => Ok(()),
            Some(BadIndex { op, position }) => {
                let message =
                    format!("the index at position {position} in row-major order is out of range");
                Err(Error::value(op, message))
            }
        }
    }

    fn upload(&mut self, from: &[u8]) -> Result<()> {
        self.expect_contiguous("upload")?;
        if !self.is_unique() {
            return Err(Error::memory("upload", format!("{self:?} has other holders")));
        }
        let gpu = self.device().expect_gpu("upload")?;
        // SAFETY: as above, and nobody else holds the buffer.
        unsafe { gpu.upload(self.address(), from) }.map_err(Error::of_gpu)
    }

    pub(crate) fn expect_contiguous(&self, op: &'static str) -> Result<()> {
        match self.is_contiguous() {
            true => Ok(()),
            false => {
                Err(Error::shape(op, format!("the view {:?} is not contiguous", self.layout())))
            }
        }
    }

    /// Errors if the host cannot follow the tensor's addresses.
    pub(crate) fn expect_host(&self, op: &'static str) -> Result<()> {
        match self.device().gpu() {
            None => Ok(()),
            Some(_) => {
                let device = self.device();
                let kind = match self.memory_kind() {
                    MemoryKind::Device => "memory",
                    MemoryKind::Host => "host memory",
                };
                let message = format!("{self:?} is in {kind} of {device:?}: copy it with to_vec");
                Err(Error::device(op, message))
            }
        }
    }
}
