//! Files: checkpoints, data, tokenizers, Hugging Face models.

pub mod checkpoint;
pub mod data;
pub mod entropy;
pub mod hugging_face;
pub(crate) mod tensor_file;
pub mod tokenizer;
