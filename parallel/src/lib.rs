//! Parallel training. What exists so far: the schedules of pipelines.
#![deny(missing_docs)]

pub mod pipeline;
