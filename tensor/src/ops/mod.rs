//! Operations, one file each: the formula, the values a gradient needs, the accumulator type, then the CPU kernels of
//! both directions.

pub mod argsort;
pub mod attention;
pub mod cast;
pub mod concat;
pub mod cross_entropy;
pub mod dropout;
pub mod embedding;
pub mod glu;
pub mod index;
pub mod layer_norm;
pub mod linear;
pub mod linear_cross_entropy;
pub mod matmul;
pub(crate) mod optim;
pub mod pointwise;
pub mod random;
pub mod reduce;
pub mod rms_norm;
pub mod rotary;
pub mod scale;
pub mod softmax;
pub mod table;
pub mod truncated_normal;
pub mod zero_bitmap;

pub(crate) mod norm;
pub(crate) mod rows;
#[cfg(test)]
mod testing;
#[cfg(all(test, target_arch = "x86_64", target_os = "linux"))]
mod vectorization;

pub(crate) use crate::core::view;
pub use optim::{
    adafactor, adamw, ema, lion, loss_scale, outcome, round, rounded, sgd, sq_norm, step,
};
