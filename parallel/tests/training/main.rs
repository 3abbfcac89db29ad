//! Training with gradients that are reduced, weights that are sharded and models that are cut into stages.

// `#[derive(Module)]` writes `::ferrotron::nn`.
extern crate ferrotron_nn as ferrotron;

mod asynchronous;
mod buckets;
mod cases;
mod executor;
mod faults;
mod gathers;
mod grid;
mod harness;
mod local;
mod memory;
mod refused_steps;
mod replicas;
mod thawing;
mod toy;
mod traffic;
mod unflushed;
mod unused;
