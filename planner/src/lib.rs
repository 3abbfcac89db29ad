//! Predicts how long a training step takes on a cluster, before the cluster is rented.
//!
//! The trainer takes one step as a rank of each pipeline stage, on a fake GPU and with fake groups. [`record`](mod@record)
//! notes its kernels and collectives, each within its pipeline instruction. [`cost`] and [`network`] time them on a
//! [`Cluster`], and [`simulate`](mod@simulate) replays all instructions of the schedule with these times. Nothing here
//! knows a layer, a schedule or the traffic of either. [`search`](mod@search) finds the fastest layouts that fit.

#![deny(missing_docs)]
#![forbid(unsafe_code)]

mod asynchronous;
mod bound;
pub mod calibrate;
pub mod cluster;
pub mod cost;
pub mod curve;
mod fields;
pub mod kernels;
mod keys;
pub mod network;
pub mod predict;
pub mod program;
pub mod record;
pub mod search;
pub mod sharing;
pub mod simulate;
pub mod space;
pub mod stage_time;
pub mod steps;
pub mod trace;

pub use calibrate::calibrate;
pub use cluster::Cluster;
pub use predict::{Prediction, RecordedRun, predict};
pub use search::{Plan, Planned, enough, search};
pub use space::{Layout, Offload, Recomputation, Space};
