//! Numbers: floating-point functions, instruction sets, random bits, disjoint writes.

pub(crate) mod disjoint;
pub(crate) mod fours;
#[cfg(all(test, target_arch = "x86_64", target_os = "linux"))]
pub(crate) mod instructions;
pub(crate) mod lanes;
pub(crate) mod philox;
pub(crate) mod prefetch;
pub(crate) mod real;
pub(crate) mod simd;
