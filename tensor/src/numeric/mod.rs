//! Numbers: floating-point functions, instruction sets, random bits, disjoint writes.

pub(crate) mod disjoint;
pub(crate) mod philox;
pub(crate) mod real;
pub(crate) mod simd;
