//! A kernel launch with tensor operands.

use bytemuck::NoUninit;
use ferrotron_cuda::arguments::{self, IndexType, Layout};
use ferrotron_cuda::device_scalars::StepCell;
use ferrotron_cuda::gpu::Gpu;
use ferrotron_cuda::kernels::KernelSource;
use ferrotron_cuda::launch::{Dim3, Launch};
use smallvec::SmallVec;

use super::launched::{Products, launched};
use crate::{DType, Device, Error, RandomKey, Result, ShardSpec, Tensor};

/// Maximum size of a grid along y and z.
pub(crate) const MOST_BLOCKS: usize = 65_535;
/// Threads of a block of an elementwise kernel.
const THREADS: usize = 256;
/// Elements per thread of an elementwise kernel, if there are enough.
const ELEMENTS: usize = 8;
/// Units of 16 bytes of a row that a thread holds in registers. Mirrors `HELD` of norm.cu.
const HELD: usize = 4;

/// A launch on the device of its operands. `run` returns the first error of any argument.
#[must_use]
pub(crate) struct Kernel<'a> {
    launch: Launch<'a>,
    device: &'a Device,
    gpu: &'a Gpu,
    /// Held until the launch by a kernel that draws random numbers.
    step: Option<StepCell<'a>>,
    error: Option<Error>,
    dtype: DType,
    /// Bytes that the kernel reads and writes, as far as its operands tell.
    bytes: usize,
    products: Products,
}

/// The kernel `name` of `file` for elements of `dtype`.
///
/// Errors if `device` is not a GPU, or if there is no such kernel.
pub(crate) fn kernel<'a>(
    device: &'a Device,
    file: &'static str,
    dtype: DType,
    name: &'static str,
) -> Result<Kernel<'a>> {
    let gpu = device.gpu().ok_or_else(|| Error::device(name, "the device is no GPU"))?;
    if KernelSource::named(file).is_some_and(|file| !file.types.contains(&dtype.into())) {
        return Err(Error::dtype(name, format!("there is no kernel for {dtype}")));
    }
    let launch = gpu.kernel(file, dtype.into(), name).map_err(Error::from_gpu)?;
    let products = Products::default();
    Ok(Kernel { launch, device, gpu, step: None, error: None, dtype, bytes: 0, products })
}

impl Kernel<'_> {
    /// Adds a tensor that the kernel reads, from the view's first element on.
    pub(crate) fn input(self, x: &Tensor) -> Self {
        let elsewhere = self.elsewhere(x);
        self.refuse(elsewhere).moving(stored_bytes(x)).value(x.address())
    }

    /// Adds a tensor that the kernel writes, from the view's first element on. Its buffer must have no other holder.
    pub(crate) fn output(self, y: &mut Tensor) -> Self {
        self.output_from(y, 0)
    }

    /// Like [`Kernel::output`], from element `start` of a contiguous tensor on.
    pub(crate) fn output_from(self, y: &mut Tensor, start: usize) -> Self {
        let name = self.launch.name();
        let shared = (!y.is_unique()).then(|| {
            Error::memory(name, format!("{y:?} has other holders, writing needs a single one"))
        });
        let overlaps = y.layout().overlaps().then(|| {
            let dims = y.dims();
            Error::shape(name, format!("the elements of the broadcast view {dims:?} overlap"))
        });
        let elsewhere = self.elsewhere(y);
        self.refuse(shared)
            .refuse(overlaps)
            .refuse(elsewhere)
            .moving((y.numel() - start) * y.dtype().size())
            .value(y.address() + (start * y.dtype().size()) as u64)
    }

    /// Adds a tensor that the kernel reads and overwrites, as [`Kernel::output`].
    pub(crate) fn updated(self, y: &mut Tensor) -> Self {
        let bytes = stored_bytes(y);
        self.output(y).moving(bytes)
    }

    fn moving(self, bytes: usize) -> Self {
        Kernel { bytes: self.bytes + bytes, ..self }
    }

    /// States the bytes that the kernel reads and writes, where it does not touch its operands as a whole.
    pub(crate) fn touches(self, bytes: usize) -> Self {
        Kernel { bytes, ..self }
    }

    /// States the matrix products that the kernel computes.
    pub(crate) fn computes(self, products: Products) -> Self {
        Kernel { products, ..self }
    }

    fn elsewhere(&self, x: &Tensor) -> Option<Error> {
        (x.device() != self.device)
            .then(|| Error::device(self.launch.name(), format!("{x:?} is on {:?}", x.device())))
    }

    /// Adds a tensor that the kernel reads, or a null pointer.
    pub(crate) fn optional(self, x: Option<&Tensor>) -> Self {
        match x {
            Some(x) => self.input(x),
            None => self.value(0_u64),
        }
    }

    /// Adds a tensor of indices and their type.
    pub(crate) fn indices(self, ids: &Tensor) -> Self {
        let (kind, wrong) = match ids.dtype() {
            DType::U8 => (IndexType::U8, None),
            DType::U32 => (IndexType::U32, None),
            DType::I64 => (IndexType::I64, None),
            dtype => {
                let message = format!("takes integer indices, got {dtype}");
                (IndexType::I64, Some(Error::dtype(self.launch.name(), message)))
            }
        };
        self.refuse(wrong).input(ids).value(kind as i32)
    }

    /// Adds the address where the kernel records the smallest row-major position of a bad index. The next
    /// synchronization with the GPU reports it as an error of `op`.
    pub(crate) fn bad_index(self, op: &'static str) -> Self {
        match self.gpu.bad_index(op) {
            Ok(address) => self.value(address),
            Err(error) => self.refuse(Some(Error::from_gpu(error))),
        }
    }

    /// Adds a random key and the address of its step number.
    pub(crate) fn draws(self, key: &RandomKey) -> Self {
        let (words, number) = key.words();
        match self.gpu.step(number) {
            Ok(step) => {
                let kernel = self.value(words).value(step.address());
                Kernel { step: Some(step), ..kernel }
            }
            Err(error) => self.refuse(Some(Error::from_gpu(error))),
        }
    }

    /// Adds the shard of the global tensor.
    pub(crate) fn place(self, place: &ShardSpec) -> Self {
        let pieces: Vec<_> = (0..place.dims().len()).map(|d| place.pieces(d)).collect();
        match arguments::Place::new(place.global_dims(), &pieces) {
            Ok(place) => self.value(place),
            Err(error) => self.refuse(Some(Error::from_gpu(error))),
        }
    }

    fn refuse(self, wrong: Option<Error>) -> Self {
        let error = self.error.or(wrong);
        Kernel { error, ..self }
    }

    /// Adds a number or a struct.
    pub(crate) fn value<T: NoUninit>(self, value: T) -> Self {
        Kernel { launch: self.launch.value(value), ..self }
    }

    /// Sets the bytes of dynamic shared memory.
    pub(crate) fn shared(self, bytes: usize) -> Self {
        Kernel { launch: self.launch.shared(bytes), ..self }
    }

    /// Enqueues the kernel; an empty grid does nothing.
    pub(crate) fn run(self, grid: Dim3, block: Dim3) -> Result<()> {
        if let Some(error) = self.error {
            return Err(error);
        }
        if !grid.contains(&0) {
            launched(self.launch.name(), self.dtype, self.bytes, self.products);
        }
        // SAFETY: every address is of a tensor on this GPU. Written tensors have no other holder. Blocks return to
        // the pool in the order of the one stream that runs all kernels. The kernel tests assert that kernels stay
        // within their sizes and layouts.
        unsafe { self.launch.run(grid, block) }.map_err(Error::from_gpu)?;
        drop(self.step);
        Ok(())
    }

    /// Enqueues an elementwise kernel over `n` elements.
    pub(crate) fn run_elements(self, n: usize) -> Result<()> {
        let most = self.gpu.context().multiprocessors() * 16;
        let blocks = n.div_ceil(THREADS * ELEMENTS).min(most);
        self.run([blocks, 1, 1], [THREADS, 1, 1])
    }

    /// Enqueues a kernel that assigns a group of threads to each of `rows` rows of `width`.
    pub(crate) fn run_rows(self, rows: usize, width: usize) -> Result<()> {
        // One warp for a short row, a block of four warps for a long one.
        let (grid, block) = match width <= 256 {
            true => ([rows.div_ceil(4), 1, 1], [32, 4, 1]),
            false => ([rows, 1, 1], [128, 1, 1]),
        };
        self.run(grid, block)
    }

    /// Enqueues a kernel whose groups of threads hold each of `rows` rows of `width` in registers: the fewest warps
    /// that can, at most 16.
    pub(crate) fn run_held_rows(self, rows: usize, width: usize) -> Result<()> {
        let elements = 16 / self.dtype.size();
        let units = if width.is_multiple_of(elements) { width / elements } else { width };
        let threads = units.div_ceil(HELD).next_power_of_two().clamp(32, 512);
        // Blocks of one warp a row have four rows.
        let along_y = if threads == 32 { 4 } else { 1 };
        self.run([rows.div_ceil(along_y), 1, 1], [threads, along_y, 1])
    }
}

/// Bytes of the elements that a view shows, each once.
fn stored_bytes(x: &Tensor) -> usize {
    let shown = x.dims().iter().zip(x.layout().strides()).filter(|(_, stride)| **stride > 0);
    shown.map(|(size, _)| size).product::<usize>().min(x.numel()) * x.dtype().size()
}

/// The layout of `dims` with the strides of each operand broadcast to them.
pub(crate) fn layout(dims: &[usize], operands: &[&Tensor]) -> Result<Layout> {
    let strides = operands
        .iter()
        .map(|x| {
            let broadcast = x.layout().broadcast_to(dims)?;
            Ok(broadcast.strides().iter().map(|&stride| stride as isize).collect())
        })
        .collect::<Result<SmallVec<[SmallVec<[isize; 6]>; 3]>>>()?;
    let strides: SmallVec<[&[isize]; 3]> = strides.iter().map(SmallVec::as_slice).collect();
    Layout::new(dims, &strides).map_err(Error::from_gpu)
}

/// The number and width of the rows along the last dim.
pub(crate) fn rows(x: &Tensor) -> (usize, usize) {
    let width = x.dims().last().copied().unwrap_or(1);
    (x.numel().checked_div(width).unwrap_or(0), width)
}
