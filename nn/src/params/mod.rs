//! Parameters: what is known of each, their initial values, and the flat buffers that hold them.

pub(crate) mod axis;
pub(crate) mod buffer_config;
mod containers;
pub(crate) mod element_shards;
pub mod field;
pub(crate) mod init;
pub(crate) mod module;
pub(crate) mod options;
pub(crate) mod param;
pub(crate) mod param_and_grad_bucket;
pub(crate) mod param_and_grad_buffer;
pub(crate) mod param_patterns;
pub(crate) mod random_site;
pub(crate) mod registry;
pub(crate) mod scope;
pub(crate) mod summary;
