//! Tensors over pooled memory, views, counter-based random numbers, and CPU and GPU kernels.
//!
//! A [`Tensor`] is a typed, immutable view of a buffer from its [`Device`]'s pool; it records no graph. Operations
//! are methods of [`Tensor`] or functions of [`ops`], each in a file of its name. The `autograd` crate adds
//! gradients.
#![deny(missing_docs)]

mod buffer;
mod capture;
mod cuda;
mod cuda_graph;
mod device;
mod disjoint;
mod dtype;
mod error;
mod flat;
pub mod gemm;
mod layout;
mod lent;
mod mapped_file;
mod memory_kind;
pub mod ops;
mod philox;
mod place;
mod pool;
mod real;
mod simd;
mod staging;
mod tensor;
mod transfer;
mod view;

pub use cuda_graph::CudaGraph;
pub use device::Device;
pub use dtype::{DType, Element, Index, Scalar};
pub use error::{At, Error, ErrorKind, Result};
pub use flat::FlatBuffer;
pub use half::{bf16, f16};
pub use layout::{Dims, Layout, broadcast_dims};
pub use lent::{StreamGuard, copy_async};
pub use memory_kind::MemoryKind;
pub use philox::{RandomKey, philox4x32_10};
pub use place::{ShardSpec, partition_range};
pub use pool::{Category, MemoryStats};
pub use real::Real;
pub use simd::SimdLevel;
pub use staging::Staging;
pub use tensor::Tensor;
