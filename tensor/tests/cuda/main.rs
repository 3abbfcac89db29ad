//! Operations on a GPU, which here is a stand-in on the CPU. Driver, compiler and matrix products are libraries with
//! NVIDIA's interface, and everything above them is what a real GPU runs.

mod aside;
mod attention;
mod both;
mod creation;
mod cross_entropy;
mod embedding;
mod flat;
mod glu;
mod graph;
mod indices;
mod linear;
mod linear_cross_entropy;
mod matmul;
mod memory;
mod norm;
mod operations;
mod optimizers;
#[path = "../reference/mod.rs"]
mod reference;
mod rotary;
mod small_model;
mod softmax;
mod support;
