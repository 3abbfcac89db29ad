//! Builder of a kernel launch, with arguments in the kernel's order.

use bytemuck::NoUninit;
use smallvec::SmallVec;
use std::ffi::c_void;
use std::ptr;

use crate::driver::{check, sys};
use crate::modules::Function;
use crate::stream::Stream;
use crate::{Error, Result};

/// Number of blocks along x, y and z, or of threads in a block.
pub type Dim3 = [usize; 3];

/// Arguments of a kernel launch.
#[must_use]
pub struct Launch<'a> {
    stream: &'a Stream,
    function: Function,
    name: &'static str,
    /// The arguments, each aligned to 16 bytes.
    words: SmallVec<[u128; 32]>,
    /// The first word of each argument.
    starts: SmallVec<[usize; 16]>,
    shared: usize,
}

impl<'a> Launch<'a> {
    pub(crate) fn new(stream: &'a Stream, function: Function, name: &'static str) -> Launch<'a> {
        Launch {
            stream,
            function,
            name,
            words: SmallVec::new(),
            starts: SmallVec::new(),
            shared: 0,
        }
    }

    /// The kernel's name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Adds a number, a struct, or a device address.
    pub fn value<T: NoUninit>(mut self, value: T) -> Self {
        let bytes = bytemuck::bytes_of(&value);
        let start = self.words.len();
        self.starts.push(start);
        self.words.resize(start + bytes.len().div_ceil(16), 0);
        bytemuck::cast_slice_mut::<u128, u8>(&mut self.words[start..])[..bytes.len()]
            .copy_from_slice(bytes);
        self
    }

    /// Sets the bytes of dynamic shared memory.
    pub fn shared(mut self, bytes: usize) -> Self {
        self.shared = bytes;
        self
    }

    /// Enqueues the kernel. An empty grid does nothing.
    ///
    /// Errors if the GPU rejects grid, block or shared memory.
    ///
    /// # Safety
    /// The arguments match the kernel's declaration, and every address is memory that the kernel may use as it does
    /// until it completes.
    pub unsafe fn run(mut self, grid: Dim3, block: Dim3) -> Result<()> {
        let threads: usize = block.iter().product();
        let fits = grid[0] < 1 << 31 && grid[1] < 1 << 16 && grid[2] < 1 << 16;
        if !fits || threads == 0 || threads > self.function.threads {
            let message = format!(
                "needs a grid of {grid:?} blocks of {block:?} threads, and a GPU takes at most [2147483647, 65535, 65535] \
                 blocks of {} threads of this kernel: use smaller operands, such as a smaller batch",
                self.function.threads
            );
            return Err(Error::new(self.name, message));
        }
        if grid.contains(&0) {
            return Ok(());
        }
        if self.stream.context().is_fake() {
            return Ok(());
        }
        self.stream.context().bind()?;
        self.function.allow_shared(self.shared)?;
        let words = self.words.as_mut_ptr();
        let mut pointers: SmallVec<[*mut c_void; 16]> =
            self.starts.iter().map(|&start| words.wrapping_add(start).cast()).collect();
        let ([gx, gy, gz], [bx, by, bz]) = (grid.map(|n| n as u32), block.map(|n| n as u32));
        // SAFETY: the pointers are to the arguments, which the driver copies; the caller guarantees their values.
        let status = unsafe {
            sys::cuLaunchKernel(
                self.function.handle,
                gx,
                gy,
                gz,
                bx,
                by,
                bz,
                self.shared as u32,
                self.stream.handle(),
                pointers.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        check("cuLaunchKernel", status).map_err(|error| {
            Error::new(self.name, format!("the launch failed: {}", error.context()))
        })
    }
}
