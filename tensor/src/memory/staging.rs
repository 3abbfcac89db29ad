//! Gives collectives access to GPU data: a pinned host copy or the device address.

use ferrotron_cuda::stream::Event;

use crate::memory::flat::FlatBuffer;
use crate::memory::pool::Category;
use crate::{DType, Device, Error, MemoryKind, Result, Tensor};

/// A copy of GPU data in pinned host memory. The copy follows all work enqueued before it. Work enqueued after it was
/// [taken back](Tensor::take_back) sees the host's changes; the host waits only in [`Staging::wait`].
#[derive(Debug)]
pub struct Staging {
    bytes: Tensor,
    /// Completion of the copy; `None` once waited for.
    arrival: Option<Event>,
}

impl Staging {
    /// Enqueues a copy of `len` bytes from `address` on.
    ///
    /// # Safety
    /// The bytes are in memory of the GPU of `device` that only its compute stream writes.
    unsafe fn new(
        device: &Device,
        address: u64,
        len: usize,
        category: Category,
    ) -> Result<Staging> {
        let gpu = device.expect_gpu("stage")?;
        device.expect_no_capture("stage")?;
        let bytes = Tensor::empty_in(MemoryKind::Host, device, DType::U8, &[len])?;
        bytes.set_category(category);
        // Earlier uses of the block were enqueued in the same stream.
        // SAFETY: the block has no other holder, and the caller guarantees the source.
        unsafe { gpu.compute().copy(bytes.address(), address, len) }.map_err(Error::from_gpu)?;
        let arrival = Some(gpu.compute().record().map_err(Error::from_gpu)?);
        Ok(Staging { bytes, arrival })
    }

    /// Waits until the copy is complete.
    ///
    /// Errors if any work enqueued before it failed.
    pub fn wait(&mut self) -> Result<()> {
        if let Some(arrival) = &self.arrival {
            arrival.synchronize().map_err(Error::from_gpu)?;
            self.arrival = None;
        }
        Ok(())
    }

    /// The bytes, for the host to change.
    ///
    /// Errors unless [`Staging::wait`] was called.
    pub fn bytes(&mut self) -> Result<&mut [u8]> {
        if self.arrival.is_some() {
            return Err(Error::device("staging", "the copy was not waited for"));
        }
        let len = self.bytes.numel();
        // SAFETY: pinned memory has the same address for the host. The block has no other holder, the copy into it is
        // complete, and `write_to`, which copies out of it, consumes the value.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.bytes.address() as *mut u8, len) })
    }

    /// Enqueues another copy into the same block, which then has to be waited for again.
    ///
    /// Errors unless `tensor` is contiguous, of the same GPU, and has as many bytes.
    pub fn copy_again(&mut self, tensor: &Tensor) -> Result<()> {
        let len = tensor.numel() * tensor.dtype().size();
        if self.bytes.device() != tensor.device() || self.bytes.numel() != len {
            let message = format!("{self:?} does not take {tensor:?}");
            return Err(Error::memory("staging", message));
        }
        tensor.expect_contiguous("stage")?;
        let gpu = tensor.device().expect_gpu("stage")?;
        tensor.device().expect_no_capture("stage")?;
        // SAFETY: a contiguous view's bytes are within its buffer, only kernels of this stream write them, and the block
        // has no other holder.
        unsafe { gpu.compute().copy(self.bytes.address(), tensor.address(), len) }
            .map_err(Error::from_gpu)?;
        self.arrival = Some(gpu.compute().record().map_err(Error::from_gpu)?);
        Ok(())
    }

    /// Enqueues a copy back to the GPU.
    ///
    /// # Safety
    /// As for `new`, and the memory has no other holder.
    unsafe fn write_to(self, device: &Device, address: u64, len: usize) -> Result<()> {
        if self.bytes.device() != device || self.bytes.numel() != len {
            let message = format!("{self:?} does not fit {len} bytes of {device:?}");
            return Err(Error::memory("staging", message));
        }
        let gpu = device.expect_gpu("staging")?;
        // SAFETY: the block returns to the pool in the order of this stream, and the caller guarantees the
        // destination.
        unsafe { gpu.compute().copy(address, self.bytes.address(), len) }.map_err(Error::from_gpu)
    }
}

impl Tensor {
    /// Starts copying a contiguous tensor to the host; `None` if it is in host-accessible memory already.
    ///
    /// ```
    /// use ferrotron_tensor::{Device, Tensor};
    /// let x = Tensor::from_slice(&Device::cpu(1)?, &[1.0_f32], &[1])?;
    /// assert!(x.stage()?.is_none());
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn stage(&self) -> Result<Option<Staging>> {
        self.stage_as(Category::Communication)
    }

    /// Like [`Tensor::stage`], for another use than a collective's: the copy is counted under `category`.
    pub fn stage_as(&self, category: Category) -> Result<Option<Staging>> {
        if self.device().gpu().is_none() {
            return Ok(None);
        }
        self.expect_contiguous("stage")?;
        let len = self.numel() * self.dtype().size();
        // SAFETY: a contiguous view's bytes are within its buffer, and only kernels of this stream write them.
        unsafe { Staging::new(self.device(), self.address(), len, category) }.map(Some)
    }

    /// Enqueues overwriting this unique, contiguous tensor with the staged copy.
    pub fn take_back(&mut self, staging: Staging) -> Result<()> {
        self.expect_contiguous("take_back")?;
        if !self.is_unique() {
            return Err(Error::memory("take_back", format!("{self:?} has other holders")));
        }
        let len = self.numel() * self.dtype().size();
        // SAFETY: as in `stage`, and the buffer has no other holder.
        unsafe { staging.write_to(self.device(), self.address(), len) }
    }
}

impl Tensor {
    /// The device address of the first element of this unique, contiguous GPU tensor, for use by a library. The
    /// library may use another stream between two events of the compute stream; the tensor must be kept until the
    /// second.
    ///
    /// Errors unless the tensor has `numel` elements.
    pub fn device_ptr(&mut self, numel: usize) -> Result<u64> {
        self.device().expect_gpu("device_ptr")?;
        self.expect_contiguous("device_ptr")?;
        if !self.is_unique() {
            return Err(Error::memory("device_ptr", format!("{self:?} has other holders")));
        }
        check_numel(self.numel(), numel)?;
        Ok(self.address())
    }
}

fn check_numel(got: usize, want: usize) -> Result<()> {
    match got == want {
        true => Ok(()),
        false => {
            Err(Error::shape("device_ptr", format!("there are {got} elements, {want} are due")))
        }
    }
}

impl FlatBuffer {
    /// Like [`Tensor::device_ptr`], for all elements.
    pub fn device_ptr(&mut self, numel: usize) -> Result<u64> {
        self.device().expect_gpu("device_ptr")?;
        check_numel(self.numel(), numel)?;
        Ok(self.unique_bytes()?.0)
    }

    /// Like [`Tensor::stage`], for all elements. Errors, naming the range, if a tensor still reads one.
    pub fn stage(&mut self) -> Result<Option<Staging>> {
        if self.device().gpu().is_none() {
            return Ok(None);
        }
        let (address, len) = self.unique_bytes()?;
        // SAFETY: the ranges are contiguous, and only kernels of this stream write them.
        unsafe { Staging::new(self.device(), address, len, Category::Communication) }.map(Some)
    }

    /// Like [`Tensor::take_back`], for all elements.
    pub fn take_back(&mut self, staging: Staging) -> Result<()> {
        let (address, len) = self.unique_bytes()?;
        // SAFETY: as in `stage`, and no range has another holder.
        unsafe { staging.write_to(self.device(), address, len) }
    }

    fn unique_bytes(&mut self) -> Result<(u64, usize)> {
        self.check_writable()?;
        self.keep_in_capture();
        Ok((self.pointer() as u64, self.numel() * self.dtype().size()))
    }
}
