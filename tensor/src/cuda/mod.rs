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

use ferrotron_cuda::kernels::{BinaryRow, UnaryRow, pointwise_rows};

use crate::Error;
use crate::ops::table::{Binary, Saves, Unary};

/// The pointwise table as kernels.
pub(crate) fn rows() -> String {
    let unary: Vec<_> = Unary::ALL
        .iter()
        .map(|op| {
            let [value, derivative] = op.cuda();
            let derivative = (op.saves() != Saves::Nothing).then_some(derivative);
            UnaryRow { name: op.name(), value, derivative }
        })
        .collect();
    let binary: Vec<_> = Binary::ALL
        .iter()
        .map(|op| {
            let [value, lhs, rhs] = op.cuda();
            let reads = op.reads().map(|operands| operands.contains(&true));
            BinaryRow {
                name: op.name(),
                value,
                derivatives: [reads[0].then_some(lhs), reads[1].then_some(rhs)],
            }
        })
        .collect();
    pointwise_rows(&unary, &binary)
}

impl Error {
    /// What the GPU side below tensors reports. Not `From`: with a second error that `?` takes, closures of users would
    /// have to spell out their result types.
    pub fn of_gpu(error: ferrotron_cuda::Error) -> Error {
        Error::device(error.op(), error.context())
    }
}
