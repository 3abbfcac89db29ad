//! Models, data, tokenizers and training of Ferrotron.
#![deny(missing_docs)]

pub mod batch_size;
pub mod bench;
mod config;
pub mod data;
pub mod entropy;
pub mod evaluate;
pub mod generate;
pub mod gpt;
pub mod plot;
pub mod presets;
pub mod tokenizer;
pub mod trainer;
