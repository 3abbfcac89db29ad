//! Models, data, tokenizers and training of Ferrotron.
#![deny(missing_docs)]

pub mod activation_bytes;
pub mod batch_size;
pub mod bench;
mod block;
pub mod checkpoint;
mod config;
pub mod data;
pub mod entropy;
pub mod evaluate;
pub mod finite;
pub mod generate;
pub mod gpt;
pub mod hugging_face;
pub mod memory;
pub mod memory_limit;
pub mod plot;
pub mod presets;
mod recompute;
pub mod run;
pub mod run_lock;
mod saved_activations;
mod stage;
pub mod stop;
pub mod support;
mod tensor_file;
pub mod tokenizer;
pub mod traffic;
pub mod trainer;
