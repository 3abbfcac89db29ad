//! Launches GPU kernels; each file belongs to the operation that it is named after.
//!
//! An operation checks its operands in `ops` and dispatches by [`Device::gpu`](crate::Device).
//! An operation without a kernel here returns an error: GPU memory has no slices, so the CPU kernels reject it.

pub(crate) mod adafactor;
pub(crate) mod adamw;
pub(crate) mod argsort;
pub(crate) mod attention;
pub(crate) mod cast;
pub(crate) mod copy;
pub(crate) mod cross_entropy;
pub(crate) mod ema;
pub(crate) mod glu;
pub(crate) mod index;
mod kernel;
mod launched;
pub(crate) mod lion;
pub(crate) mod loss_scale;
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
pub(crate) use launched::host_copy_launched;

use crate::Error;

impl Error {
    /// Converts an error of the CUDA layer. There is no `From`: a second source type for `?` would make users
    /// annotate the result types of their closures.
    pub fn from_gpu(error: ferrotron_cuda::Error) -> Error {
        Error::device(error.op(), error.context())
    }
}
