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

use ferrotron_cuda::gpu::{Gpu, GpuConfig};
use ferrotron_cuda::nvrtc::Architecture;
use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use tracing::{Dispatch, dispatcher};

use crate::buffer::Buffer;
use crate::capture::Capture;
use crate::ops::rows::{SERIAL, for_rows};
use crate::ops::table::kernel_rows;
use crate::pool::{Backing, MemoryStats, Pool};
use crate::{Error, MemoryKind, Result};

/// Where tensors live and who computes on them. Cloning gives another handle of the same device.
///
/// Each device owns its threads, so that several ranks in one process share the cores as they were
/// told to. Results never depend on the number of threads.
#[derive(Clone)]
pub struct Device(Arc<Inner>);

struct Inner {
    pool: Arc<Pool>,
    host: Arc<Pool>,
    workers: Workers,
    /// Held by the call of [`Device::run`] that has the threads.
    turn: Mutex<()>,
}

/// Who carries out the loops of kernels.
enum Workers {
    /// Threads of the device's own.
    Threads(ThreadPool),
    /// Nobody, in place of so many threads.
    Nobody(usize),
    /// A GPU: whatever loop is left runs on the calling thread.
    Gpu(Box<GpuWorker>),
}

struct GpuWorker {
    gpu: Arc<Gpu>,
    /// While its work is captured.
    capture: RwLock<Option<Arc<Capture>>>,
}

impl Device {
    /// A CPU device that computes on `threads` threads of its own. Its host memory is in the system's folder for
    /// temporary files.
    pub fn cpu(threads: usize) -> Result<Device> {
        Self::cpu_with_offload_folder(threads, std::env::temp_dir())
    }

    /// As [`Device::cpu`], with [host memory](MemoryKind::Host) in files of `folder`. They are made when they are
    /// needed, and have no names: nothing is left of them when the process has ended.
    pub fn cpu_with_offload_folder(threads: usize, folder: impl Into<PathBuf>) -> Result<Device> {
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

    /// A device that computes nothing, in place of one with `threads` threads: to find out what the memory of a
    /// computation would be.
    ///
    /// Operations check their operands and take their results from the pool, which counts as any does, but the
    /// loops of kernels do nothing. So hardly any memory is touched, and an operation costs about a microsecond,
    /// whatever its size. What a tensor holds is unspecified, unless the host wrote it
    /// ([`Tensor::from_slice`](crate::Tensor::from_slice), [`Tensor::full`](crate::Tensor::full)).
    ///
    /// ```
    /// use ferrotron_tensor::{DType, Device, Tensor, ops::matmul::matmul};
    /// let device = Device::dry(1)?;
    /// let x = Tensor::zeros(&device, DType::F32, &[1 << 17, 1 << 17])?; // 64 GiB
    /// matmul(&x, &x)?;
    /// assert_eq!(device.memory().peak, 128 << 30);
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn dry(threads: usize) -> Result<Device> {
        let workers = Workers::Nobody(checked(threads)?);
        Ok(Self::with(workers, Backing::Addresses, Backing::Addresses))
    }

    /// A GPU, with its streams and kernels. Its host memory is pinned memory of the host.
    ///
    /// Work is done in the order in which it is given, and nobody waits for it before its result is read. Several
    /// devices may be on one GPU, for example one of each rank.
    ///
    /// Errors, naming the remedy, if the driver, a library or the GPU is missing.
    pub fn cuda(config: &GpuConfig) -> Result<Device> {
        let gpu = Arc::new(Gpu::new(config, kernel_rows()).map_err(Error::of_gpu)?);
        let (backing, host) = (Backing::Gpu(gpu.clone()), Backing::Pinned(gpu.clone()));
        let worker = GpuWorker { gpu, capture: RwLock::default() };
        Ok(Self::with(Workers::Gpu(Box::new(worker)), backing, host))
    }

    /// As [`Device::dry`], in place of a GPU of this architecture.
    pub fn dry_cuda(architecture: Architecture) -> Result<Device> {
        let gpu = Arc::new(Gpu::dry(architecture).map_err(Error::of_gpu)?);
        let worker = GpuWorker { gpu, capture: RwLock::default() };
        Ok(Self::with(Workers::Gpu(Box::new(worker)), Backing::Addresses, Backing::Addresses))
    }

    fn with(workers: Workers, backing: Backing, host: Backing) -> Device {
        let (pool, host) = (Pool::new(backing), Pool::new(host));
        Device(Arc::new(Inner { pool, host, workers, turn: Mutex::default() }))
    }

    /// Whether nothing is computed: see [`Device::dry`].
    pub fn is_dry(&self) -> bool {
        match &self.0.workers {
            Workers::Threads(_) => false,
            Workers::Nobody(_) => true,
            Workers::Gpu(worker) => worker.gpu.is_dry(),
        }
    }

    /// Whether a GPU computes.
    pub fn is_gpu(&self) -> bool {
        self.gpu().is_some()
    }

    /// The GPU that computes, if one does.
    pub fn gpu(&self) -> Option<&Gpu> {
        match &self.0.workers {
            Workers::Gpu(worker) => Some(&worker.gpu),
            _ => None,
        }
    }

    /// The capture that its work is part of, if it is being captured.
    pub(crate) fn capture(&self) -> Option<Arc<Capture>> {
        match &self.0.workers {
            Workers::Gpu(worker) => {
                worker.capture.read().unwrap_or_else(PoisonError::into_inner).clone()
            }
            _ => None,
        }
    }

    /// From now on tensors come from the capture's pools. Errors if that is so already.
    pub(crate) fn begin_capture(&self) -> Result<Arc<Capture>> {
        let Workers::Gpu(worker) = &self.0.workers else {
            return Err(Error::device("cuda_graph", "the device is no GPU"));
        };
        // Looked at and set at once: of two threads one captures, and nobody takes its pools away.
        let mut current = worker.capture.write().unwrap_or_else(PoisonError::into_inner);
        if current.is_some() {
            return Err(self.captured("cuda_graph"));
        }
        // What waits there to be used again would be taken from the GPU twice.
        self.0.pool.trim();
        Ok(current.insert(Arc::new(Capture::new(&self.0.pool, &self.0.host))).clone())
    }

    pub(crate) fn end_capture(&self) {
        if let Workers::Gpu(worker) = &self.0.workers {
            *worker.capture.write().unwrap_or_else(PoisonError::into_inner) = None;
        }
    }

    /// Errors while the device's work is [captured](crate::CudaGraph), which the host can neither wait for nor send
    /// anything, nor other streams work with: what `op` would do.
    pub fn expect_no_capture(&self, op: &'static str) -> Result<()> {
        self.capture().map_or(Ok(()), |_| Err(self.captured(op)))
    }

    fn captured(&self, op: &'static str) -> Error {
        let message = format!(
            "work of {self:?} is being captured and does not run: the host does this before, or after a replay"
        );
        Error::device(op, message)
    }

    /// The GPU that computes. Errors if none does.
    pub(crate) fn expect_gpu(&self, op: &'static str) -> Result<&Gpu> {
        self.gpu().ok_or_else(|| Error::device(op, "the device is no GPU"))
    }

    /// How many threads compute.
    pub fn threads(&self) -> usize {
        match &self.0.workers {
            Workers::Gpu(_) => 1,
            Workers::Threads(threads) => threads.current_num_threads(),
            Workers::Nobody(threads) => *threads,
        }
    }

    /// Runs `f` on one of the device's own threads, so that the operations inside fork without a
    /// detour: worth it around a whole training step of a small model.
    ///
    /// Calls from several threads take turns, so `f` must not wait for another thread's call on the same
    /// device. A call from within `f` runs at once. The caller's subscriber of `tracing` gets the spans of `f`.
    ///
    /// ```
    /// let device = ferrotron_tensor::Device::cpu(2)?;
    /// assert_eq!(device.run(|| device.run(|| 1) + 1), 2);
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn run<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        // A thread that waits for its part of a loop takes up whatever work there is. Another caller's
        // closure would run in the midst of this one's, under its thread-locals and its locks.
        let own = match &self.0.workers {
            Workers::Threads(threads) => threads.current_thread_index().is_some(),
            Workers::Nobody(_) | Workers::Gpu(_) => return f(),
        };
        let _turn = (!own).then(|| self.0.turn.lock().unwrap_or_else(PoisonError::into_inner));
        // Whoever watches the caller watches `f`, on whichever thread it runs.
        let watcher = dispatcher::get_default(Dispatch::clone);
        self.install(|| dispatcher::with_default(&watcher, f))
    }

    /// As [`Device::run`] without taking turns: for loops of kernels, which hold no lock and read no
    /// thread-local that anybody else sets.
    pub(crate) fn install<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        match &self.0.workers {
            Workers::Threads(threads) => threads.install(f),
            Workers::Nobody(_) | Workers::Gpu(_) => f(),
        }
    }

    /// Waits until everything that was given to the device is done: a GPU works while the host goes on. To measure
    /// times; results wait by themselves when they are read.
    ///
    /// Errors if any of it failed.
    pub fn synchronize(&self) -> Result<()> {
        self.expect_no_capture("synchronize")?;
        match self.gpu() {
            Some(gpu) => gpu.compute().synchronize().map_err(Error::of_gpu),
            None => Ok(()),
        }
    }

    /// Counters of the memory pool.
    pub fn memory(&self) -> MemoryStats {
        self.memory_of(MemoryKind::Device)
    }

    /// Counters of one of the two pools: [`Device::memory`] is that of the device's own.
    pub fn memory_of(&self, kind: MemoryKind) -> MemoryStats {
        self.own_pool(kind).stats()
    }

    /// Starts the peaks and the numbers of allocations anew.
    pub fn reset_memory_peaks(&self) {
        self.0.pool.reset_stats();
        self.0.host.reset_stats();
    }

    /// The pool that tensors come from.
    pub(crate) fn pool_of(&self, kind: MemoryKind) -> Arc<Pool> {
        match self.capture() {
            Some(capture) => capture.pool(kind).clone(),
            None => self.own_pool(kind).clone(),
        }
    }

    pub(crate) fn has_in_host_memory(&self, buffer: &Buffer) -> bool {
        buffer.allocation().is_of(&self.0.host)
    }

    fn own_pool(&self, kind: MemoryKind) -> &Arc<Pool> {
        match kind {
            MemoryKind::Device => &self.0.pool,
            MemoryKind::Host => &self.0.host,
        }
    }

    /// Calls `f(task)` for every task below `tasks`, on all threads when `work` (elements touched in
    /// all) is worth it; a dry device calls nothing. Tasks must not depend on one another.
    pub(crate) fn for_each(&self, tasks: usize, work: usize, f: impl Fn(usize) + Send + Sync) {
        if self.is_dry() {
            return;
        }
        if tasks <= 1 || work < SERIAL || self.threads() == 1 {
            (0..tasks).for_each(f);
        } else {
            self.fork(tasks, &f);
        }
    }

    /// The parallel loop itself, compiled once: each kernel would otherwise bring its own copy of the
    /// thread pool's machinery.
    fn fork(&self, tasks: usize, f: &(dyn Fn(usize) + Send + Sync)) {
        self.install(|| (0..tasks).into_par_iter().for_each(f));
    }

    /// Cuts `out` into rows of `width` and calls `f(first_row, rows)` on runs of whole rows, on all threads where
    /// that is worth it; a dry device calls nothing.
    ///
    /// ```
    /// let device = ferrotron_tensor::Device::cpu(2)?;
    /// let mut squares = [0; 100];
    /// device.for_each_rows(&mut squares, 1, |first, part| {
    ///     part.iter_mut().enumerate().for_each(|(i, x)| *x = (first + i) * (first + i));
    /// });
    /// assert_eq!(squares[99], 9801);
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn for_each_rows<T: Send>(
        &self,
        out: &mut [T],
        width: usize,
        f: impl Fn(usize, &mut [T]) + Send + Sync,
    ) {
        let work = out.len();
        for_rows(self, (out, width), work, f);
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
            Workers::Nobody(threads) => write!(f, "dry({threads} threads)"),
            Workers::Gpu(worker) if worker.gpu.is_dry() => write!(f, "dry(cuda)"),
            Workers::Gpu(worker) => write!(f, "cuda:{}", worker.gpu.context().ordinal()),
        }
    }
}

/// More threads than any machine has cores: systems refuse so many in ways that no program survives.
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
            for refused in [Device::cpu(threads), Device::dry(threads)] {
                let error = refused.unwrap_err().to_string();
                assert!(error.ends_with(&got), "{error}");
            }
        }
    }
}
