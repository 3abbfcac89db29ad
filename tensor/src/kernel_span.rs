//! Spans of kernels: the name of each, and its work, for a profile.
//!
//! Spans of the `tracing` crate go to the thread's subscriber. Without one, a span costs a comparison, and its work is
//! not counted.

use crate::Tensor;

/// Enters the span of a kernel until the result is dropped. It states the dtype of the operands, floating-point
/// operations of products (0 where memory decides), and bytes: of the tensors that are read, of `perhaps` if there is one, and
/// of those that are written, each counted once; `more` bytes come to the latter.
macro_rules! kernel_span {
    ($name:expr, $dtype:expr, $flops:expr, [$($read:expr),* $(; $perhaps:expr)?] => [$($written:expr),*] $(, $more:expr)?) => {
        tracing::trace_span!(
            "kernel",
            name = $name,
            dtype = %$dtype,
            flops = $flops as u64,
            read = 0_u64 $(+ $crate::kernel_span::bytes($read))* $(+ $perhaps.map_or(0, $crate::kernel_span::bytes))?,
            written = 0_u64 $(+ $crate::kernel_span::bytes($written))* $(+ $more)?
        )
        .entered()
    };
}
pub(crate) use kernel_span;

/// Bytes of the elements of a tensor. An expanded dim lies in memory once.
pub(crate) fn bytes(x: &Tensor) -> u64 {
    let dims = x.dims().iter().zip(x.layout().strides());
    let held: usize =
        dims.map(|(&size, &stride)| if stride == 0 { size.min(1) } else { size }).product();
    (held * x.dtype().size()) as u64
}
