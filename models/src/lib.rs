//! Models, data, tokenizers and training of Ferrotron.

pub mod batch_size;
pub mod data;
pub mod entropy;
pub mod tokenizer;
