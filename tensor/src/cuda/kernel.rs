//! A launch whose operands are tensors.

use bytemuck::NoUninit;
use ferrotron_cuda::arguments::{self, IndexType, Layout};
use ferrotron_cuda::cells::StepCell;
use ferrotron_cuda::gpu::Gpu;
use ferrotron_cuda::kernels::File;
use ferrotron_cuda::launch::{Dim3, Launch};
use smallvec::SmallVec;

use crate::{DType, Device, Error, Place, RandomKey, Result, Tensor};

/// Threads of a block that goes over elements.
const THREADS: usize = 256;
/// Elements that a thread of such a block takes, if there are enough.
const ELEMENTS: usize = 8;

/// A launch on the device of its operands. The first thing that is wrong with one is the error of `run`.
#[must_use]
pub(crate) struct Kernel<'a> {
    launch: Launch<'a>,
    device: &'a Device,
    gpu: &'a Gpu,
    /// Held until the launch, for a kernel that draws random numbers.
    step: Option<StepCell<'a>>,
    error: Option<Error>,
}

/// The kernel `name` of `file` for elements of `dtype`.
///
/// Errors if `device` is no GPU, or has no such kernel.
pub(crate) fn kernel<'a>(
    device: &'a Device,
    file: &'static str,
    dtype: DType,
    name: &'static str,
) -> Result<Kernel<'a>> {
    let gpu = device.gpu().ok_or_else(|| Error::device(name, "the device is no GPU"))?;
    if File::named(file).is_some_and(|file| !file.types.contains(&dtype.into())) {
        return Err(Error::dtype(name, format!("there is no kernel for {dtype}")));
    }
    let launch = gpu.kernel(file, dtype.into(), name).map_err(Error::of_gpu)?;
    Ok(Kernel { launch, device, gpu, step: None, error: None })
}

impl Kernel<'_> {
    /// A tensor that is read, from the view's first element on.
    pub(crate) fn input(self, x: &Tensor) -> Self {
        let elsewhere = self.elsewhere(x);
        self.refuse(elsewhere).value(x.address())
    }

    /// A tensor that is written, from the view's first element on: nobody else may hold its buffer.
    pub(crate) fn output(self, y: &mut Tensor) -> Self {
        self.output_from(y, 0)
    }

    /// As [`Kernel::output`], from element `start` of a dense tensor on.
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
            .value(y.address() + (start * y.dtype().size()) as u64)
    }

    fn elsewhere(&self, x: &Tensor) -> Option<Error> {
        (x.device() != self.device)
            .then(|| Error::device(self.launch.name(), format!("{x:?} is on {:?}", x.device())))
    }

    /// A tensor that is read, or nothing.
    pub(crate) fn optional(self, x: Option<&Tensor>) -> Self {
        match x {
            Some(x) => self.input(x),
            None => self.value(0_u64),
        }
    }

    /// A tensor of indices, and their type.
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

    /// Where the kernel puts the smallest position in row-major order whose index is bad: an error of `op` when the
    /// host next waits for the GPU.
    pub(crate) fn bad_index(self, op: &'static str) -> Self {
        match self.gpu.bad_index(op) {
            Ok(address) => self.value(address),
            Err(error) => self.refuse(Some(Error::of_gpu(error))),
        }
    }

    /// A key of random numbers, and the step that belongs to it.
    pub(crate) fn draws(self, key: &RandomKey) -> Self {
        let (words, number) = key.words();
        match self.gpu.step(number) {
            Ok(step) => {
                let kernel = self.value(words).value(step.address());
                Kernel { step: Some(step), ..kernel }
            }
            Err(error) => self.refuse(Some(Error::of_gpu(error))),
        }
    }

    /// Which part of the global tensor is here.
    pub(crate) fn place(self, place: &Place) -> Self {
        let pieces: Vec<_> = (0..place.dims().len()).map(|d| place.pieces(d)).collect();
        match arguments::Place::new(place.global_dims(), &pieces) {
            Ok(place) => self.value(place),
            Err(error) => self.refuse(Some(Error::of_gpu(error))),
        }
    }

    fn refuse(self, wrong: Option<Error>) -> Self {
        let error = self.error.or(wrong);
        Kernel { error, ..self }
    }

    /// A number or a struct.
    pub(crate) fn value<T: NoUninit>(self, value: T) -> Self {
        Kernel { launch: self.launch.value(value), ..self }
    }

    /// Bytes of dynamic shared memory.
    pub(crate) fn shared(self, bytes: usize) -> Self {
        Kernel { launch: self.launch.shared(bytes), ..self }
    }

    /// Gives the kernel to the GPU; an empty grid has nothing to do.
    pub(crate) fn run(self, grid: Dim3, block: Dim3) -> Result<()> {
        if let Some(error) = self.error {
            return Err(error);
        }
        // SAFETY: every address is of a tensor on this GPU. What is written has no other holder, and blocks of memory
        // come back to the pool in the order of the one stream in which all kernels run. That a kernel stays within
        // what its sizes and layouts say is what the kernels' tests assert.
        unsafe { self.launch.run(grid, block) }.map_err(Error::of_gpu)?;
        drop(self.step);
        Ok(())
    }

    /// Gives a kernel that goes over `n` elements to the GPU.
    pub(crate) fn run_elements(self, n: usize) -> Result<()> {
        let most = self.gpu.context().multiprocessors() * 16;
        let blocks = n.div_ceil(THREADS * ELEMENTS).min(most);
        self.run([blocks, 1, 1], [THREADS, 1, 1])
    }

    /// Gives a kernel to the GPU that gives each of `rows` rows of `width` a group of threads.
    pub(crate) fn run_rows(self, rows: usize, width: usize) -> Result<()> {
        // A warp for a short row, a block of four for a long one.
        let (grid, block) = match width <= 256 {
            true => ([rows.div_ceil(4), 1, 1], [32, 4, 1]),
            false => ([rows, 1, 1], [128, 1, 1]),
        };
        self.run(grid, block)
    }
}

/// Dims, and the strides of each operand's view broadcast to them.
pub(crate) fn layout(dims: &[usize], operands: &[&Tensor]) -> Result<Layout> {
    let strides = operands
        .iter()
        .map(|x| {
            let broadcast = x.layout().broadcast_to(dims)?;
            Ok(broadcast.strides().iter().map(|&stride| stride as isize).collect())
        })
        .collect::<Result<SmallVec<[SmallVec<[isize; 6]>; 3]>>>()?;
    let strides: SmallVec<[&[isize]; 3]> = strides.iter().map(SmallVec::as_slice).collect();
    Layout::new(dims, &strides).map_err(Error::of_gpu)
}
