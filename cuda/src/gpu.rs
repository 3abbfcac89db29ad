//! A GPU with its streams, kernels and matrix products.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::Result;
use crate::context::Context;
use crate::cubin_cache::CubinCache;
use crate::cublaslt::{AlgorithmChoice, CublasLt, Matmul};
use crate::device_scalars::{BadIndex, DeviceScalars, StepCell};
use crate::kernels::{ElementType, WARPGROUPS, compiles_warpgroups};
use crate::launch::Launch;
use crate::library::Search;
use crate::modules::{Function, Modules};
use crate::nvrtc::{Architecture, Nvrtc};
use crate::stream::Stream;
use crate::uploads::PinnedUploadPool;

/// Options to find and use a [`Gpu`].
#[derive(Debug, Clone)]
pub struct GpuConfig {
    /// Index of the GPU.
    pub ordinal: usize,
    /// Folders with NVIDIA's libraries.
    pub search: Search,
    /// Cache of compiled kernels.
    pub cache: CubinCache,
    /// Choice among the algorithms of matrix products.
    pub algorithms: AlgorithmChoice,
    /// Whether attention uses products of warpgroups where the GPU has them, on Hopper; without, its kernels are those of
    /// other GPUs.
    pub warpgroups: bool,
}

impl GpuConfig {
    /// GPU number `ordinal`, with libraries and cache from the environment, and the algorithms that cuBLASLt's heuristic
    /// names first.
    pub fn new(ordinal: usize) -> GpuConfig {
        let (search, cache) = (Search::from_environment(), CubinCache::for_user());
        GpuConfig {
            ordinal,
            search,
            cache,
            algorithms: AlgorithmChoice::Heuristic,
            warpgroups: true,
        }
    }
}

/// A GPU used by one rank.
#[derive(Debug)]
pub struct Gpu {
    context: Arc<Context>,
    /// `None` for a fake GPU.
    modules: Option<Modules>,
    products: CublasLt,
    uploads: PinnedUploadPool,
    compute: Stream,
    copies: Stream,
    scalars: DeviceScalars,
    launches: AtomicU64,
    product_launches: AtomicU64,
    warpgroups: bool,
}

impl Gpu {
    /// Loads the libraries and opens the GPU. `rows` is [`pointwise_rows`](crate::kernels::pointwise_rows).
    ///
    /// Errors, with the remedy, if anything is missing.
    pub fn new(config: &GpuConfig, rows: String) -> Result<Gpu> {
        let context = Context::new(&config.search, config.ordinal)?;
        let nvrtc = Nvrtc::load(&config.search)?;
        let warpgroups =
            config.warpgroups && compiles_warpgroups(context.architecture(), nvrtc.version());
        let modules = Some(Modules::new(&context, nvrtc, config.cache.clone(), rows));
        let products = CublasLt::new(&config.search, &context, config.algorithms.clone())?;
        Self::from_parts(context, modules, products, warpgroups)
    }

    /// A fake GPU of `architecture` that executes nothing; used to estimate memory. It needs no library, and its work
    /// completes immediately.
    pub fn fake(architecture: Architecture) -> Result<Gpu> {
        let context = Context::fake(architecture);
        let products = CublasLt::fake(&context)?;
        Self::from_parts(context, None, products, architecture == WARPGROUPS)
    }

    fn from_parts(
        context: Arc<Context>,
        modules: Option<Modules>,
        products: CublasLt,
        warpgroups: bool,
    ) -> Result<Gpu> {
        let (compute, copies) = (Stream::new(&context)?, Stream::new(&context)?);
        let (cells, uploads) =
            (DeviceScalars::new(&context, &compute)?, PinnedUploadPool::new(&context));
        let [launches, product_launches] = [0, 0].map(AtomicU64::new);
        Ok(Gpu {
            context,
            modules,
            products,
            uploads,
            compute,
            copies,
            scalars: cells,
            launches,
            product_launches,
            warpgroups,
        })
    }

    /// Whether kernels use products of warpgroups.
    pub fn uses_warpgroups(&self) -> bool {
        self.warpgroups
    }

    /// Returns whether the GPU is fake.
    pub fn is_fake(&self) -> bool {
        self.context.is_fake()
    }

    /// Bytes of device memory for internal use: the workspace of matrix products, and scalars at fixed addresses.
    pub fn own_bytes(&self) -> usize {
        self.products.workspace_bytes() + self.scalars.bytes()
    }

    /// The GPU's context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The compute stream, which runs all kernels.
    pub fn compute(&self) -> &Stream {
        &self.compute
    }

    /// The copy stream for transfers between device and host memory that overlap with kernels.
    pub fn copies(&self) -> &Stream {
        &self.copies
    }

    /// Enqueues a copy of host bytes to device address `to` in the compute stream. The slice can be reused when this
    /// returns; only copies of more than 4 MiB synchronize.
    ///
    /// Errors if the host cannot pin more memory, or if the stream is being captured.
    ///
    /// # Safety
    /// As for [`Stream::upload`].
    pub unsafe fn upload(&self, to: u64, from: &[u8]) -> Result<()> {
        if self.is_fake() {
            return Ok(());
        }
        self.compute.expect_running("upload")?;
        // SAFETY: the caller's promise.
        unsafe { self.uploads.give(&self.compute, to, from) }
    }

    /// Starts building a launch of the kernel `name` of `file` for elements of `element`.
    ///
    /// Errors if there is no such kernel, or it cannot be compiled.
    pub fn kernel(
        &self,
        file: &'static str,
        element: ElementType,
        name: &'static str,
    ) -> Result<Launch<'_>> {
        let function = match &self.modules {
            Some(modules) => modules.function(file, element, name)?,
            None => Function::fake(),
        };
        self.launches.fetch_add(1, Ordering::Relaxed);
        Ok(Launch::new(&self.compute, function, name))
    }

    /// Number of launches started by [`Gpu::kernel`].
    pub fn launches(&self) -> u64 {
        self.launches.load(Ordering::Relaxed)
    }

    /// Number of matrix products enqueued; each is one or more launches of cuBLASLt.
    pub fn product_launches(&self) -> u64 {
        self.product_launches.load(Ordering::Relaxed)
    }

    /// Sets the training step `number` in device memory, for kernels that draw random numbers. During a capture
    /// nothing is written: each [launch](crate::graph::Graph::launch) sets the number.
    ///
    /// Errors if the GPU has failed, or if the captured work already uses another step.
    pub fn step(&self, number: u64) -> Result<StepCell<'_>> {
        self.scalars.step(number, |address, step| {
            let kernel = self.kernel("step", ElementType::F64, "set_step")?;
            // SAFETY: the kernel writes one step to the cell, which only kernels of this stream use.
            unsafe { kernel.value(address).value(step).run([1, 1, 1], [32, 1, 1]) }
        })
    }

    pub(crate) fn cells(&self) -> &DeviceScalars {
        &self.scalars
    }

    /// The address where kernels of `op` record the smallest position of a bad index: a `u64`, initially
    /// [`NO_BAD_INDEX`](crate::arguments::NO_BAD_INDEX).
    ///
    /// Errors if there are too many operations.
    pub fn bad_index(&self, op: &'static str) -> Result<u64> {
        self.scalars.bad_index(op)
    }

    /// Waits for all work of the compute stream, and copies bytes from device address `from` to the host. Returns any
    /// bad index recorded since the last call.
    ///
    /// Errors if the GPU has failed.
    ///
    /// # Safety
    /// As for [`Stream::download`].
    pub unsafe fn download(&self, to: &mut [u8], from: u64) -> Result<Option<BadIndex>> {
        // SAFETY: the caller's promise.
        unsafe { self.scalars.download(&self.compute, to, from) }
    }

    /// Enqueues a matrix product in the compute stream.
    ///
    /// Errors if cuBLASLt has no algorithm for it.
    ///
    /// # Safety
    /// The addresses are memory of this GPU that contains all elements described by the matrices and the epilogue.
    /// Nothing outside of the stream uses them meanwhile; outputs overlap neither themselves nor anything else.
    pub unsafe fn product(&self, product: &Matmul) -> Result<()> {
        self.product_launches.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise; all products use this stream.
        unsafe { self.products.run(&self.compute, product) }
    }

    /// Seconds that a product takes with each algorithm that cuBLASLt offers, in the order of its heuristic: the
    /// shortest of several means. Infinity is one that does not run; a fake GPU has none.
    ///
    /// Errors if cuBLASLt has no algorithm for it.
    ///
    /// # Safety
    /// The conditions are those of [`Gpu::product`].
    pub unsafe fn time_algorithms(&self, product: &Matmul) -> Result<Vec<f64>> {
        // SAFETY: the caller's promise; all products use this stream.
        unsafe { self.products.time_algorithms(&self.compute, product) }
    }

    /// The cuBLASLt handle.
    pub fn products(&self) -> &CublasLt {
        &self.products
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // Enqueued work still uses streams and memory.
        let _ = self.compute.synchronize();
        let _ = self.copies.synchronize();
    }
}
