//! Tensors over pooled memory, views, counter-based random numbers, and CPU and GPU kernels.
//!
//! A [`Tensor`] is a typed, immutable view of a buffer from its [`Device`]'s pool; it records no graph. Operations
//! are methods of [`Tensor`] or functions of [`ops`], each in a file of its name. The `autograd` crate adds
//! gradients.
#![deny(missing_docs)]

pub mod ceilings;
mod core;
mod cuda;
mod device;
pub mod gemm;
mod kernel_span;
mod memory;
#[doc(hidden)] // for the list of methods that `autograd` shares
pub mod methods;
mod numeric;
pub mod ops;
mod thread_team;

pub use crate::core::dtype::{DType, Element, Index, Scalar};
pub use crate::core::error::{At, Error, ErrorKind, Result};
pub use crate::core::layout::{Dims, Layout, broadcast_dims};
pub use crate::core::shard_spec::{ShardSpec, partition_range};
pub use crate::core::tensor::Tensor;
pub use device::cuda_graph::CudaGraph;
pub use device::{Device, Moment};
pub use half::{bf16, f16};
pub use memory::flat::FlatBuffer;
pub use memory::memory_kind::MemoryKind;
pub use memory::pool::{Category, MemoryStats};
pub use memory::staging::Staging;
pub use memory::stream_guard::{StreamGuard, copy_async};
pub use numeric::philox::{RandomKey, philox4x32_10};
pub use numeric::real::Real;
pub use numeric::simd::SimdLevel;
pub use thread_team::ThreadTeam;
