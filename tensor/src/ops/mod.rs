//! Operations, one file each: the formula, what a gradient needs, the accumulation type, then the CPU
//! kernels of both directions.

pub mod matmul;
pub mod pointwise;
pub mod table;
pub mod adamw;
pub mod cast;
pub mod concat;
pub mod cross_entropy;
pub mod dropout;
pub mod embedding;
pub mod index;
pub mod norm;
pub mod random;
pub mod reduce;
pub(crate) mod rows;
pub mod sgd;
pub mod softmax;
#[cfg(test)]
mod testing;
