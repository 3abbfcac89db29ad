//! Announces the work that a GPU is given: an event of the `tracing` crate for each kernel, matrix product and copy.
//!
//! A step on a fake GPU thus yields the list of its work, from which `ferrotron-planner` predicts the time of the step.
//! Without a subscriber an event costs a comparison.
//!
//! Spans of `kernel_span` time an operation of the CPU as a whole. An operation of a GPU is several launches, whose host
//! time says nothing and whose cost follows from their names and sizes, so these are events with other fields.

use ferrotron_cuda::cublaslt::{Epilogue, Matmul};
use tracing::trace;

use crate::DType;

/// The matrix products within a kernel: `count` of (rows, inner) by (inner, columns) for each of `batch`.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Products {
    pub count: usize,
    pub batch: usize,
    pub rows: usize,
    pub columns: usize,
    pub inner: usize,
    /// Whether only the products below the diagonal are computed.
    pub causal: bool,
}

/// Announces a launch of `kernel`, which moves `bytes` between GPU memory and the multiprocessors.
pub(super) fn launched(kernel: &'static str, dtype: DType, bytes: usize, products: Products) {
    let Products { count, batch, rows, columns, inner, causal } = products;
    trace!(name: "launch", kernel, dtype = %dtype, bytes, count, batch, rows, columns, inner, causal);
}

/// Announces a copy of `bytes` between GPU memory and host memory.
pub(crate) fn host_copy_launched(bytes: usize) {
    launched("host_copy", DType::U8, bytes, Products::default());
}

/// Announces a matrix product with operands and a result of these dtypes.
pub(super) fn product_launched(call: &Matmul, operands: DType, result: DType) {
    let Matmul { batch, sizes: [rows, columns, inner], left, right, beta, epilogue, .. } = *call;
    let matrices = |stride: usize| if stride == 0 { 1 } else { batch };
    let read =
        matrices(left.batch_stride) * rows * inner + matrices(right.batch_stride) * inner * columns;
    // The addends, and what an epilogue reads or writes beside the new ones; its vectors are small.
    let also = match epilogue {
        Epilogue::Gelu { .. } | Epilogue::GeluDerivative { .. } => 1,
        Epilogue::None | Epilogue::Bias(_) | Epilogue::RowSums(_) => 0,
    };
    let written = batch * rows * columns * (1 + also + usize::from(beta != 0.0));
    let bytes = read * operands.size() + written * result.size();
    launched(
        "matmul",
        operands,
        bytes,
        Products { count: 1, batch, rows, columns, inner, causal: false },
    );
}
