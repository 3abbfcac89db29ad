//! Tensors: typed views of buffers, with their layouts, dtypes and errors.

pub(crate) mod copy;
mod display;
pub(crate) mod dtype;
pub(crate) mod error;
pub(crate) mod layout;
pub(crate) mod shard_spec;
pub(crate) mod tensor;
pub(crate) mod view;
