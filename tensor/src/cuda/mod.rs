//! The GPU side of tensors: each file launches the kernels of the operation that it is named after.
//!
//! An operation checks its operands where it always does, in `ops`, and asks [`Device::gpu`](crate::Device) who computes.
//! Whatever has no kernel here cannot go wrong silently: memory of a GPU has no slices, so the CPU's kernels return an
//! error.

pub(crate) mod adafactor;
pub(crate) mod adamw;
pub(crate) mod attention;
pub(crate) mod cast;
pub(crate) mod copy;
pub(crate) mod cross_entropy;
pub(crate) mod index;
mod kernel;
pub(crate) mod matmul;
pub(crate) mod norm;
pub(crate) mod outcome;
pub(crate) mod pointwise;
pub(crate) mod random;
pub(crate) mod reduce;
pub(crate) mod rotary;
pub(crate) mod round;
pub(crate) mod sgd;
pub(crate) mod softmax;
pub(crate) mod sq_norm;
pub(crate) mod step;
pub(crate) mod zero_bitmap;

pub(crate) use kernel::{kernel, layout};

use crate::Error;

impl Error {
    /// What the GPU side below tensors reports. Not `From`: with a second error that `?` takes, closures of users would
    /// have to spell out their result types.
    pub fn of_gpu(error: ferrotron_cuda::Error) -> Error {
        Error::device(error.op(), error.context())
    }
}
