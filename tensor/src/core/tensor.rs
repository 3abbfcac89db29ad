//! The tensor: a typed view of a pooled buffer.
//!
//! A tensor is immutable to its users, records no graph and holds no lock; cloning and views are free. Kernels write
//! to a tensor only while it is the sole owner of its buffer.

use std::fmt;
use std::slice;
use std::sync::Arc;

use crate::core::layout::Layout;
use crate::memory::buffer::Buffer;
use crate::memory::pool::Category;
use crate::methods::dims::resolve_dim;
use crate::{DType, Device, Error, MemoryKind, Result, Scalar};

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

// The compiler moves values up to this size itself, and calls the C library for larger ones.
const _: () = assert!(size_of::<Tensor>() <= 128);

impl Tensor {
    /// A tensor with unspecified (but initialised) contents, for a kernel to fill.
    ///
    /// Errors if the memory cannot be allocated.
    pub fn empty(device: &Device, dtype: DType, dims: &[usize]) -> Result<Tensor> {
        Self::empty_in(MemoryKind::Device, device, dtype, dims)
    }

    /// Like [`Tensor::empty`], in one of the device's two kinds of memory.
    ///
    /// Errors if the memory cannot be allocated: a full disk, for example.
    ///
    /// ```
    /// use ferrotron_tensor::{DType, Device, MemoryKind, Tensor};
    /// let device = Device::cpu(1)?;
    /// let mut x = Tensor::empty_in(MemoryKind::Host, &device, DType::F32, &[3])?;
    /// x.as_mut_slice::<f32>()?.fill(2.0);
    /// assert_eq!(x.square()?.to_vec::<f32>()?, [4.0; 3]);
    /// assert_eq!((device.memory().current, device.memory_of(MemoryKind::Host).current), (0, 12));
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn empty_in(
        kind: MemoryKind,
        device: &Device,
        dtype: DType,
        dims: &[usize],
    ) -> Result<Tensor> {
        let layout = Layout::contiguous(dims)?;
        let bytes = layout.numel() * dtype.size();
        let buffer = Buffer::new(&device.pool_of(kind), bytes, Category::Workspace)?;
        Ok(Self::view_of(Arc::new(buffer), layout, dtype, device))
    }

    /// The kind of memory of the tensor's buffer.
    pub fn memory_kind(&self) -> MemoryKind {
        match self.device().has_in_host_memory(self.buffer()) {
            true => MemoryKind::Host,
            false => MemoryKind::Device,
        }
    }

    /// Starts reading the buffer if it is in a mapped file, because it will be used soon.
    pub fn prefetch(&self) {
        self.buffer().prefetch(0, self.buffer_bytes());
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
        Tensor::view_of(self.buffer.clone(), layout, self.dtype, &self.device)
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

    /// Errors if the host cannot dereference the tensor's addresses.
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
        resolve_dim(op, self.dims(), dim)
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
        let (lhs, rhs) = (lhs.device(), rhs.device());
        let message = format!(
            "operands are on different devices, lhs on {lhs:?} and rhs on {rhs:?}. Each Device::cpu or Device::cuda is a \
             device of its own: make both tensors on clones of one Device, or copy one with Tensor::to_device"
        );
        return Err(Error::value(op, message));
    }
    Ok(())
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({} {:?}", self.dtype, self.dims())?;
        match self.is_contiguous() {
            true => f.write_str(")"),
            false => write!(f, ", strides {:?})", self.layout.strides()),
        }
    }
}
