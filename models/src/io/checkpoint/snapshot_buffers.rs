//! Buffers for the copy of weights and optimizer state from which a checkpoint is written in the background.
//!
//! A rank holds them from its start to its end, so that its peak memory is known beforehand and no later save can run
//! out of memory. A CPU's are ordinary memory, or the file of offloaded states if the source is there; a GPU's are pinned
//! host memory.

use ferrotron_tensor::{Category, Error, MemoryKind, Result, Staging, Tensor};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::io::checked_file::ChecksumWriter;
use crate::io::tensor_file::put_tensor;

/// The buffers of one rank. They are in use while a writer holds them, too.
pub struct SnapshotBuffers(Arc<Mutex<Vec<Buffer>>>);

/// The copy of one tensor.
pub(super) enum Buffer {
    Host(Tensor),
    /// The copy of a GPU's tensor.
    Pinned(Staging),
}

impl SnapshotBuffers {
    /// Allocates buffers for tensors.
    pub(super) fn for_tensors(tensors: &[Tensor]) -> Result<SnapshotBuffers> {
        let buffers = tensors.iter().map(Buffer::for_tensor).collect::<Result<_>>()?;
        Ok(SnapshotBuffers(Arc::new(Mutex::new(buffers))))
    }

    /// Copies tensors like those of [`SnapshotBuffers::for_tensors`], and returns the buffers for a writer.
    pub(super) fn copy(&self, tensors: &[Tensor]) -> Result<SnapshotBuffers> {
        let mut buffers = self.lock();
        if buffers.len() != tensors.len() {
            let (got, want) = (tensors.len(), buffers.len());
            let message =
                format!("the buffers are made for {want} tensors, {got} are to be copied");
            return Err(Error::shape("checkpoint", message));
        }
        // What a GPU copies is enqueued for all tensors first.
        buffers.iter_mut().zip(tensors).try_for_each(|(buffer, tensor)| buffer.start(tensor))?;
        buffers.iter_mut().try_for_each(Buffer::wait)?;
        Ok(SnapshotBuffers(self.0.clone()))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Vec<Buffer>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether a writer has the buffers.
    pub(super) fn is_in_use(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }
}

impl Buffer {
    fn for_tensor(tensor: &Tensor) -> Result<Buffer> {
        // A copy of a GPU's tensor is made here and overwritten later.
        if let Some(staging) = tensor.contiguous()?.stage_as(Category::Snapshot)? {
            return Ok(Buffer::Pinned(staging));
        }
        let (kind, device) = (tensor.memory_kind(), tensor.device());
        let mut buffer = Tensor::empty_in(kind, device, tensor.dtype(), tensor.dims())?;
        buffer.set_category(Category::Snapshot);
        if kind == MemoryKind::Device {
            buffer.zero_fill()?; // or the first save would wait for the system's pages
        }
        Ok(Buffer::Host(buffer))
    }

    fn start(&mut self, tensor: &Tensor) -> Result<()> {
        match self {
            Buffer::Host(buffer) => buffer.copy_from(tensor),
            Buffer::Pinned(staging) => staging.copy_again(&tensor.contiguous()?),
        }
    }

    fn wait(&mut self) -> Result<()> {
        match self {
            Buffer::Host(_) => Ok(()),
            Buffer::Pinned(staging) => staging.wait(),
        }
    }

    /// Writes the copied bytes to a file.
    pub fn put(&mut self, writer: &mut ChecksumWriter) -> io::Result<()> {
        match self {
            Buffer::Host(tensor) => put_tensor(tensor, writer),
            Buffer::Pinned(staging) => writer.put(staging.bytes().map_err(io::Error::other)?),
        }
    }
}
