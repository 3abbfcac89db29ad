//! A GPU with all that work on it needs: streams, kernels, matrix products.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::Result;
use crate::cells::{BadIndex, Cells, StepCell};
use crate::context::Context;
use crate::cubin_cache::CubinCache;
use crate::cublaslt::{CublasLt, Product};
use crate::kernels::ElementType;
use crate::launch::Launch;
use crate::library::Search;
use crate::modules::{Function, Modules};
use crate::nvrtc::{Architecture, Nvrtc};
use crate::stream::Stream;
use crate::uploads::Uploads;

/// How a [`Gpu`] is found and used.
#[derive(Debug, Clone)]
pub struct GpuConfig {
    /// Which GPU of the machine.
    pub ordinal: usize,
    /// Where NVIDIA's libraries lie.
    pub search: Search,
    /// Where compiled kernels are kept.
    pub cache: CubinCache,
}

impl GpuConfig {
    /// GPU number `ordinal`, libraries and cache as the environment says.
    pub fn new(ordinal: usize) -> GpuConfig {
        GpuConfig { ordinal, search: Search::from_environment(), cache: CubinCache::of_user() }
    }
}

/// A GPU that one rank works on.
#[derive(Debug)]
pub struct Gpu {
    context: Arc<Context>,
    /// Nothing where no kernel runs.
    modules: Option<Modules>,
    products: CublasLt,
    uploads: Uploads,
    compute: Stream,
    copies: Stream,
    cells: Cells,
    launches: AtomicU64,
    product_launches: AtomicU64,
}

impl Gpu {
    /// Finds the libraries and the GPU. `rows` is [`pointwise_rows`](crate::kernels::pointwise_rows).
    ///
    /// Errors, naming the remedy, if anything is missing.
    pub fn new(config: &GpuConfig, rows: String) -> Result<Gpu> {
        let context = Context::new(&config.search, config.ordinal)?;
        let nvrtc = Nvrtc::load(&config.search)?;
        let modules = Some(Modules::new(&context, nvrtc, config.cache.clone(), rows));
        let products = CublasLt::new(&config.search, &context)?;
        Self::of(context, modules, products)
    }

    /// In place of a GPU of `architecture` one that does nothing: no library is needed, and what is given to it is done
    /// at once. To find out what memory a computation takes.
    pub fn dry(architecture: Architecture) -> Result<Gpu> {
        let context = Context::dry(architecture);
        let products = CublasLt::dry(&context)?;
        Self::of(context, None, products)
    }

    fn of(context: Arc<Context>, modules: Option<Modules>, products: CublasLt) -> Result<Gpu> {
        let (compute, copies) = (Stream::new(&context)?, Stream::new(&context)?);
        let (cells, uploads) = (Cells::new(&context, &compute)?, Uploads::new(&context));
        let [launches, product_launches] = [0, 0].map(AtomicU64::new);
        Ok(Gpu {
            context,
            modules,
            products,
            uploads,
            compute,
            copies,
            cells,
            launches,
            product_launches,
        })
    }

    /// Whether it does nothing.
    pub fn is_dry(&self) -> bool {
        self.context.is_dry()
    }

    /// Bytes of its memory that it takes itself: what matrix products may write while they run, and numbers at addresses
    /// that stay.
    pub fn own_bytes(&self) -> usize {
        self.products.workspace_bytes() + self.cells.bytes()
    }

    /// The GPU's context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The stream of all kernels.
    pub fn compute(&self) -> &Stream {
        &self.compute
    }

    /// The stream of copies between the GPU's memory and the host's that go on while kernels run.
    pub fn copies(&self) -> &Stream {
        &self.copies
    }

    /// Copies bytes of the host to the GPU's address `to`, in the compute stream. The slice is free when this returns, and
    /// up to 4 MiB nobody waits for the stream.
    ///
    /// Errors if the host has no more memory that may be pinned, or the stream is recorded.
    ///
    /// # Safety
    /// As for [`Stream::upload`].
    pub unsafe fn upload(&self, to: u64, from: &[u8]) -> Result<()> {
        if self.is_dry() {
            return Ok(());
        }
        self.compute.expect_running("upload")?;
        // SAFETY: the caller's promise, passed on.
        unsafe { self.uploads.give(&self.compute, to, from) }
    }

    /// A launch of the kernel `name` of `file` for elements of `element`, to be put together.
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
            None => Function::dry(),
        };
        self.launches.fetch_add(1, Ordering::Relaxed);
        Ok(Launch::new(&self.compute, function, name))
    }

    /// How many launches [`Gpu::kernel`] has begun.
    pub fn launches(&self) -> u64 {
        self.launches.load(Ordering::Relaxed)
    }

    /// How many matrix products were given to the GPU, each a launch or more of cuBLASLt's.
    pub fn product_launches(&self) -> u64 {
        self.product_launches.load(Ordering::Relaxed)
    }

    /// The training step `number` in the GPU's memory, for kernels that draw random numbers. While the GPU's work is
    /// recorded nothing is written: the number is that of the [launch](crate::graph::Graph::launch).
    ///
    /// Errors if the GPU has failed, or the work that is being recorded drew numbers of another step.
    pub fn step(&self, number: u64) -> Result<StepCell<'_>> {
        self.cells.step(number, |address, step| {
            let kernel = self.kernel("step", ElementType::F64, "set_step")?;
            // SAFETY: the kernel writes one step to the cell, which only kernels of this stream use.
            unsafe { kernel.value(address).value(step).run([1, 1, 1], [32, 1, 1]) }
        })
    }

    pub(crate) fn cells(&self) -> &Cells {
        &self.cells
    }

    /// The address at which kernels of `op` put the smallest position whose index is bad: a `u64`, which is
    /// [`NO_BAD_INDEX`](crate::arguments::NO_BAD_INDEX) until then.
    ///
    /// Errors if there are too many operations.
    pub fn bad_index(&self, op: &'static str) -> Result<u64> {
        self.cells.bad_index(op)
    }

    /// Copies bytes from the GPU's address `from` to the host, after everything that the compute stream was given so far,
    /// and says whether any kernel has found a bad index since the last time.
    ///
    /// Errors if the GPU has failed.
    ///
    /// # Safety
    /// As for [`Stream::download`].
    pub unsafe fn download(&self, to: &mut [u8], from: u64) -> Result<Option<BadIndex>> {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.cells.download(&self.compute, to, from) }
    }

    /// Gives a matrix product to the stream of all kernels.
    ///
    /// Errors if cuBLASLt has no algorithm for it.
    ///
    /// # Safety
    /// The addresses are memory of this GPU with all the elements that the matrices and the epilogue describe, which nothing
    /// outside of the stream uses meanwhile; what is written overlaps neither itself nor anything else.
    pub unsafe fn product(&self, product: &Product) -> Result<()> {
        self.product_launches.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise, passed on; this is the one stream of all products.
        unsafe { self.products.run(&self.compute, product) }
    }

    /// What the GPU's matrix products are made with.
    pub fn products(&self) -> &CublasLt {
        &self.products
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // What was given is still needed.
        let _ = self.compute.synchronize();
        let _ = self.copies.synchronize();
    }
}
