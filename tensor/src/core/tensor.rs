//! The tensor: a typed view of a pooled buffer.
//!
//! A tensor is immutable to its users, records no graph and holds no lock; cloning and views are free. Kernels write
//! to a tensor only while it is the sole owner of its buffer.

use std::fmt;
use std::slice;
use std::sync::Arc;

use crate::core::layout::Layout;
use crate::cuda;
use crate::memory::buffer::Buffer;
use crate::memory::pool::Category;
use crate::ops::rows::{CHEAP, for_elements, for_rows};
use crate::{
    DType, Device, Element, Error, MemoryKind, Real, Result, Scalar, dispatch_any, dispatch_float,
};

/// An n-dimensional array of one dtype on one device.
///
/// ```
/// use ferrotron_tensor::{Device, Tensor};
/// let device = Device::cpu(1)?;
/// let x = Tensor::from_slice(&device, &[1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0], &[2, 3])?;
/// assert_eq!(x.transpose(0, 1)?.to_vec::<f32>()?, [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Clone)]
pub struct Tensor {
    buffer: Arc<Buffer>,
    layout: Layout,
    dtype: DType,
    device: Device,
}

impl Tensor {
    /// A tensor with unspecified (but initialised) contents, for a kernel to fill.
    ///
    /// Errors if the memory cannot be allocated.
    pub fn empty(device: &Device, dtype: DType, dims: &[usize]) -> Result<Tensor> {
        Self::empty_in(MemoryKind::Device, device, dtype, dims)
    }

    /// A tensor of zeros.
    pub fn zeros(device: &Device, dtype: DType, dims: &[usize]) -> Result<Tensor> {
        let mut tensor = Self::empty(device, dtype, dims)?;
        tensor.zero_fill()?;
        Ok(tensor)
    }

    /// A floating-point tensor filled with one value.
    pub fn full(device: &Device, dtype: DType, dims: &[usize], value: f64) -> Result<Tensor> {
        if device.gpu().is_some() {
            return Self::zeros(device, dtype, dims)?.add_scalar(value);
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

    pub(crate) fn view_of(
        buffer: Arc<Buffer>,
        layout: Layout,
        dtype: DType,
        device: &Device,
    ) -> Tensor {
        Tensor { buffer, layout, dtype, device: device.clone() }
    }

    pub(crate) fn into_buffer(self) -> Arc<Buffer> {
        self.buffer
    }

    pub(crate) fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    pub(crate) fn with_layout(&self, layout: Layout) -> Tensor {
        Tensor { layout, ..self.clone() }
    }

    /// Sizes, outermost first.
    pub fn dims(&self) -> &[usize] {
        self.layout.dims()
    }

    /// Size of one dim, counted from the end if negative. Errors if there is no such dim.
    pub fn dim(&self, dim: isize) -> Result<usize> {
        Ok(self.dims()[self.resolve("dim", dim)?])
    }

    /// Number of dims.
    pub fn rank(&self) -> usize {
        self.layout.rank()
    }

    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.layout.numel()
    }

    /// Type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The device of the elements.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Dims, strides and offset.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Returns whether the buffer has no other holder, so that a kernel may write to it.
    pub fn is_unique(&self) -> bool {
        Buffer::holders(&self.buffer) == 1
    }

    /// Returns whether the elements are dense in row-major order.
    pub fn is_contiguous(&self) -> bool {
        self.layout.is_contiguous()
    }

    /// Bytes of the whole buffer behind the view.
    pub fn buffer_bytes(&self) -> usize {
        self.buffer.len()
    }

    /// An identifier of the buffer behind the view, equal for all views of it.
    pub fn buffer_id(&self) -> usize {
        Arc::as_ptr(&self.buffer) as usize
    }

    /// The category under which the buffer's bytes are counted.
    pub fn category(&self) -> Category {
        self.buffer.category()
    }

    /// Counts the buffer's bytes under `category` from now on, if they were workspace before.
    pub fn set_category(&self, category: Category) {
        self.buffer.set_category(category);
    }

    /// The elements of a contiguous tensor.
    ///
    /// Errors if `T` is not the dtype or the view is not contiguous.
    pub fn as_slice<T: Scalar>(&self) -> Result<&[T]> {
        self.check_dtype::<T>("as_slice")?;
        if !self.is_contiguous() {
            return Err(Error::shape(
                "as_slice",
                format!("the view {:?} is not contiguous", self.layout),
            ));
        }
        if self.numel() == 0 {
            return Ok(&[]);
        }
        let all = self.buffer_slice::<T>()?;
        Ok(&all[self.layout.offset()..self.layout.offset() + self.numel()])
    }

    /// The elements of a contiguous tensor, for writing.
    ///
    /// Errors if the buffer has another holder, `T` is not the dtype or the view is not contiguous.
    pub fn as_mut_slice<T: Scalar>(&mut self) -> Result<&mut [T]> {
        if !self.is_contiguous() {
            return Err(Error::shape(
                "as_mut_slice",
                format!("the view {:?} is not contiguous", self.layout),
            ));
        }
        let (offset, numel) = (self.layout.offset(), self.layout.numel());
        if numel == 0 {
            return Ok(&mut []);
        }
        Ok(&mut self.buffer_slice_mut::<T>()?[offset..offset + numel])
    }

    /// The whole buffer behind the view, for writing.
    ///
    /// Errors if the buffer has another holder, `T` is not the dtype, or the view contains an element twice. Kernels
    /// write elements of the view from several threads.
    pub(crate) fn buffer_slice_mut<T: Scalar>(&mut self) -> Result<&mut [T]> {
        self.check_dtype::<T>("as_mut_slice")?;
        self.expect_host("as_mut_slice")?;
        if self.layout.overlaps() {
            return Err(Error::shape(
                "as_mut_slice",
                format!("the elements of the broadcast view {:?} overlap", self.dims()),
            ));
        }
        let holders = Buffer::holders(&self.buffer);
        let Some(buffer) = Buffer::unique(&mut self.buffer) else {
            return Err(Error::memory(
                "as_mut_slice",
                format!("the buffer has {holders} holders, writing needs 1"),
            ));
        };
        let len = buffer.len() / size_of::<T>();
        // SAFETY: the buffer's range is `len` initialised elements of the plain type T, aligned since ranges start at
        // multiples of the dtype. The unique `Arc` is borrowed mutably, so there is no other reference to them.
        Ok(unsafe { slice::from_raw_parts_mut(buffer.pointer().cast::<T>(), len) })
    }

    /// Passes this tensor to `f` under another layout of the same elements.
    ///
    /// Errors if `f` does, or if `f` replaces the tensor.
    pub(crate) fn with_layout_mut<R>(
        &mut self,
        layout: Layout,
        f: impl FnOnce(&mut Tensor) -> Result<R>,
    ) -> Result<R> {
        let place = |tensor: &Tensor| (tensor.buffer.pointer(), tensor.buffer.len(), tensor.dtype);
        let lent = place(self);
        let original = std::mem::replace(&mut self.layout, layout);
        let result = f(self);
        if place(self) != lent {
            // The old buffer's layout might exceed the new buffer.
            return Err(Error::memory("view", "a lent view was replaced instead of written"));
        }
        self.layout = original;
        result
    }

    /// The whole buffer behind the view, which `layout` indexes.
    ///
    /// Errors if `T` is not the dtype, or the host cannot read it.
    pub(crate) fn buffer_slice<T: Scalar>(&self) -> Result<&[T]> {
        self.check_dtype::<T>("as_slice")?;
        self.expect_host("as_slice")?;
        // SAFETY: as in `buffer_slice_mut`; writers need a unique `Arc`, which cannot exist while this reference
        // lives.
        Ok(unsafe {
            slice::from_raw_parts(
                self.buffer.pointer().cast::<T>(),
                self.buffer.len() / size_of::<T>(),
            )
        })
    }

    /// The same elements, dense in row-major order: this tensor if it is contiguous, else a copy.
    pub fn contiguous(&self) -> Result<Tensor> {
        if self.is_contiguous() {
            return Ok(self.clone());
        }
        let mut out = Self::empty(&self.device, self.dtype, self.dims())?;
        if self.device.gpu().is_some() {
            cuda::copy::copy(self, &mut out)?;
            return Ok(out);
        }
        dispatch_any!(self.dtype, T => {
            let (width, stride) = self.layout.row();
            let source = self.buffer_slice::<T>()?;
            let device = self.device.clone();
            device.for_each_rows(out.as_mut_slice::<T>()?, width, |first, rows| {
                for (i, row) in rows.chunks_exact_mut(width).enumerate() {
                    let start = self.layout.row_offset(first + i);
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
        Ok(out)
    }

    /// A contiguous copy in a buffer of its own.
    pub fn copy(&self) -> Result<Tensor> {
        let dense = self.contiguous()?;
        if dense.is_unique() {
            return Ok(dense);
        }
        let mut out = Self::empty(&self.device, self.dtype, self.dims())?;
        out.copy_from(&dense)?;
        Ok(out)
    }

    /// Sets every element of this unique, contiguous tensor to zero.
    pub fn zero_fill(&mut self) -> Result<()> {
        if self.device.gpu().is_some() {
            return cuda::copy::zero_fill(self);
        }
        dispatch_any!(self.dtype, T => {
            let device = self.device.clone();
            device.for_each_rows(self.as_mut_slice::<T>()?, 1, |_, chunk| chunk.fill(bytemuck::Zeroable::zeroed()));
        });
        Ok(())
    }

    /// Overwrites this unique tensor with the elements of `source`.
    ///
    /// Errors if dims or dtype differ, or the buffer has another holder.
    pub fn copy_from(&mut self, source: &Tensor) -> Result<()> {
        if self.dims() != source.dims() || self.dtype != source.dtype {
            return Err(Error::shape("copy_from", format!("{source:?} does not fill {self:?}")));
        }
        if self.device.gpu().is_some() {
            return cuda::copy::copy(source, self);
        }
        let source = source.contiguous()?;
        let device = self.device.clone();
        dispatch_any!(self.dtype, T => {
            let source = source.as_slice::<T>()?;
            if !self.is_contiguous() {
                return for_elements(self, source, |x, source| *x = *source);
            }
            let work = source.len() / CHEAP;
            for_rows(&device, (self.as_mut_slice::<T>()?, 1), work, |first, part| {
                part.copy_from_slice(&source[first..][..part.len()]);
            });
        });
        Ok(())
    }

    pub(crate) fn check_dtype<T: Scalar>(&self, op: &'static str) -> Result<()> {
        if T::DTYPE != self.dtype {
            return Err(Error::dtype(
                op,
                format!("the tensor is {}, asked for {}", self.dtype, T::DTYPE),
            ));
        }
        Ok(())
    }

    /// The index of a dim that may be counted from the end. Errors if there is none.
    pub(crate) fn resolve(&self, op: &'static str, dim: isize) -> Result<usize> {
        let rank = self.rank() as isize;
        let resolved = if dim < 0 { dim + rank } else { dim };
        if (0..rank).contains(&resolved) {
            Ok(resolved as usize)
        } else {
            Err(Error::shape(op, format!("there is no dim {dim} in {:?}", self.dims())))
        }
    }
}

/// Errors unless both tensors have the same dtype and device.
pub(crate) fn check_pair(op: &'static str, lhs: &Tensor, rhs: &Tensor) -> Result<()> {
    if lhs.dtype() != rhs.dtype() {
        return Err(Error::dtype(
            op,
            format!("operands differ: lhs {}, rhs {}; cast one of them", lhs.dtype(), rhs.dtype()),
        ));
    }
    check_device(op, lhs, rhs)
}

/// Errors unless both tensors are on the same device.
pub(crate) fn check_device(op: &'static str, lhs: &Tensor, rhs: &Tensor) -> Result<()> {
    if lhs.device() != rhs.device() {
        return Err(Error::value(op, "operands are on different devices"));
    }
    Ok(())
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({} {:?})", self.dtype, self.dims())
    }
}
