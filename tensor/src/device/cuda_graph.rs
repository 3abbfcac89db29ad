//! CUDA graphs: GPU work that is captured once and replayed as a unit, so that the host launches its kernels only
//! once. A training step is such work.
//!
//! # Usage
//!
//! [`CudaGraph::capture`] calls a closure and records its GPU work instead of running it.
//! [`CudaGraph::replay`] enqueues the recorded work, any number of times.
//!
//! ```text
//!  work(&x)?;                                        once without capture: loads kernels, plans products
//!  let (mut graph, loss) = CudaGraph::capture(&device, || work(&x))?;
//!  for step in .. {
//!      x.write_slice(&next)?;                        inputs, in place
//!      numbers.set(&StepParams { .. })?;            optimizer step parameters, in place
//!      graph.replay(step)?;                          random numbers of this step
//!      loss.item()?;                                 if the host needs the value
//!  }
//! ```
//!
//! **Memory.** The closure allocates device memory from a pool that belongs to the graph. Memory that it frees is
//! reused only within the closure, so replays never write to unrelated tensors. Tensors that outlive the closure hold
//! the results of the last replay. Tensors from outside that the closure reads or writes stay allocated for the life
//! of the graph, even if all other handles are dropped. There must be no replay while one of them is in a collective
//! that was not waited for. [`Device::memory`] counts a graph at the peak of its own memory.
//!
//! **Frozen** are all decisions of the host during capture: shapes, the operations and their order, and every number
//! passed to an operation. Values that change between replays are in GPU memory: tensors from outside, the parameters
//! of a [`DeviceStepParams`](crate::ops::optim::step::DeviceStepParams), and the step of [random keys](crate::RandomKey). Each replay sets that step
//! for all keys of the graph; with seed and site it determines the mask of [dropout](crate::ops::dropout).
//!
//! **Rejected** during capture is everything that synchronizes with or sends data from the host: `to_vec`, `item`,
//! `from_slice`, `write_slice`, `synchronize`, a new `DeviceStepParams`, collectives that are not NCCL's, and attention with
//! [`KeyRanges`](crate::ops::attention::KeyRanges), which belong to one batch. Each returns an error. After an error there
//! is no graph; device and pool are unchanged, but the closure's effects on host values remain.

use ferrotron_cuda::graph::{Graph, StreamCapture};
use std::sync::Arc;

use crate::device::capture::Capture;
use crate::{Device, Error, Result};

/// GPU work that was captured.
///
/// A tensor that the work writes changes with each replay, in all of its handles.
///
/// ```no_run
/// use ferrotron_cuda::gpu::GpuConfig;
/// use ferrotron_tensor::{CudaGraph, DType, Device, Tensor};
/// let device = Device::cuda(&GpuConfig::new(0))?;
/// let mut x = Tensor::zeros(&device, DType::F32, &[1024])?;
/// let work = || x.square()?.add_scalar(1.0);
/// work()?;
/// let (mut graph, y) = CudaGraph::capture(&device, work)?;
/// for step in 0..10 {
///     x.write_slice(&[step as f32; 1024])?;
///     graph.replay(step)?;
/// }
/// assert_eq!(y.to_vec::<f32>()?[0], 82.0);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub struct CudaGraph {
    graph: Graph,
    /// The memory that the graph uses.
    capture: Arc<Capture>,
    device: Device,
}

impl CudaGraph {
    /// Calls `f` and captures its GPU work of `device` instead of running it. Tensors in the result have valid
    /// contents only after a [replay](CudaGraph::replay).
    ///
    /// Call `f` once without capture first: that compiles kernels and shows whether `f` succeeds. Before capturing,
    /// the pool returns its unused memory to the GPU, which synchronizes with the host.
    ///
    /// # Errors
    ///
    /// Errors if `device` is not a GPU, or its work is already being captured. Errors if `f` does, or if it uses an
    /// operation that cannot be captured.
    ///
    /// ```
    /// use ferrotron_tensor::{CudaGraph, Device};
    /// let error = CudaGraph::capture(&Device::cpu(1)?, || Ok(())).err().unwrap();
    /// assert_eq!(error.to_string(), "cuda_graph: cpu(1 threads) is no GPU, whose work could be captured");
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn capture<R>(device: &Device, f: impl FnOnce() -> Result<R>) -> Result<(CudaGraph, R)> {
        let Some(gpu) = device.gpu().filter(|gpu| !gpu.is_fake()) else {
            let message = format!("{device:?} is no GPU, whose work could be captured");
            return Err(Error::device("cuda_graph", message));
        };
        let capturing = Capturing(device, device.begin_capture()?);
        let recording = StreamCapture::begin(gpu).map_err(Error::from_gpu)?;
        let result = f()?;
        let graph = recording.end().map_err(Error::from_gpu)?;
        let capture = capturing.1.clone();
        drop(capturing);
        capture.end();
        Ok((CudaGraph { graph, capture, device: device.clone() }, result))
    }

    /// Enqueues the captured work after all earlier work, without synchronizing. Random numbers are those of training
    /// step `step`, regardless of the step of the captured keys.
    ///
    /// Errors if the GPU has failed, or its work is being captured.
    pub fn replay(&mut self, step: u64) -> Result<()> {
        let gpu = self.device.expect_gpu("cuda_graph")?;
        self.device.expect_no_capture("cuda_graph")?;
        // A graph holds blocks, not tensors, so pending work of the copy stream on them is unknown: wait for all of
        // it.
        let copied = gpu.copies().record().and_then(|until| gpu.compute().wait(&until));
        copied.map_err(Error::from_gpu)?;
        // SAFETY: the work was captured on this GPU. The capture holds all memory whose addresses it contains. The
        // memory is used in the order of the compute stream, which waits for the copy stream. Kernels live as long as
        // the GPU.
        unsafe { self.graph.launch(gpu, step) }.map_err(Error::from_gpu)
    }
}

impl Drop for CudaGraph {
    fn drop(&mut self) {
        self.capture.release();
    }
}

/// A device whose work is being captured until this is dropped.
struct Capturing<'a>(&'a Device, Arc<Capture>);

impl Drop for Capturing<'_> {
    fn drop(&mut self) {
        self.0.end_capture();
    }
}
