//! The two kinds of memory of a device, and tensors in either.

use std::sync::Arc;

use crate::core::layout::Layout;
use crate::cuda;
use crate::memory::buffer::Buffer;
use crate::memory::pool::Category;
use crate::{DType, Device, Error, Result, Tensor};

/// A kind of memory of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MemoryKind {
    /// The device's own memory.
    #[default]
    Device,
    /// Offload memory. On a CPU device it is file-backed: accessed like any memory, and cached in RAM by the
    /// operating system. On a GPU it is pinned host memory.
    Host,
}

impl Tensor {
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

    /// Starts reading the buffer if it is in a mapped file, because it will be used soon.
    pub fn prefetch(&self) {
        self.buffer().prefetch(0, self.buffer_bytes());
    }
}
