//! Streams, which execute work in the order of enqueueing, and events, for which streams can wait.

use std::ffi::{c_uint, c_void};
use std::ptr;
use std::sync::Arc;

use crate::context::Context;
use crate::driver::check;
use crate::driver::sys::{self, CUevent, CUstream};
use crate::{Error, Result};

/// A queue of work on a GPU.
#[derive(Debug)]
pub struct Stream {
    context: Arc<Context>,
    handle: CUstream,
}

// SAFETY: streams may be used from any thread, concurrently.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// Creates a stream that does not synchronize with others implicitly.
    pub fn new(context: &Arc<Context>) -> Result<Stream> {
        let mut handle = ptr::null_mut();
        if context.is_fake() {
            return Ok(Stream { context: context.clone(), handle });
        }
        context.bind()?;
        let flags = sys::CU_STREAM_NON_BLOCKING;
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
    pub fn handle(&self) -> *mut c_void {
        self.handle
    }

    /// Waits until all enqueued work is done.
    ///
    /// Errors if any of it failed.
    pub fn synchronize(&self) -> Result<()> {
        if self.context.is_fake() {
            return Ok(());
        }
        self.context.bind()?;
        // SAFETY: the stream is alive.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.handle) })
    }

    /// Records an event that completes when all work enqueued so far is done.
    pub fn record(&self) -> Result<Event> {
        let event = Event::new(&self.context)?;
        event.record(self)?;
        Ok(event)
    }

    /// Records the moment at which all work enqueued so far is done.
    pub fn moment(&self) -> Result<Moment> {
        let event = Event::with_flags(&self.context, sys::CU_EVENT_DEFAULT)?;
        event.record(self)?;
        Ok(Moment(event))
    }

    /// Makes work enqueued from now on wait for `event`.
    pub fn wait(&self, event: &Event) -> Result<()> {
        if self.context.is_fake() {
            return Ok(());
        }
        self.context.bind()?;
        // SAFETY: both are alive; the driver keeps what it needs of the event.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(self.handle, event.handle, 0) })
    }

    /// Copies host bytes to device address `to`, after all earlier work, and synchronizes.
    ///
    /// Errors, without copying, if the stream is being captured.
    ///
    /// # Safety
    /// `from.len()` bytes from `to` on are device memory that nothing outside of this stream uses meanwhile.
    pub unsafe fn upload(&self, to: u64, from: &[u8]) -> Result<()> {
        if from.is_empty() || self.context.is_fake() {
            return Ok(()); // drivers need not accept empty copies
        }
        self.expect_running("cuMemcpyHtoD")?;
        // SAFETY: the caller guarantees the destination; the slice is borrowed until the copy is complete.
        let status = unsafe {
            sys::cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast::<c_void>(), from.len(), self.handle)
        };
        // Pinned memory is read when the stream reaches the copy, and pageable memory may not have been staged. After
        // an error, a part of the copy may be in progress.
        let arrived = self.synchronize();
        check("cuMemcpyHtoD", status).and(arrived)
    }

    /// Copies bytes from device address `from` to the host, after all earlier work, and synchronizes.
    ///
    /// Errors, without copying, if the stream is being captured.
    ///
    /// # Safety
    /// `to.len()` bytes from `from` on are device memory that nothing outside of this stream writes meanwhile.
    pub unsafe fn download(&self, to: &mut [u8], from: u64) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.download_all(&mut [(to, from)]) }
    }

    /// Like [`Stream::download`] from several addresses, with one synchronization.
    ///
    /// # Safety
    /// As for [`Stream::download`], for each address.
    pub unsafe fn download_all(&self, pieces: &mut [(&mut [u8], u64)]) -> Result<()> {
        if self.context.is_fake() {
            return Ok(());
        }
        self.expect_running("cuMemcpyDtoH")?;
        let mut filled = pieces.iter_mut().filter(|(to, _)| !to.is_empty());
        let given = filled.try_for_each(|(to, from)| {
            let (start, len) = (to.as_mut_ptr().cast::<c_void>(), to.len());
            // SAFETY: the caller guarantees the source; the slice is borrowed until the copy is complete.
            let status = unsafe { sys::cuMemcpyDtoHAsync_v2(start, *from, len, self.handle) };
            check("cuMemcpyDtoH", status)
        });
        // After an error, some of the copies may be in progress.
        let arrived = self.synchronize();
        given.and(arrived)
    }

    /// Returns whether the stream's work is being captured instead of run.
    pub(crate) fn is_captured(&self) -> Result<bool> {
        self.context.bind()?;
        let mut status = sys::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream is alive, and the pointer is to a live variable.
        let done = unsafe { sys::cuStreamIsCapturing(self.handle, &mut status) };
        check("cuStreamIsCapturing", done)?;
        Ok(status != sys::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// Errors if the stream is being captured, when a driver might capture a copy of memory that does not persist.
    pub(crate) fn expect_running(&self, op: &'static str) -> Result<()> {
        match self.is_captured()? {
            false => Ok(()),
            true => Err(Error::new(
                op,
                "the stream is recorded: nothing runs that the host could wait for, or that reads what it has now",
            )),
        }
    }

    /// Enqueues a copy of `len` bytes between addresses that the GPU can access.
    ///
    /// # Safety
    /// Both ranges are memory that the GPU can access, they do not overlap, and nothing outside of this stream uses
    /// them meanwhile.
    pub unsafe fn copy(&self, to: u64, from: u64, len: usize) -> Result<()> {
        if len == 0 || self.context.is_fake() {
            return Ok(());
        }
        self.context.bind()?;
        // SAFETY: the caller guarantees both ranges.
        check("cuMemcpy", unsafe { sys::cuMemcpyAsync(to, from, len, self.handle) })
    }

    /// Enqueues setting `len` bytes to zero.
    ///
    /// # Safety
    /// They are memory that the GPU can access and that nothing outside of this stream uses meanwhile.
    pub unsafe fn zero_fill(&self, at: u64, len: usize) -> Result<()> {
        if len == 0 || self.context.is_fake() {
            return Ok(());
        }
        self.context.bind()?;
        // SAFETY: the caller guarantees the range.
        check("cuMemsetD8", unsafe { sys::cuMemsetD8Async(at, 0, len, self.handle) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.context.is_fake() {
            return;
        }
        let _ = self.context.bind();
        // SAFETY: the handle has no other user. Enqueued work still completes.
        let _ = unsafe { sys::cuStreamDestroy_v2(self.handle) };
    }
}

/// A point in a stream's order of work.
#[derive(Debug)]
pub struct Event {
    context: Arc<Context>,
    handle: CUevent,
}

// SAFETY: events may be used from any thread, concurrently.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// Creates an event that counts as complete until it is recorded.
    pub(crate) fn new(context: &Arc<Context>) -> Result<Event> {
        Event::with_flags(context, sys::CU_EVENT_DISABLE_TIMING)
    }

    fn with_flags(context: &Arc<Context>, flags: c_uint) -> Result<Event> {
        let mut handle = ptr::null_mut();
        if context.is_fake() {
            return Ok(Event { context: context.clone(), handle });
        }
        context.bind()?;
        // SAFETY: the pointer is to a live variable; `drop` destroys the event.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&mut handle, flags) })?;
        Ok(Event { context: context.clone(), handle })
    }

    /// Records the event in `stream`, after all work enqueued so far.
    pub(crate) fn record(&self, stream: &Stream) -> Result<()> {
        if self.context.is_fake() {
            return Ok(());
        }
        self.context.bind()?;
        // SAFETY: both are alive.
        check("cuEventRecord", unsafe { sys::cuEventRecord(self.handle, stream.handle) })
    }

    /// Returns whether the event is complete.
    ///
    /// Errors if work enqueued before it failed.
    pub fn has_passed(&self) -> Result<bool> {
        if self.context.is_fake() {
            return Ok(true);
        }
        self.context.bind()?;
        // SAFETY: the event is alive.
        match unsafe { sys::cuEventQuery(self.handle) } {
            sys::CUDA_ERROR_NOT_READY => Ok(false),
            status => check("cuEventQuery", status).map(|()| true),
        }
    }

    /// Waits until the event is complete.
    pub fn synchronize(&self) -> Result<()> {
        if self.context.is_fake() {
            return Ok(());
        }
        self.context.bind()?;
        // SAFETY: the event is alive.
        check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.handle) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.context.is_fake() {
            return;
        }
        let _ = self.context.bind();
        // SAFETY: the handle has no other user.
        let _ = unsafe { sys::cuEventDestroy_v2(self.handle) };
    }
}

/// A moment in a stream's order of work, of which the GPU notes the time.
#[derive(Debug)]
pub struct Moment(Event);

impl Moment {
    /// Returns the seconds between an earlier moment and this one, when both have come. Their resolution is half a
    /// microsecond.
    ///
    /// Errors if work enqueued before them failed.
    pub fn seconds_since(&self, earlier: &Moment) -> Result<f64> {
        self.0.synchronize()?;
        if self.0.context.is_fake() {
            return Ok(0.0);
        }
        let mut milliseconds = 0.0;
        // SAFETY: both events are alive and recorded; the pointer is to a live variable.
        let status =
            unsafe { sys::cuEventElapsedTime(&mut milliseconds, earlier.0.handle, self.0.handle) };
        check("cuEventElapsedTime", status)?;
        Ok(f64::from(milliseconds) / 1e3)
    }
}
