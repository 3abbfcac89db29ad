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
pub mod linear_cross_entropy;
pub mod random;
pub mod reduce;
mod rows;
pub mod sgd;
pub mod softmax;
pub mod sq_norm;
#[cfg(test)]
mod testing;
