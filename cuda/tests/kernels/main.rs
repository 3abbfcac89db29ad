//! Runs every kernel on the CPU, through the shim of `sim/shim`, and compares it with the CPU's operation. Cases are
//! every dtype, ragged sizes, and views of any strides. One pass runs under the address sanitizer, and one checks
//! every access for races and counts its cost; changed kernels, each with one mistake, must fail.

mod compile;
mod machine_code;
mod memory;
mod memory_costs;
mod mutants;
mod ops;
mod planted;
mod simulator;
mod support;
