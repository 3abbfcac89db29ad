//! Training with gradients that are reduced, weights that are sharded and models that are cut into stages.

mod cases;
mod executor;
mod faults;
mod grid;
mod harness;
mod local;
mod memory;
mod refused_steps;
mod replicas;
mod toy;
mod traffic;
mod unused;
