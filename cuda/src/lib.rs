//! CUDA below the tensor level: contexts, streams, memory, kernel sources with the run-time compiler and its cache,
//! and the search for NVIDIA's libraries.
//!
//! Neither building this crate nor starting a program that contains it needs CUDA. Libraries are found and loaded on
//! first use; if one is missing, the [`Error`] says where to get it.
#![deny(missing_docs)]

pub mod arguments;
pub mod attention;
mod cache_folder;
pub mod compile;
pub mod context;
pub mod cubin_cache;
pub mod cublaslt;
pub mod device_scalars;
mod driver;
mod error;
pub mod gpu;
pub mod graph;
#[cfg(test)]
mod headers;
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
