//! Plans: memory, traffic and supported layouts of a run, before it starts.

pub mod activation_bytes;
pub mod memory;
pub mod memory_limit;
mod stages_together;
pub mod support;
pub mod traffic;
