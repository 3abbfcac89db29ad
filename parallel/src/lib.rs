//! Parallel training: collectives between ranks, the mesh of ranks, layers and gradients that know how
//! they are sharded.
#![deny(missing_docs)]

pub mod collective;
pub mod mesh;
pub mod tensor_parallel;
