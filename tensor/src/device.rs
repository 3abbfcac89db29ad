//! A device: memory pools, and a budget of threads or a GPU.
//!
//! ```
//! use ferrotron_tensor::{Device, Tensor};
//! let device = Device::cpu(2)?;
//! let x = Tensor::from_slice(&device, &[1.0_f32, 2.0, 3.0], &[3])?;
//! assert_eq!(device.memory().current, 12);
//! # drop(x);
//! # Ok::<(), ferrotron_tensor::Error>(())
//! ```

pub(crate) mod capture;
pub(crate) mod cuda_graph;
mod moment;
mod unoptimised;

use ferrotron_cuda::gpu::{Gpu, GpuConfig};
use ferrotron_cuda::nvrtc::Architecture;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};

use crate::device::capture::Capture;
use crate::memory::buffer::Buffer;
use crate::memory::pool::{Backing, MemoryStats, Pool};
use crate::ops::table::kernel_rows;
use crate::thread_team::{ThreadTeam, checked};
use crate::{Error, MemoryKind, Result};

pub use moment::Moment;

/// A device that holds tensors and computes on them. Cloning returns another handle of the same device.
///
/// Loops run on the calling thread and on others that the device owns ([`ThreadTeam`]), so several ranks in one process
/// share the cores as configured. Results never depend on the number of threads.
#[derive(Clone)]
pub struct Device(Arc<DeviceInner>);

struct DeviceInner {
    pool: Arc<Pool>,
    host: Arc<Pool>,
    workers: Workers,
}

/// Executes the loops of kernels.
enum Workers {
    /// The calling thread, and others that the device owns.
    Threads(ThreadTeam),
    /// None: a fake device with a nominal number of threads.
    Nobody(usize),
    /// A GPU; loops that remain on the host run on the calling thread.
    Gpu(Box<GpuWorker>),
}

struct GpuWorker {
    gpu: Arc<Gpu>,
    /// Set while the GPU's work is captured.
    capture: RwLock<Option<Arc<Capture>>>,
}

impl Device {
    /// Creates a CPU device of `threads` threads, one of which is the caller's. Its host memory is in the system's
    /// temporary folder.
    pub fn cpu(threads: usize) -> Result<Device> {
        Self::cpu_with_offload_folder(threads, std::env::temp_dir())
    }

    /// Like [`Device::cpu`], with [host memory](MemoryKind::Host) in files of `folder`. Files are created on demand
    /// and have no names, so none remain after the process ends.
    pub fn cpu_with_offload_folder(threads: usize, folder: impl Into<PathBuf>) -> Result<Device> {
        unoptimised::warn();
        let team = ThreadTeam::new(threads)?;
        let host = Backing::Files(folder.into());
        Ok(Self::with(Workers::Threads(team), Backing::Memory, host))
    }

    /// Creates a fake CPU device with `threads` nominal threads; it executes nothing and is used to estimate memory.
    ///
    /// Operations check their operands and allocate results from a counting pool, but kernel loops are skipped.
    /// Memory is hardly touched, and an operation takes about a microsecond at any size. Tensor contents are
    /// unspecified unless the host wrote them ([`Tensor::from_slice`](crate::Tensor::from_slice),
    /// [`Tensor::full`](crate::Tensor::full)).
    ///
    /// ```
    /// use ferrotron_tensor::{DType, Device, Tensor, ops::matmul::matmul};
    /// let device = Device::fake(1)?;
    /// let x = Tensor::zeros(&device, DType::F32, &[1 << 17, 1 << 17])?; // 64 GiB
    /// matmul(&x, &x)?;
    /// assert_eq!(device.memory().peak, 128 << 30);
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn fake(threads: usize) -> Result<Device> {
        let workers = Workers::Nobody(checked(threads)?);
        Ok(Self::with(workers, Backing::Addresses, Backing::Addresses))
    }

    /// Creates a GPU device, with its streams and kernels. Its host memory is pinned.
    ///
    /// Work is enqueued in program order; the host synchronizes only when it reads a result. Several devices may use
    /// one GPU, for example one per rank.
    ///
    /// Errors, with the remedy, if the driver, a library or the GPU is missing.
    pub fn cuda(config: &GpuConfig) -> Result<Device> {
        let gpu = Arc::new(Gpu::new(config, kernel_rows()).map_err(Error::from_gpu)?);
        let (backing, host) = (Backing::Gpu(gpu.clone()), Backing::Pinned(gpu.clone()));
        let worker = GpuWorker { gpu, capture: RwLock::default() };
        Ok(Self::with(Workers::Gpu(Box::new(worker)), backing, host))
    }

    /// Creates a fake GPU of this architecture, like [`Device::fake`].
    pub fn fake_cuda(architecture: Architecture) -> Result<Device> {
        let gpu = Arc::new(Gpu::fake(architecture).map_err(Error::from_gpu)?);
        let worker = GpuWorker { gpu, capture: RwLock::default() };
        Ok(Self::with(Workers::Gpu(Box::new(worker)), Backing::Addresses, Backing::Addresses))
    }

    fn with(workers: Workers, backing: Backing, host: Backing) -> Device {
        let (pool, host) = (Pool::new(backing), Pool::new(host));
        Device(Arc::new(DeviceInner { pool, host, workers }))
    }

    /// Returns whether the device is fake: see [`Device::fake`].
    pub fn is_fake(&self) -> bool {
        match &self.0.workers {
            Workers::Threads(_) => false,
            Workers::Nobody(_) => true,
            Workers::Gpu(worker) => worker.gpu.is_fake(),
        }
    }

    /// Returns whether the device is a GPU.
    pub fn is_gpu(&self) -> bool {
        self.gpu().is_some()
    }

    /// The GPU, if the device is one.
    pub fn gpu(&self) -> Option<&Gpu> {
        match &self.0.workers {
            Workers::Gpu(worker) => Some(&worker.gpu),
            _ => None,
        }
    }

    /// The capture in progress, if there is one.
    pub(crate) fn capture(&self) -> Option<Arc<Capture>> {
        match &self.0.workers {
            Workers::Gpu(worker) => {
                worker.capture.read().unwrap_or_else(PoisonError::into_inner).clone()
            }
            _ => None,
        }
    }

    /// Starts a capture: tensors are allocated from its pools from now on. Errors if a capture is in progress.
    pub(crate) fn begin_capture(&self) -> Result<Arc<Capture>> {
        let Workers::Gpu(worker) = &self.0.workers else {
            return Err(Error::device("cuda_graph", "the device is no GPU"));
        };
        // Tested and set under one lock: only one thread can capture, and no other thread can replace its pools.
        let mut current = worker.capture.write().unwrap_or_else(PoisonError::into_inner);
        if current.is_some() {
            return Err(self.captured("cuda_graph"));
        }
        // Cached blocks would otherwise occupy GPU memory in addition to the graph's pools.
        self.0.pool.trim();
        Ok(current.insert(Arc::new(Capture::new(&self.0.pool, &self.0.host))).clone())
    }

    pub(crate) fn end_capture(&self) {
        if let Workers::Gpu(worker) = &self.0.workers {
            *worker.capture.write().unwrap_or_else(PoisonError::into_inner) = None;
        }
    }

    /// Errors while the device's work is [captured](crate::CudaGraph). During a capture the host cannot synchronize
    /// with or write to the GPU, and other streams cannot join; `op` names the operation that would.
    pub fn expect_no_capture(&self, op: &'static str) -> Result<()> {
        self.capture().map_or(Ok(()), |_| Err(self.captured(op)))
    }

    /// Whether the device's work is being [captured](crate::CudaGraph).
    pub fn is_capturing(&self) -> bool {
        self.capture().is_some()
    }

    fn captured(&self, op: &'static str) -> Error {
        let message = format!(
            "work of {self:?} is being captured and does not run: the host does this before, or after a replay"
        );
        Error::device(op, message)
    }

    /// The GPU. Errors if the device is not one.
    pub(crate) fn expect_gpu(&self, op: &'static str) -> Result<&Gpu> {
        self.gpu().ok_or_else(|| Error::device(op, "the device is no GPU"))
    }

    /// Number of compute threads.
    pub fn threads(&self) -> usize {
        match &self.0.workers {
            Workers::Gpu(_) => 1,
            Workers::Threads(team) => team.threads(),
            Workers::Nobody(threads) => *threads,
        }
    }

    /// The threads that share the loops on the host: of a GPU and of a fake device, the caller alone.
    pub(crate) fn team(&self) -> &ThreadTeam {
        match &self.0.workers {
            Workers::Threads(team) => team,
            Workers::Nobody(_) | Workers::Gpu(_) => ThreadTeam::alone(),
        }
    }

    /// Waits until all enqueued work is done. For timing only: reading a result synchronizes by itself.
    ///
    /// Errors if any of the work failed.
    pub fn synchronize(&self) -> Result<()> {
        self.expect_no_capture("synchronize")?;
        match self.gpu() {
            Some(gpu) => gpu.compute().synchronize().map_err(Error::from_gpu),
            None => Ok(()),
        }
    }

    /// Counters of the device memory pool.
    pub fn memory(&self) -> MemoryStats {
        self.memory_of(MemoryKind::Device)
    }

    /// Counters of one of the two pools; [`Device::memory`] is [`MemoryKind::Device`].
    pub fn memory_of(&self, kind: MemoryKind) -> MemoryStats {
        self.own_pool(kind).stats()
    }

    /// Resets peaks and allocation counts.
    pub fn reset_memory_peaks(&self) {
        self.0.pool.reset_stats();
        self.0.host.reset_stats();
    }

    /// The pool that new tensors are allocated from.
    pub(crate) fn pool_of(&self, kind: MemoryKind) -> Arc<Pool> {
        match self.capture() {
            Some(capture) => capture.pool(kind).clone(),
            None => self.own_pool(kind).clone(),
        }
    }

    pub(crate) fn has_in_host_memory(&self, buffer: &Buffer) -> bool {
        buffer.allocation().belongs_to(&self.0.host)
    }

    fn own_pool(&self, kind: MemoryKind) -> &Arc<Pool> {
        match kind {
            MemoryKind::Device => &self.0.pool,
            MemoryKind::Host => &self.0.host,
        }
    }

    /// Calls `f(task)` for every task below `tasks`. It uses all threads if `work`, in nanoseconds, is at least
    /// [`SERIAL`]. A fake device calls nothing. Tasks must be independent.
    ///
    /// `f` is a trait object so that the loop is compiled once, and not once for each kernel.
    pub(crate) fn for_each(&self, tasks: usize, work: usize, f: &(dyn Fn(usize) + Send + Sync)) {
        if self.is_fake() {
            return;
        }
        let team = if work < SERIAL { ThreadTeam::alone() } else { self.team() };
        team.for_each(tasks, f);
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Device) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Device {}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0.workers {
            Workers::Threads(_) => write!(f, "cpu({} threads)", self.threads()),
            Workers::Nobody(threads) => write!(f, "fake({threads} threads)"),
            Workers::Gpu(worker) if worker.gpu.is_fake() => write!(f, "fake(cuda)"),
            Workers::Gpu(worker) => write!(f, "cuda:{}", worker.gpu.context().ordinal()),
        }
    }
}

/// The kind of device: `cpu`, `cuda:0` or `fake`.
impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0.workers {
            Workers::Threads(_) => f.write_str("cpu"),
            Workers::Gpu(worker) if !worker.gpu.is_fake() => write!(f, "{self:?}"),
            Workers::Nobody(_) | Workers::Gpu(_) => f.write_str("fake"),
        }
    }
}

/// Loops with less work than this run on the calling thread, since others take a microsecond or two to join.
///
/// Work is estimated in nanoseconds: an exponential or a random number counts as one, and so do
/// [`CHEAP`](crate::ops::rows::CHEAP) copied or added elements.
pub(crate) const SERIAL: usize = 8 * 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_threads_that_no_machine_has_are_refused() {
        for threads in [0, 4097, usize::MAX] {
            let got = format!("got {threads}");
            for refused in [Device::cpu(threads), Device::fake(threads)] {
                let error = refused.unwrap_err().to_string();
                assert!(error.ends_with(&got), "{error}");
            }
        }
    }
}
