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
pub(crate) mod inherited;
mod moment;
mod unoptimised;

use ferrotron_cuda::gpu::{Gpu, GpuConfig};
use ferrotron_cuda::nvrtc::Architecture;
use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use tracing::{Dispatch, dispatcher};

use crate::device::capture::Capture;
use crate::device::inherited::Travelling;
use crate::memory::buffer::Buffer;
use crate::memory::pool::{Backing, MemoryStats, Pool};
use crate::ops::table::kernel_rows;
use crate::{Error, MemoryKind, Result};

pub use moment::Moment;

/// A device that holds tensors and computes on them. Cloning returns another handle of the same device.
///
/// Each device owns its threads, so several ranks in one process share the cores as configured.
/// Results never depend on the number of threads.
#[derive(Clone)]
pub struct Device(Arc<DeviceInner>);

struct DeviceInner {
    pool: Arc<Pool>,
    host: Arc<Pool>,
    workers: Workers,
    /// Held by the [`Device::run`] call that uses the threads.
    run_lock: Mutex<()>,
}

/// Executes the loops of kernels.
enum Workers {
    /// Threads owned by the device.
    Threads(ThreadPool),
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
    /// Creates a CPU device with `threads` threads of its own. Its host memory is in the system's temporary folder.
    pub fn cpu(threads: usize) -> Result<Device> {
        Self::cpu_with_offload_folder(threads, std::env::temp_dir())
    }

    /// Like [`Device::cpu`], with [host memory](MemoryKind::Host) in files of `folder`. Files are created on demand
    /// and have no names, so none remain after the process ends.
    pub fn cpu_with_offload_folder(threads: usize, folder: impl Into<PathBuf>) -> Result<Device> {
        unoptimised::warn();
        let pool = ThreadPoolBuilder::new()
            .num_threads(checked(threads)?)
            .thread_name(|i| format!("ferrotron-{i}"))
            .build()
            .map_err(|error| {
                Error::memory("device", format!("cannot start {threads} threads: {error}"))
            })?;
        let host = Backing::Files(folder.into());
        Ok(Self::with(Workers::Threads(pool), Backing::Memory, host))
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
        Device(Arc::new(DeviceInner { pool, host, workers, run_lock: Mutex::default() }))
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
            Workers::Threads(threads) => threads.current_num_threads(),
            Workers::Nobody(threads) => *threads,
        }
    }

    /// Runs `f` on one of the device's own threads, so that its operations fork without a thread switch. Use it
    /// around a whole training step of a small model.
    ///
    /// Calls from several threads are serialized, so `f` must not wait for another thread's call on the same device.
    /// A nested call runs immediately. `f` [inherits](crate::inherited) the caller's thread-local values, such as
    /// autograd's recording mode, and its spans go to the caller's `tracing` subscriber.
    ///
    /// ```
    /// let device = ferrotron_tensor::Device::cpu(2)?;
    /// assert_eq!(device.run(|| device.run(|| 1) + 1), 2);
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn run<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        // While a thread waits for its share of a loop, it executes any queued work. Another caller's closure would
        // then run inside this one, under its thread-locals and locks.
        let own = match &self.0.workers {
            Workers::Threads(threads) => threads.current_thread_index().is_some(),
            Workers::Nobody(_) | Workers::Gpu(_) => return f(),
        };
        if own {
            return f();
        }
        let _turn = self.0.run_lock.lock().unwrap_or_else(PoisonError::into_inner);
        let values = Travelling::new();
        let _back = values.exchange();
        // Spans of `f` go to the caller's subscriber, whichever thread runs it.
        let watcher = dispatcher::get_default(Dispatch::clone);
        self.install(|| {
            let _here = values.exchange();
            dispatcher::with_default(&watcher, f)
        })
    }

    /// Like [`Device::run`] without serialization: for kernel loops, which hold no lock and read no thread-local set
    /// by callers.
    pub(crate) fn install<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        match &self.0.workers {
            Workers::Threads(threads) => threads.install(f),
            Workers::Nobody(_) | Workers::Gpu(_) => f(),
        }
    }

    /// Calls `f` once on each thread, with the thread's number, all at the same time.
    pub(crate) fn on_each_thread(&self, f: &(dyn Fn(usize) + Sync)) {
        match &self.0.workers {
            Workers::Threads(threads) => drop(threads.broadcast(|thread| f(thread.index()))),
            Workers::Nobody(_) | Workers::Gpu(_) => f(0),
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
        if tasks <= 1 || work < SERIAL || self.threads() == 1 {
            (0..tasks).for_each(f);
        } else {
            self.install(|| (0..tasks).into_par_iter().for_each(f));
        }
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

/// Loops with less work than this run on the calling thread, since a fork costs microseconds.
///
/// Work is estimated in nanoseconds: an exponential or a random number counts as one, and so do
/// [`CHEAP`](crate::ops::rows::CHEAP) copied or added elements.
pub(crate) const SERIAL: usize = 16 * 1024;

/// An upper bound on threads, above any machine's core count: systems fail unrecoverably at much larger numbers.
const MOST_THREADS: usize = 4096;

fn checked(threads: usize) -> Result<usize> {
    match threads {
        1..=MOST_THREADS => Ok(threads),
        _ => {
            let message = format!("needs 1 to {MOST_THREADS} threads, got {threads}");
            Err(Error::config("device", message))
        }
    }
}

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
