//! Training with gradients that are reduced, weights that are sharded and models that are cut into stages.

mod grid;
mod harness;
mod toy;
