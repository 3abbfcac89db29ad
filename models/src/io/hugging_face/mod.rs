//! Language models and [BERT](bert) in and out of Hugging Face's format: a folder with `config.json` and
//! `model.safetensors`, in one file or several.
//!
//! | family, `model_type` | beside GPT-2 and Llama as they are here |
//! |---|---|
//! | GPT-2, `gpt2` | weights of linear layers are (in, out) there |
//! | Llama 1 to 3.2 and SmolLM, `llama` | `rope_scaling` of type llama3; queries, keys and values, gate and up are tensors of their own there |
//! | Mistral, `mistral` | a window of 4096 where none is named |
//! | Qwen 2 and 2.5, `qwen2` | biases of queries, keys and values |
//! | Qwen 3, `qwen3` | norms of queries and keys |
//! | Gemma 2, `gemma2` | norms with weights around 0 before and behind attention and MLP, GeGLU, soft caps, scaled embeddings, a window in every other block |
//! | GPT-NeoX and Pythia, `gpt_neox` | partial rotary positions, parallel residual; rows of queries, keys and values by head there |
//!
//! Rotations pair element i with i + D/2 on both sides. A tied head that is stored again must equal the token embedding.
//! Other families are refused, with the switch that they would need.

pub mod bert;
mod companions;
mod config;
mod export;
mod families;
mod files;
mod import;
mod json;
mod mapping;
mod model_kind;
mod weights;

pub use companions::CompanionFiles;
pub use config::read_config;
pub use export::{ReadParam, export, export_as, export_from, export_tokenizer};
pub use files::{common_dtype, is_folder, weights_identity};
pub use import::{import, read_tokenizer, stored_dtypes, tokenizer_choice, weights};
pub use model_kind::{ModelKind, model_kind, model_type};
pub use weights::FolderWeights;

#[cfg(test)]
mod tests;

#[cfg(test)]
mod family_tests;
