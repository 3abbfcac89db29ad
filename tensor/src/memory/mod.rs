//! Memory: pools and the blocks in them, flat buffers, host memory and copies between the two.

pub(crate) mod buffer;
pub(crate) mod flat;
pub(crate) mod mapped_file;
pub(crate) mod memory_kind;
pub(crate) mod pool;
pub(crate) mod staging;
pub(crate) mod stream_guard;
pub(crate) mod transfer;
