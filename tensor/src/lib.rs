//! Values: tensors over pooled memory, views, counter-based randomness and CPU kernels.
#![deny(missing_docs)]

mod dtype;
mod error;
pub mod gemm;
mod philox;
mod real;

pub use dtype::{DType, Element, Index, Scalar};
pub use error::{At, Error, ErrorKind, Result};
pub use half::{bf16, f16};
pub use philox::{RandomKey, philox4x32_10};
pub use real::Real;
