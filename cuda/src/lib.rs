//! The CUDA side below the tensors: the driver's contexts, streams and memory, kernels as text with the run-time
//! compiler and the cache of what it compiled, and the search for NVIDIA's libraries.
//!
//! Nothing of CUDA is needed to build this crate or to start a program that has it inside. Libraries are found and
//! loaded when they are asked for; a missing one is an [`Error`] that says where to get it, never a panic.
#![deny(missing_docs)]

pub mod arguments;
pub mod cells;
pub mod compile;
pub mod context;
pub mod cubin_cache;
pub mod cublaslt;
mod driver;
mod error;
pub mod gpu;
pub mod graph;
pub mod kernels;
pub mod launch;
pub mod library;
pub mod memory;
mod modules;
pub mod nccl;
pub mod nvrtc;
pub mod probe;
pub mod stream;
mod uploads;

pub use error::{Error, Result};
