//! The memory that a collective reads and writes: it owns it until it is waited for.

use ferrotron_autograd::SharedFlat;
use ferrotron_tensor::ops::pointwise::own;
use ferrotron_tensor::{Result, Tensor, dispatch_any};
use std::sync::PoisonError;

/// A buffer that a collective has while it runs.
pub enum Buffer {
    /// A tensor that nobody else holds, dense.
    Tensor(Tensor),
    /// All ranges of a flat. Nobody may hold one of them meanwhile.
    Flat(SharedFlat),
}

impl Buffer {
    /// Takes a tensor; one that others hold too, or that is not dense, is copied first.
    pub fn of(tensor: Tensor) -> Result<Buffer> {
        own(tensor).map(Buffer::Tensor)
    }

    /// Lends the bytes to `f`.
    ///
    /// Errors if somebody else holds the tensor, or a range of the flat.
    pub fn with_bytes<R>(&mut self, f: impl FnOnce(&mut [u8]) -> R) -> Result<R> {
        match self {
            Buffer::Tensor(tensor) => {
                dispatch_any!(tensor.dtype(), T => Ok(f(bytemuck::cast_slice_mut(tensor.as_mut_slice::<T>()?))))
            }
            Buffer::Flat(flat) => {
                let mut flat = flat.lock().unwrap_or_else(PoisonError::into_inner);
                dispatch_any!(flat.dtype(), T => Ok(f(bytemuck::cast_slice_mut(flat.whole_mut::<T>()?))))
            }
        }
    }

    /// The tensor.
    pub fn into_tensor(self) -> Option<Tensor> {
        match self {
            Buffer::Tensor(tensor) => Some(tensor),
            Buffer::Flat(_) => None,
        }
    }
}

/// What a call works on. Which of the two there are depends on the operation:
///
/// | operation | input | output |
/// |---|---|---|
/// | all-reduce, reduce, broadcast, all-gather, reduce-scatter | - | the whole buffer, in place |
/// | gather | own part | the whole, on the root only |
/// | scatter | the whole, on the root only | own part |
/// | all-to-all | the whole | part i of everybody, in rank order |
/// | send | the whole | - |
/// | receive | - | the whole |
/// | exchange | the whole to send | the whole to receive |
/// | barrier | - | - |
#[derive(Default)]
pub struct Memory {
    /// Read.
    pub input: Option<Buffer>,
    /// Written, or read and written in place.
    pub output: Option<Buffer>,
}

impl Memory {
    /// One buffer that is changed in place.
    pub fn in_place(buffer: Buffer) -> Memory {
        Memory { input: None, output: Some(buffer) }
    }
}
