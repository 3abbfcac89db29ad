//! Models, data, tokenizers and training of Ferrotron.
#![deny(missing_docs)]

pub mod batch_size;
pub mod bench;
mod config;
pub mod data;
pub mod entropy;
pub mod gpt;
pub mod presets;
pub mod tokenizer;
pub mod trainer;
