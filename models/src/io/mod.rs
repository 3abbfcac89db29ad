//! Files: checkpoints, Hugging Face models; data and tokenizers are the crate `ferrotron_data`.

pub mod checkpoint;
pub mod hugging_face;
pub(crate) mod tensor_file;

pub use ferrotron_data as data;
pub use ferrotron_data::{entropy, tokenizer};
