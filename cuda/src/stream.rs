//! Streams, in which work is done in the order in which it was given, and events, for which another stream can wait.

use cudarc::driver::sys::CUstream_flags_enum as StreamFlags;
use cudarc::driver::sys::CUstreamCaptureStatus_enum as CaptureStatus;
use cudarc::driver::sys::{self, CUevent, CUevent_flags_enum as EventFlags, CUresult, CUstream};
use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use crate::context::Context;
use crate::driver::check;
use crate::{Error, Result};

/// A queue of work on a GPU.
#[derive(Debug)]
pub struct Stream {
    context: Arc<Context>,
    handle: CUstream,
}

// SAFETY: streams may be used from any thread, also at the same time.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// A stream that waits for no other.
    pub fn new(context: &Arc<Context>) -> Result<Stream> {
        let mut handle = ptr::null_mut();
        if context.is_dry() {
            return Ok(Stream { context: context.clone(), handle });
        }
        context.bind()?;
        let flags = StreamFlags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the pointer is to a live variable; `drop` destroys the stream.
        let status = unsafe { sys::cuStreamCreateWithPriority(&mut handle, flags, 0) };
        check("cuStreamCreate", status)?;
        Ok(Stream { context: context.clone(), handle })
    }

    /// The GPU.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The driver's handle, alive as long as the stream.
    pub fn handle(&self) -> CUstream {
        self.handle
    }

    /// Waits until everything that was given is done.
    ///
    /// Errors if any of it failed.
    pub fn synchronize(&self) -> Result<()> {
        if self.context.is_dry() {
            return Ok(());
        }
        self.context.bind()?;
        // SAFETY: the stream is alive.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.handle) })
    }

    /// The moment at which everything that was given so far is done.
    pub fn record(&self) -> Result<Event> {
        let event = Event::new(&self.context)?;
        event.record(self)?;
        Ok(event)
    }

    /// What is given from now on waits for `event`.
    pub fn wait(&self, event: &Event) -> Result<()> {
        if self.context.is_dry() {
            return Ok(());
        }
        self.context.bind()?;
        // SAFETY: both are alive; the driver keeps of the event what it needs.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(self.handle, event.handle, 0) })
    }

    /// Copies bytes of the host to the GPU's address `to`, after everything that was given so far, and waits for that.
    ///
    /// Errors if the stream is recorded: nothing is done then.
    ///
    /// # Safety
    /// As many bytes from `to` on are memory of the GPU that nothing outside of this stream uses meanwhile.
    pub unsafe fn upload(&self, to: u64, from: &[u8]) -> Result<()> {
        if from.is_empty() || self.context.is_dry() {
            return Ok(()); // drivers need not take copies of nothing
        }
        self.expect_running("cuMemcpyHtoD")?;
        // SAFETY: the caller answers for the destination; the slice is borrowed until the copy has arrived.
        let status = unsafe {
            sys::cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast::<c_void>(), from.len(), self.handle)
        };
        // Pinned memory is read when the copy's turn comes, and of other memory a driver need not have taken a copy. After
        // an error, too: some of it may be under way.
        let arrived = self.synchronize();
        check("cuMemcpyHtoD", status).and(arrived)
    }

    /// Copies bytes from the GPU's address `from` to the host, after everything that was given so far.
    ///
    /// Errors if the stream is recorded: nothing is done then.
    ///
    /// # Safety
    /// As many bytes from `from` on are memory of the GPU that nothing outside of this stream writes meanwhile.
    pub unsafe fn download(&self, to: &mut [u8], from: u64) -> Result<()> {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.download_all(&mut [(to, from)]) }
    }

    /// As [`Stream::download`] from several addresses, which are waited for together.
    ///
    /// # Safety
    /// As for [`Stream::download`], for each.
    pub unsafe fn download_all(&self, pieces: &mut [(&mut [u8], u64)]) -> Result<()> {
        if self.context.is_dry() {
            return Ok(());
        }
        self.expect_running("cuMemcpyDtoH")?;
        let mut filled = pieces.iter_mut().filter(|(to, _)| !to.is_empty());
        let given = filled.try_for_each(|(to, from)| {
            let (start, len) = (to.as_mut_ptr().cast::<c_void>(), to.len());
            // SAFETY: the caller answers for the source; the slice is borrowed until the copy has arrived.
            let status = unsafe { sys::cuMemcpyDtoHAsync_v2(start, *from, len, self.handle) };
            check("cuMemcpyDtoH", status)
        });
        // After an error, too: some of the copies may be under way.
        let arrived = self.synchronize();
        given.and(arrived)
    }

    /// Errors if the stream is recorded, in which case a driver might record a copy of memory that does not stay.
    pub(crate) fn expect_running(&self, op: &'static str) -> Result<()> {
        self.context.bind()?;
        let mut status = CaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream is alive, and the pointer is to a live variable.
        check(op, unsafe { sys::cuStreamIsCapturing(self.handle, &mut status) })?;
        match status {
            CaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE => Ok(()),
            _ => Err(Error::new(
                op,
                "the stream is recorded: nothing runs that the host could wait for, or that reads what it has now",
            )),
        }
    }

    /// Copies `len` bytes between addresses that the GPU reaches.
    ///
    /// # Safety
    /// Both ranges are memory that the GPU reaches, they do not overlap, and nothing outside of this stream uses them
    /// meanwhile.
    pub unsafe fn copy(&self, to: u64, from: u64, len: usize) -> Result<()> {
        if len == 0 || self.context.is_dry() {
            return Ok(());
        }
        self.context.bind()?;
        // SAFETY: the caller answers for both.
        check("cuMemcpy", unsafe { sys::cuMemcpyAsync(to, from, len, self.handle) })
    }

    /// Sets `len` bytes to zero.
    ///
    /// # Safety
    /// They are memory that the GPU reaches and that nothing outside of this stream uses meanwhile.
    pub unsafe fn fill_zero(&self, at: u64, len: usize) -> Result<()> {
        if len == 0 || self.context.is_dry() {
            return Ok(());
        }
        self.context.bind()?;
        // SAFETY: the caller answers for the range.
        check("cuMemsetD8", unsafe { sys::cuMemsetD8Async(at, 0, len, self.handle) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.context.is_dry() {
            return;
        }
        let _ = self.context.bind();
        // SAFETY: nobody has the handle any more. Work that was given is still done.
        let _ = unsafe { sys::cuStreamDestroy_v2(self.handle) };
    }
}

/// A moment in a stream.
#[derive(Debug)]
pub struct Event {
    context: Arc<Context>,
    handle: CUevent,
}

// SAFETY: events may be used from any thread, also at the same time.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// A moment that has passed.
    pub(crate) fn new(context: &Arc<Context>) -> Result<Event> {
        let mut handle = ptr::null_mut();
        if context.is_dry() {
            return Ok(Event { context: context.clone(), handle });
        }
        context.bind()?;
        let flags = EventFlags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: the pointer is to a live variable; `drop` destroys the event.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&mut handle, flags) })?;
        Ok(Event { context: context.clone(), handle })
    }

    /// From now on the moment at which everything is done that `stream` was given so far.
    pub(crate) fn record(&self, stream: &Stream) -> Result<()> {
        if self.context.is_dry() {
            return Ok(());
        }
        self.context.bind()?;
        // SAFETY: both are alive.
        check("cuEventRecord", unsafe { sys::cuEventRecord(self.handle, stream.handle) })
    }

    /// Whether the moment has passed.
    ///
    /// Errors if something failed that was given before it.
    pub fn has_passed(&self) -> Result<bool> {
        if self.context.is_dry() {
            return Ok(true);
        }
        self.context.bind()?;
        // SAFETY: the event is alive.
        match unsafe { sys::cuEventQuery(self.handle) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            status => check("cuEventQuery", status).map(|()| true),
        }
    }

    /// Waits until the moment has passed.
    pub fn synchronize(&self) -> Result<()> {
        if self.context.is_dry() {
            return Ok(());
        }
        self.context.bind()?;
        // SAFETY: the event is alive.
        check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.handle) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.context.is_dry() {
            return;
        }
        let _ = self.context.bind();
        // SAFETY: nobody has the handle any more.
        let _ = unsafe { sys::cuEventDestroy_v2(self.handle) };
    }
}
