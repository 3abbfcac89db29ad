//! Files: checkpoints, Hugging Face models, TensorBoard's events; data and tokenizers are the crate `ferrotron_data`.

pub(crate) mod checked_file;
pub mod checkpoint;
pub mod hugging_face;
pub(crate) mod tensor_file;
pub mod tensorboard;
pub(crate) mod weight_source;

pub use ferrotron_data as data;
pub use ferrotron_data::{entropy, tokenizer};
