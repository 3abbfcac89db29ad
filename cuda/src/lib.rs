//! The CUDA side below the tensors: kernels as text, the run-time compiler and the cache of what it compiled, and
//! the search for NVIDIA's libraries.
//!
//! Nothing of CUDA is needed to build this crate or to start a program that has it inside. Libraries are found and
//! loaded when they are asked for; a missing one is an [`Error`] that says where to get it, never a panic.
#![deny(missing_docs)]

pub mod arguments;
pub mod compile;
pub mod cubin_cache;
mod error;
pub mod kernels;
pub mod library;
pub mod nvrtc;
pub mod probe;

pub use error::{Error, Result};
