//! Optimizer steps and the checks around them. None has a gradient.

pub mod adafactor;
pub mod adamw;
mod at_random;
pub(crate) mod config;
pub mod ema;
pub mod lion;
pub mod loss_scale;
pub mod outcome;
pub mod round;
pub mod rounded;
pub mod sgd;
pub mod sq_norm;
pub mod step;
