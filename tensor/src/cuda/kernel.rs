//! A launch whose operands are tensors.

use bytemuck::NoUninit;
use ferrotron_cuda::arguments::Layout;
use ferrotron_cuda::kernels::ElementType;
use ferrotron_cuda::launch::{Dim3, Launch};

use crate::{DType, Device, Error, Result, Tensor};

/// Threads of a block that goes over elements.
const THREADS: usize = 256;
/// Elements that a thread of such a block takes, if there are enough.
const ELEMENTS: usize = 8;

/// A launch on the device of its operands. The first thing that is wrong with one is the error of `run`.
#[must_use]
pub(crate) struct Kernel<'a> {
    launch: Launch<'a>,
    device: &'a Device,
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
    let launch = gpu.kernel(file, element(dtype), name).map_err(Error::of_gpu)?;
    Ok(Kernel { launch, device, error: None })
}

impl Kernel<'_> {
    /// A tensor that is read, from the view's first element on.
    pub(crate) fn input(self, x: &Tensor) -> Self {
        let name = self.launch.name();
        let wrong = (x.device() != self.device)
            .then(|| Error::device(name, format!("{x:?} is on {:?}", x.device())));
        self.address(x, wrong)
    }

    /// A tensor that is written, from the view's first element on: nobody else may hold its buffer.
    pub(crate) fn output(self, y: &mut Tensor) -> Self {
        let name = self.launch.name();
        let shared = (!y.is_unique()).then(|| {
            Error::memory(name, format!("{y:?} has other holders, writing needs a single one"))
        });
        let Kernel { launch, device, error } = self;
        Kernel { launch, device, error: error.or(shared) }.input(y)
    }

    /// A tensor that is read, or nothing.
    pub(crate) fn optional(self, x: Option<&Tensor>) -> Self {
        match x {
            Some(x) => self.input(x),
            None => self.value(0_u64),
        }
    }

    fn address(self, x: &Tensor, wrong: Option<Error>) -> Self {
        let Kernel { launch, device, error } = self;
        Kernel { launch: launch.value(x.address()), device, error: error.or(wrong) }
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
        unsafe { self.launch.run(grid, block) }.map_err(Error::of_gpu)
    }

    /// Gives a kernel that goes over `n` elements to the GPU.
    pub(crate) fn run_elements(self, n: usize) -> Result<()> {
        let most = self.device.gpu().map_or(1, |gpu| gpu.context().multiprocessors() * 16);
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

/// The type that kernels know a dtype by.
pub(crate) fn element(dtype: DType) -> ElementType {
    match dtype {
        DType::F64 => ElementType::F64,
        DType::F32 => ElementType::F32,
        DType::BF16 => ElementType::BF16,
        DType::F16 => ElementType::F16,
        DType::U8 => ElementType::U8,
        DType::U32 => ElementType::U32,
        DType::I64 => ElementType::I64,
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
        .collect::<Result<Vec<Vec<isize>>>>()?;
    let strides: Vec<&[isize]> = strides.iter().map(Vec::as_slice).collect();
    Layout::new(dims, &strides).map_err(Error::of_gpu)
}
