//! Parallel training: collectives, the mesh of ranks, sharded layers and gradients, and pipelines. It also makes ranks
//! agree on what they train, and traces all that.
#![deny(missing_docs)]

// `#[derive(Module)]` writes `::ferrotron::nn`.
extern crate ferrotron_nn as ferrotron;

pub mod agreement;
pub mod collective;
pub mod context_parallel;
pub mod data_parallel;
mod descriptors;
pub mod gradcheck;
pub mod launch;
pub mod long_work;
pub mod mesh;
pub mod output_file;
pub mod pipeline;
pub mod tensor_parallel;
pub mod trace;
