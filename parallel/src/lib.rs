//! Parallel training: collectives between ranks, the mesh of ranks, layers and gradients that know how
//! they are sharded.
#![deny(missing_docs)]

pub mod collective;
pub mod data_parallel;
pub mod mesh;
mod sharded_weights;
pub mod tensor_parallel;
