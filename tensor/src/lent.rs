//! Memory that another stream of a GPU works on: copies between the two kinds of memory, collectives.
//!
//! A pool gives blocks out in the order of the compute stream. So whatever another stream uses is held until the compute
//! stream has been told to wait for that; the host waits for nothing.

use ferrotron_cuda::stream::Event;
use std::sync::Arc;

use crate::{Device, Error, MemoryKind, Result, Tensor};

/// What a stream of its own works on until a moment in it. Nobody else may write it before, nor read what is written.
///
/// Dropped, it goes back to its pool behind that moment all the same.
#[derive(Debug)]
pub struct Lent<T> {
    /// Until it is given back.
    what: Option<T>,
    until: Arc<Event>,
    device: Device,
}

impl<T> Lent<T> {
    /// `what`, which a stream of the GPU of `device` uses before `until`.
    pub fn new(device: &Device, until: Arc<Event>, what: T) -> Lent<T> {
        Lent { what: Some(what), until, device: device.clone() }
    }

    /// What was lent, for whatever the compute stream is given from now on.
    ///
    /// Errors if the GPU has failed.
    pub fn take_back(mut self) -> Result<T> {
        self.join()?;
        Ok(self.what.take().expect("it is taken here alone"))
    }

    fn join(&self) -> Result<()> {
        let gpu = self.device.gpu();
        gpu.map_or(Ok(()), |gpu| gpu.compute().wait(&self.until)).map_err(Error::of_gpu)
    }
}

impl<T> Drop for Lent<T> {
    fn drop(&mut self) {
        // While work is captured the compute stream cannot wait for a moment of before, but the host can. A GPU that has
        // failed works on nothing any more.
        if self.what.is_some() && self.join().is_err() {
            let _ = self.until.synchronize();
        }
    }
}

/// Begins to copy the first tensor of each pair to the second one, in a GPU's stream of copies, behind what the GPU was
/// given before. What it is given afterwards runs at the same time, up to where the pairs are taken back.
///
/// Errors if there is no GPU, the tensors of a pair differ in more than their place or have gaps, or somebody else holds a
/// second one.
pub fn copy_aside(pairs: Vec<(Tensor, Tensor)>) -> Result<Vec<Lent<(Tensor, Tensor)>>> {
    let Some((first, _)) = pairs.first() else { return Ok(Vec::new()) };
    let device = first.device().clone();
    let mut copies = Vec::with_capacity(pairs.len());
    for (from, to) in &pairs {
        let alike = from.dims() == to.dims() && from.dtype() == to.dtype();
        if !alike || [from, to].iter().any(|tensor| *tensor.device() != device) {
            return Err(Error::shape("copy_aside", format!("{from:?} does not fill {to:?}")));
        }
        from.expect_contiguous("copy_aside")?;
        to.expect_contiguous("copy_aside")?;
        if !to.is_unique() {
            return Err(Error::memory("copy_aside", format!("{to:?} has other holders")));
        }
        let len = from.numel() * from.dtype().size();
        copies.push(Transfer { to: to.address(), from: from.address(), len });
    }
    // SAFETY: the bytes of contiguous views are within their buffers. Those that are written have no other holder, and all
    // are held by what is returned.
    let (until, copied) = unsafe { give_copies(&device, &copies) }?;
    let lent = pairs.into_iter().map(|pair| Lent::new(&device, until.clone(), pair)).collect();
    copied.map(|()| lent)
}

/// Bytes to be copied.
pub(crate) struct Transfer {
    pub to: u64,
    pub from: u64,
    pub len: usize,
}

/// Gives copies to the stream of copies. Also where one was refused, others may be under way until the moment that comes
/// with the refusal.
///
/// # Safety
/// The addresses are memory of the device's pools, which nobody writes, nor reads what is written, before the compute
/// stream has waited for the moment that is returned, and which stays until then.
pub(crate) unsafe fn give_copies(
    device: &Device,
    copies: &[Transfer],
) -> Result<(Arc<Event>, Result<()>)> {
    let gpu = device.expect_gpu("copy_aside")?;
    let given = gpu.compute().record().map_err(Error::of_gpu)?;
    gpu.copies().wait(&given).map_err(Error::of_gpu)?;
    let copied = copies.iter().try_for_each(|&Transfer { to, from, len }| {
        // SAFETY: the caller answers for the memory, and the stream has waited for what used it before.
        unsafe { gpu.copies().copy(to, from, len) }.map_err(Error::of_gpu)
    });
    // Without a moment to wait for, what may be under way is waited for here.
    let until = gpu.copies().record().inspect_err(|_| drop(gpu.copies().synchronize()));
    let until = until.map_err(Error::of_gpu)?;
    Ok((Arc::new(until), copied))
}

impl Tensor {
    /// Whether kernels had better not work on it: host memory of a GPU.
    pub fn is_far(&self) -> bool {
        self.device().is_gpu() && self.memory_kind() == MemoryKind::Host
    }
}
