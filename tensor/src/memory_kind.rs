//! The two kinds of memory that a device has, and tensors in either.

use std::sync::Arc;

use crate::buffer::Buffer;
use crate::cuda;
use crate::layout::Layout;
use crate::pool::Category;
use crate::{DType, Device, Error, Result, Tensor};

/// Which memory of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MemoryKind {
    /// Its own.
    #[default]
    Device,
    /// Memory beside it, for what is not needed for a while. A CPU's is in files, which it reads and writes like any
    /// memory: the kernel keeps of them in RAM what there is room for.
    Host,
}

impl Tensor {
    /// As [`Tensor::empty`], in one of the device's two kinds of memory.
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
    ///
    /// Errors if the memory cannot be had: a full disk, for example.
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

    /// In which of the device's two kinds of memory the buffer is.
    pub fn memory_kind(&self) -> MemoryKind {
        match self.device().has_in_host_memory(self.buffer()) {
            true => MemoryKind::Host,
            false => MemoryKind::Device,
        }
    }

    /// Fills a contiguous `target` of the same bytes, in either kind of memory, without the device's threads, which may be
    /// busy; on a GPU, in the order of its work.
    ///
    /// Errors if the tensors differ in more than their place, have gaps, or somebody else holds `target`.
    pub fn move_to(&self, target: &mut Tensor) -> Result<()> {
        if self.dims() != target.dims() || self.dtype() != target.dtype() {
            return Err(Error::shape("move_to", format!("{self:?} does not fill {target:?}")));
        }
        if self.device().is_dry() {
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

    /// Begins to read the buffer if it is in host memory, since it is going to be used soon.
    pub fn prefetch(&self) {
        self.buffer().prefetch(0, self.buffer_bytes());
    }
}
