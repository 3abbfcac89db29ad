//! Work that is recorded once and given again as one piece: a training step without the host's time for each kernel.
//!
//! While a stream is recorded, what it is given does not run. A stream that waits for an event of a recorded one is
//! recorded with it from then on, and the first must wait for it before the end (CUDA programming guide, "CUDA Graphs",
//! "Cross-stream Dependencies and Events").
//!
//! Kernels keep the arguments that they were recorded with. So addresses must stay, and what changes from one time to the
//! next is read from memory.

use cudarc::driver::sys::{self, CUgraph, CUgraphExec, CUstreamCaptureMode_enum as Mode};
use std::ptr;
use std::sync::Arc;

use crate::Result;
use crate::context::Context;
use crate::driver::check;
use crate::gpu::Gpu;
use crate::stream::Stream;

/// A GPU whose compute stream is recorded. Dropped before its [end](Recording::end) it is forgotten, and the stream goes
/// on as before.
#[derive(Debug)]
#[must_use]
pub struct Recording<'a> {
    gpu: &'a Gpu,
}

impl<'a> Recording<'a> {
    /// From now on what is given to the compute stream of `gpu` is recorded.
    ///
    /// Until the end nobody can wait for the stream, nor copy memory of the host that is not pinned: these are errors,
    /// after the first of which nothing can be made of the recording.
    ///
    /// Errors if the stream is recorded already.
    pub fn begin(gpu: &'a Gpu) -> Result<Recording<'a>> {
        gpu.cells().begin_recording()?;
        let recording = Recording { gpu };
        gpu.context().bind()?;
        // Memory may be mapped and pinned, and kernels loaded, meanwhile: that is done at once, and stays. Stricter modes
        // forbid it, since a driver cannot know that (driver API, "cuThreadExchangeStreamCaptureMode").
        let mode = Mode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is alive; `end` or `drop` ends what begins here.
        let status = unsafe { sys::cuStreamBeginCapture_v2(gpu.compute().handle(), mode) };
        check("cuStreamBeginCapture", status)?;
        Ok(recording)
    }

    /// What was recorded.
    ///
    /// Errors if another stream was recorded with this one, and this one has not waited for it; or if there was an error
    /// on the way.
    pub fn end(self) -> Result<Graph> {
        let gpu = std::mem::ManuallyDrop::new(self).gpu;
        let recorded = end(gpu.compute());
        gpu.cells().end_recording(); // not before: a step that is set meanwhile would be recorded
        let recorded = recorded?;
        let mut runnable = ptr::null_mut();
        // SAFETY: the recording is alive, and the pointer is to a live variable; `drop` destroys what is made.
        let status = unsafe { sys::cuGraphInstantiateWithFlags(&mut runnable, recorded.handle, 0) };
        check("cuGraphInstantiate", status)?;
        Ok(Graph { context: recorded.context.clone(), runnable })
    }
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        let _ = end(self.gpu.compute());
        self.gpu.cells().end_recording();
    }
}

/// What was given while a stream was recorded, not yet in a form that runs.
struct Recorded {
    context: Arc<Context>,
    handle: CUgraph,
}

fn end(stream: &Stream) -> Result<Recorded> {
    let context = stream.context().clone();
    context.bind()?;
    let mut handle = ptr::null_mut();
    // SAFETY: the stream is alive, and the pointer is to a live variable; `drop` destroys what is made.
    check("cuStreamEndCapture", unsafe { sys::cuStreamEndCapture(stream.handle(), &mut handle) })?;
    Ok(Recorded { context, handle })
}

impl Drop for Recorded {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: nobody else has the handle.
        let _ = unsafe { sys::cuGraphDestroy(self.handle) };
    }
}

/// Recorded work, which may be given again and again.
#[derive(Debug)]
pub struct Graph {
    context: Arc<Context>,
    runnable: CUgraphExec,
}

// SAFETY: graphs may be used from any thread, one at a time.
unsafe impl Send for Graph {}

impl Graph {
    /// Gives all that was recorded to the compute stream of `gpu`, after what it was given before. Random numbers are
    /// those of the training step `step`.
    ///
    /// Errors if the stream is recorded: the step would be that of the outer launch.
    ///
    /// # Safety
    /// It was recorded on this GPU. All memory that the work was recorded with is still there, and nothing outside of the
    /// stream uses it meanwhile; so are the kernels.
    pub unsafe fn launch(&mut self, gpu: &Gpu, step: u64) -> Result<()> {
        gpu.compute().expect_running("cuGraphLaunch")?;
        let _step = gpu.step(step)?;
        self.context.bind()?;
        let stream = gpu.compute().handle();
        // SAFETY: graph and stream are alive; the caller answers for the memory.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(self.runnable, stream) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: nobody has the handle any more. Work that was given is still done.
        let _ = unsafe { sys::cuGraphExecDestroy(self.runnable) };
    }
}
