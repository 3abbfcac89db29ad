//! Operations, one file each: the formula, what a gradient needs, the accumulation type, then the CPU
//! kernels of both directions.

pub mod matmul;
pub mod pointwise;
pub mod table;
