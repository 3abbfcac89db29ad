//! Operations on a GPU, which here is a stand-in on the CPU: driver, compiler and matrix products are libraries with
//! NVIDIA's interface, and everything above them is what a real GPU runs.

mod indices;
mod matmul;
mod memory;
mod operations;
mod support;
