//! CUDA graphs: work of a GPU that is captured once and replayed as one piece, so that the host's time for each kernel is
//! spent once. A training step is such work.
//!
//! # What a graph is
//!
//! [`CudaGraph::capture`] calls a closure whose operations do not run: what they would have given the GPU is captured.
//! [`CudaGraph::replay`] gives it all to the GPU, any number of times.
//!
//! ```text
//!  work(&x)?;                                        once as it is: loads kernels, plans products
//!  let (mut graph, loss) = CudaGraph::capture(&device, || work(&x))?;
//!  for step in .. {
//!      x.write_slice(&next)?;                        inputs, in place
//!      numbers.set(&StepNumbers { .. })?;            an optimizer's numbers, in place
//!      graph.replay(step)?;                          random numbers of this step
//!      loss.item()?;                                 where somebody wants to know
//!  }
//! ```
//!
//! **Memory.** What the closure takes from the device comes from a pool that belongs to the graph. What it gives back is
//! used again within the closure only, so no tensor of others lies where the graph writes. Tensors that outlive the
//! closure hold the results of the last replay. Tensors from outside that it reads or writes keep their place for as long
//! as the graph lives, even if everybody else drops them; while one of them is in a collective that was not waited for,
//! there must be no replay. [`Device::memory`] counts a graph as the most of its own memory that it ever used.
//!
//! **Frozen** is whatever the host decides while it captures: shapes, which operations, their order, and every number that
//! an operation takes as an argument. What differs from replay to replay lies in memory of the GPU: tensors from outside,
//! the numbers of a [`Step`](crate::ops::step::Step), and the step of [random keys](crate::RandomKey), one for all keys of
//! a graph, which each replay sets; with their seeds and sites it says what [dropout](crate::ops::dropout) drops.
//!
//! **Not possible** in a capture is whatever the host would wait for or send: `to_vec`, `item`, `from_slice`,
//! `write_slice`, `synchronize`, a new `Step`, collectives. These are errors that say so. After an error there is no
//! graph; device and pool are as before, and what the closure did to values of the host remains.

use ferrotron_cuda::graph::{Graph, Recording};
use std::sync::Arc;

use crate::capture::Capture;
use crate::{Device, Error, Result};

/// Captured work of a GPU.
///
/// A tensor that the work writes changes with each replay, whoever holds it.
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
    /// The memory that it uses.
    capture: Arc<Capture>,
    device: Device,
}

impl CudaGraph {
    /// Calls `f`, and captures what it gives the GPU of `device` instead of doing it. Nothing has run when this returns:
    /// the tensors among `f`'s results have their contents after a [replay](CudaGraph::replay).
    ///
    /// Call `f` once before as it is. Kernels are compiled then, and its results say whether it works at all. Memory that
    /// the device's pool keeps for later is given back to the GPU first, which the host waits for.
    ///
    /// Errors if `device` is no GPU, its work is being captured already, or `f` errors or does what cannot be captured.
    ///
    /// ```
    /// use ferrotron_tensor::{CudaGraph, Device};
    /// let error = CudaGraph::capture(&Device::cpu(1)?, || Ok(())).err().unwrap();
    /// assert_eq!(error.to_string(), "cuda_graph: cpu(1 threads) is no GPU, whose work could be captured");
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn capture<R>(device: &Device, f: impl FnOnce() -> Result<R>) -> Result<(CudaGraph, R)> {
        let Some(gpu) = device.gpu().filter(|gpu| !gpu.is_dry()) else {
            let message = format!("{device:?} is no GPU, whose work could be captured");
            return Err(Error::device("cuda_graph", message));
        };
        let capturing = Capturing(device, device.begin_capture()?);
        let recording = Recording::begin(gpu).map_err(Error::of_gpu)?;
        let result = f()?;
        let graph = recording.end().map_err(Error::of_gpu)?;
        let capture = capturing.1.clone();
        drop(capturing);
        capture.end();
        Ok((CudaGraph { graph, capture, device: device.clone() }, result))
    }

    /// Gives the GPU the captured work, after what it was given before; nobody waits for it. Random numbers are those of
    /// training step `step`, whichever the keys had that it was captured with.
    ///
    /// Errors if the GPU has failed, or its work is being captured.
    pub fn replay(&mut self, step: u64) -> Result<()> {
        let gpu = self.device.expect_gpu("cuda_graph")?;
        self.device.expect_no_capture("cuda_graph")?;
        // A graph holds blocks, not tensors, so nobody has seen whether the stream of copies works on one of them.
        let copied = gpu.copies().record().and_then(|until| gpu.compute().wait(&until));
        copied.map_err(Error::of_gpu)?;
        // SAFETY: it was captured on this GPU. The capture holds the memory that addresses were taken of. It is used in the
        // order of the compute stream, which has waited for that of copies. Kernels live as long as the GPU.
        unsafe { self.graph.launch(gpu, step) }.map_err(Error::of_gpu)
    }
}

impl Drop for CudaGraph {
    fn drop(&mut self) {
        self.capture.release();
    }
}

/// A device whose work is being captured, until this is dropped.
struct Capturing<'a>(&'a Device, Arc<Capture>);

impl Drop for Capturing<'_> {
    fn drop(&mut self) {
        self.0.end_capture();
    }
}
