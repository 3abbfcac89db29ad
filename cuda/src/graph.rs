//! CUDA graphs: work that is captured once and launched as a unit, without host time per kernel.
//!
//! While a stream is captured, enqueued work does not run. A stream that waits for an event of a captured stream
//! joins the capture. The captured stream must wait for it before the end (CUDA programming guide, "CUDA Graphs",
//! "Cross-stream Dependencies and Events").
//!
//! Kernels keep the arguments of the capture. Addresses must therefore be fixed, and values that change between
//! launches are read from memory.

use std::ptr;
use std::sync::Arc;

use crate::Result;
use crate::context::Context;
use crate::driver::check;
use crate::driver::sys::{self, CUgraph, CUgraphExec};
use crate::gpu::Gpu;
use crate::stream::Stream;

/// A capture of a GPU's compute stream. If it is dropped before its [end](StreamCapture::end), the capture is discarded
/// and the stream continues as before.
#[derive(Debug)]
#[must_use]
pub struct StreamCapture<'a> {
    gpu: &'a Gpu,
}

impl<'a> StreamCapture<'a> {
    /// Starts capturing the compute stream of `gpu`.
    ///
    /// Until the end, synchronizing with the stream and copying host memory that is not pinned are errors. The first
    /// such error invalidates the capture.
    ///
    /// Errors if the stream is already being captured.
    pub fn begin(gpu: &'a Gpu) -> Result<StreamCapture<'a>> {
        gpu.cells().begin_recording()?;
        let recording = StreamCapture { gpu };
        gpu.context().bind()?;
        // In relaxed mode, mapping and pinning memory and loading kernels during the capture take effect immediately
        // and persist. Stricter modes forbid them, since the driver cannot know that (driver API,
        // "cuThreadExchangeStreamCaptureMode").
        let mode = sys::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is alive; `end` or `drop` ends the capture.
        let status = unsafe { sys::cuStreamBeginCapture_v2(gpu.compute().handle(), mode) };
        check("cuStreamBeginCapture", status)?;
        Ok(recording)
    }

    /// Ends the capture and returns the graph.
    ///
    /// Errors if another stream joined the capture and this one has not waited for it, or if an error invalidated the
    /// capture.
    pub fn end(self) -> Result<Graph> {
        let gpu = std::mem::ManuallyDrop::new(self).gpu;
        let recorded = end(gpu.compute());
        gpu.cells().end_recording(); // not earlier: a step written before the capture ends would be captured
        let recorded = recorded?;
        let mut runnable = ptr::null_mut();
        // SAFETY: the captured graph is alive, and the pointer is to a live variable; `drop` destroys the executable
        // graph.
        let status = unsafe { sys::cuGraphInstantiateWithFlags(&mut runnable, recorded.handle, 0) };
        check("cuGraphInstantiate", status)?;
        Ok(Graph { context: recorded.context.clone(), runnable })
    }
}

impl Drop for StreamCapture<'_> {
    fn drop(&mut self) {
        let _ = end(self.gpu.compute());
        self.gpu.cells().end_recording();
    }
}

/// A captured graph that is not yet executable.
struct Recorded {
    context: Arc<Context>,
    handle: CUgraph,
}

fn end(stream: &Stream) -> Result<Recorded> {
    let context = stream.context().clone();
    context.bind()?;
    let mut handle = ptr::null_mut();
    // SAFETY: the stream is alive, and the pointer is to a live variable; `drop` destroys the graph.
    check("cuStreamEndCapture", unsafe { sys::cuStreamEndCapture(stream.handle(), &mut handle) })?;
    Ok(Recorded { context, handle })
}

impl Drop for Recorded {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: the handle has no other user.
        let _ = unsafe { sys::cuGraphDestroy(self.handle) };
    }
}

/// An executable graph, which can be launched repeatedly.
#[derive(Debug)]
pub struct Graph {
    context: Arc<Context>,
    runnable: CUgraphExec,
}

// SAFETY: graphs may be used from any thread, one at a time.
unsafe impl Send for Graph {}

impl Graph {
    /// Enqueues the graph in the compute stream of `gpu`, after all earlier work. Random numbers are those of
    /// training step `step`.
    ///
    /// Errors if the stream is being captured: the step would be that of the outer launch.
    ///
    /// # Safety
    /// The graph was captured on this GPU. All memory and kernels that the captured work uses still exist, and
    /// nothing outside of the stream uses the memory meanwhile.
    pub unsafe fn launch(&mut self, gpu: &Gpu, step: u64) -> Result<()> {
        gpu.compute().expect_running("cuGraphLaunch")?;
        let _step = gpu.step(step)?;
        self.context.bind()?;
        let stream = gpu.compute().handle();
        // SAFETY: graph and stream are alive; the caller guarantees the memory.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(self.runnable, stream) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: the handle has no other user. Enqueued work still completes.
        let _ = unsafe { sys::cuGraphExecDestroy(self.runnable) };
    }
}
