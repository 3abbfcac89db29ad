//! What a GPU's tensor or flat holds, for whoever works on it elsewhere: collectives. In memory of the host, or by its
//! address.

use ferrotron_cuda::stream::Event;

use crate::flat::Flat;
use crate::pool::Category;
use crate::{DType, Device, Error, MemoryKind, Result, Tensor};

/// A copy of bytes of a GPU in pinned memory of the host. What the GPU was given before comes first in it, and what it is
/// given after it was [taken back](Tensor::take_back) finds what the host has made of it; nobody else waits.
#[derive(Debug)]
pub struct Staging {
    bytes: Tensor,
    /// When the copy is done, until somebody has waited for that.
    arrival: Option<Event>,
}

impl Staging {
    /// `len` bytes from `address` on.
    ///
    /// # Safety
    /// They are memory of the GPU of `device` that only its compute stream writes.
    unsafe fn new(device: &Device, address: u64, len: usize) -> Result<Staging> {
        let gpu = device.expect_gpu("stage")?;
        device.expect_no_capture("stage")?;
        let bytes = Tensor::empty_in(MemoryKind::Host, device, DType::U8, &[len])?;
        bytes.set_category(Category::Communication);
        // Whatever used the block before was given to the same stream.
        // SAFETY: nobody else holds the block, and the caller answers for the source.
        unsafe { gpu.compute().copy(bytes.address(), address, len) }.map_err(Error::of_gpu)?;
        let arrival = Some(gpu.compute().record().map_err(Error::of_gpu)?);
        Ok(Staging { bytes, arrival })
    }

    /// Waits until the bytes are there.
    ///
    /// Errors if something failed that the GPU was given before.
    pub fn wait(&mut self) -> Result<()> {
        if let Some(arrival) = &self.arrival {
            arrival.synchronize().map_err(Error::of_gpu)?;
            self.arrival = None;
        }
        Ok(())
    }

    /// The bytes, to be changed.
    ///
    /// Errors unless they were [waited for](Staging::wait).
    pub fn bytes(&mut self) -> Result<&mut [u8]> {
        if self.arrival.is_some() {
            return Err(Error::device("staging", "the copy was not waited for"));
        }
        let len = self.bytes.numel();
        // SAFETY: pinned memory has the same address for the host, nobody else has the block, the copy into it is over,
        // and `write_to`, which copies out of it, takes it.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.bytes.address() as *mut u8, len) })
    }

    /// Gives the GPU the copy back.
    ///
    /// # Safety
    /// As for `new`, and nobody else holds the memory.
    unsafe fn write_to(self, device: &Device, address: u64, len: usize) -> Result<()> {
        if self.bytes.device() != device || self.bytes.numel() != len {
            let message = format!("{self:?} does not fit {len} bytes of {device:?}");
            return Err(Error::memory("staging", message));
        }
        let gpu = device.expect_gpu("staging")?;
        // SAFETY: the block goes back to the pool in the order of this stream, and the caller answers for the target.
        unsafe { gpu.compute().copy(address, self.bytes.address(), len) }.map_err(Error::of_gpu)
    }
}

impl Tensor {
    /// Begins to copy a contiguous tensor to the host; `None` if it is there already.
    ///
    /// ```
    /// use ferrotron_tensor::{Device, Tensor};
    /// let x = Tensor::from_slice(&Device::cpu(1)?, &[1.0_f32], &[1])?;
    /// assert!(x.stage()?.is_none());
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn stage(&self) -> Result<Option<Staging>> {
        if self.device().gpu().is_none() {
            return Ok(None);
        }
        self.expect_contiguous("stage")?;
        let len = self.numel() * self.dtype().size();
        // SAFETY: a contiguous view's bytes are within its buffer, and only kernels of this stream write them.
        unsafe { Staging::new(self.device(), self.address(), len) }.map(Some)
    }

    /// Fills this unique, contiguous tensor with what the host has made of its copy.
    pub fn take_back(&mut self, staging: Staging) -> Result<()> {
        self.expect_contiguous("take_back")?;
        if !self.is_unique() {
            return Err(Error::memory("take_back", format!("{self:?} has other holders")));
        }
        let len = self.numel() * self.dtype().size();
        // SAFETY: as in `stage`, and nobody else holds the buffer.
        unsafe { staging.write_to(self.device(), self.address(), len) }
    }
}

impl Tensor {
    /// The address of the first element of this unique, contiguous tensor of a GPU, for a library that works on it. It may
    /// do so in another stream between two moments of the compute stream, and until the second the tensor must be kept.
    ///
    /// Errors unless there are `numel` elements.
    pub fn lend_address(&mut self, numel: usize) -> Result<u64> {
        self.device().expect_gpu("lend_address")?;
        self.expect_contiguous("lend_address")?;
        if !self.is_unique() {
            return Err(Error::memory("lend_address", format!("{self:?} has other holders")));
        }
        check_numel(self.numel(), numel)?;
        Ok(self.address())
    }
}

fn check_numel(got: usize, want: usize) -> Result<()> {
    match got == want {
        true => Ok(()),
        false => {
            Err(Error::shape("lend_address", format!("there are {got} elements, {want} are due")))
        }
    }
}

impl Flat {
    /// As [`Tensor::lend_address`], for all elements.
    pub fn lend_address(&mut self, numel: usize) -> Result<u64> {
        self.device().expect_gpu("lend_address")?;
        check_numel(self.numel(), numel)?;
        Ok(self.unique_bytes()?.0)
    }

    /// As [`Tensor::stage`], for all elements. Errors, naming the range, if a tensor still reads one.
    pub fn stage(&mut self) -> Result<Option<Staging>> {
        if self.device().gpu().is_none() {
            return Ok(None);
        }
        let (address, len) = self.unique_bytes()?;
        // SAFETY: the ranges lie end to end, and only kernels of this stream write them.
        unsafe { Staging::new(self.device(), address, len) }.map(Some)
    }

    /// As [`Tensor::take_back`], for all elements.
    pub fn take_back(&mut self, staging: Staging) -> Result<()> {
        let (address, len) = self.unique_bytes()?;
        // SAFETY: as in `stage`, and nobody holds a range.
        unsafe { staging.write_to(self.device(), address, len) }
    }

    fn unique_bytes(&mut self) -> Result<(u64, usize)> {
        self.check_writable()?;
        self.keep_in_capture();
        Ok((self.pointer() as u64, self.numel() * self.dtype().size()))
    }
}
