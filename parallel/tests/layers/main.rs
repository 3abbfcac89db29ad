//! Tensor-, sequence- and context-parallel layers against serial ones, on ranks that are threads.

// `#[derive(Module)]` writes `::ferrotron::nn`.
extern crate ferrotron_nn as ferrotron;

mod attention;
mod attention_bias;
mod bitwise;
mod block;
mod branch;
mod embedding;
mod gradients;
mod head;
mod linear;
mod mappings;
mod overlap;
mod ranks;
mod refusals;
mod traffic;
