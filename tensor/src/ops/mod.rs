//! Operations, one file each: the formula, what a gradient needs, the accumulation type, then the CPU
//! kernels of both directions.

pub mod attention;
pub mod layer_norm;
mod norm;
pub mod rms_norm;
pub mod rotary;
