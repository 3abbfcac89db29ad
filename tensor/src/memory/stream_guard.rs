//! Values in use by another GPU stream: offload copies and collectives.
//!
//! A pool reuses blocks in the order of the compute stream. Memory used by another stream is therefore held until the
//! compute stream has enqueued a wait for that use; the host does not wait.

use ferrotron_cuda::stream::Event;
use std::sync::Arc;

use crate::cuda::host_copy_launched;
use crate::{Device, Error, MemoryKind, Result, Tensor};

/// A value in use by another stream until an event. It must not be written, and its results not read, before the
/// event.
///
/// If dropped, the memory returns to its pool after the event.
#[derive(Debug)]
pub struct StreamGuard<T> {
    /// `None` once taken back.
    what: Option<T>,
    until: Arc<Event>,
    device: Device,
}

impl<T> StreamGuard<T> {
    /// Wraps `what`, which a stream of the GPU of `device` uses until the event `until`.
    pub fn new(device: &Device, until: Arc<Event>, what: T) -> StreamGuard<T> {
        StreamGuard { what: Some(what), until, device: device.clone() }
    }

    /// Makes the compute stream wait for the event and returns the value.
    ///
    /// Errors if the GPU has failed.
    pub fn into_inner(mut self) -> Result<T> {
        self.join()?;
        Ok(self.what.take().expect("it is taken here alone"))
    }

    fn join(&self) -> Result<()> {
        let gpu = self.device.gpu();
        gpu.map_or(Ok(()), |gpu| gpu.compute().wait(&self.until)).map_err(Error::from_gpu)
    }
}

impl<T> Drop for StreamGuard<T> {
    fn drop(&mut self) {
        // During a capture the compute stream cannot wait for an event recorded before it, but the host can. A failed
        // GPU no longer uses the memory.
        if self.what.is_some() && self.join().is_err() {
            let _ = self.until.synchronize();
        }
    }
}

/// Starts copying the first tensor of each pair to the second in the GPU's copy stream, after all work enqueued so
/// far. Later compute work overlaps with the copies until the pairs are taken back.
///
/// # Errors
///
/// Errors if the device is not a GPU. Errors if the tensors of a pair differ in dims, dtype or device, are not
/// contiguous, or if the destination has another holder.
pub fn copy_async(pairs: Vec<(Tensor, Tensor)>) -> Result<Vec<StreamGuard<(Tensor, Tensor)>>> {
    let Some((first, _)) = pairs.first() else { return Ok(Vec::new()) };
    let device = first.device().clone();
    let mut copies = Vec::with_capacity(pairs.len());
    for (from, to) in &pairs {
        let alike = from.dims() == to.dims() && from.dtype() == to.dtype();
        if !alike || [from, to].iter().any(|tensor| *tensor.device() != device) {
            return Err(Error::shape("copy_async", format!("{from:?} does not fill {to:?}")));
        }
        from.expect_contiguous("copy_async")?;
        to.expect_contiguous("copy_async")?;
        if !to.is_unique() {
            return Err(Error::memory("copy_async", format!("{to:?} has other holders")));
        }
        let len = from.numel() * from.dtype().size();
        copies.push(Transfer { to: to.address(), from: from.address(), len });
    }
    // SAFETY: the bytes of contiguous views are within their buffers. The destinations have no other holder, and the
    // returned values hold all of them.
    let (until, copied) = unsafe { enqueue_copies(&device, &copies) }?;
    let lent =
        pairs.into_iter().map(|pair| StreamGuard::new(&device, until.clone(), pair)).collect();
    copied.map(|()| lent)
}

/// A copy of `len` bytes between two addresses.
pub(crate) struct Transfer {
    pub to: u64,
    pub from: u64,
    pub len: usize,
}

/// Enqueues copies in the copy stream. If one is rejected, earlier ones may still run until the returned event.
///
/// # Safety
/// The addresses are in pools of the device. Until the compute stream has waited for the returned event, the memory
/// must stay allocated, must not be written, and the destinations must not be read.
pub(crate) unsafe fn enqueue_copies(
    device: &Device,
    copies: &[Transfer],
) -> Result<(Arc<Event>, Result<()>)> {
    let gpu = device.expect_gpu("copy_async")?;
    let given = gpu.compute().record().map_err(Error::from_gpu)?;
    gpu.copies().wait(&given).map_err(Error::from_gpu)?;
    let copied = copies.iter().try_for_each(|&Transfer { to, from, len }| {
        host_copy_launched(len);
        // SAFETY: the caller guarantees the memory, and the stream has waited for its earlier uses.
        unsafe { gpu.copies().copy(to, from, len) }.map_err(Error::from_gpu)
    });
    // Without an event, synchronize with any copies that have started.
    let until = gpu.copies().record().inspect_err(|_| drop(gpu.copies().synchronize()));
    let until = until.map_err(Error::from_gpu)?;
    Ok((Arc::new(until), copied))
}

impl Tensor {
    /// Returns whether the tensor is offloaded: in host memory of a GPU, where kernels are slow.
    pub fn is_offloaded(&self) -> bool {
        self.device().is_gpu() && self.memory_kind() == MemoryKind::Host
    }
}
