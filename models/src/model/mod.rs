//! The models: GPT and BERT, their blocks, recomputation, presets and generation.

pub mod bert;
pub(crate) mod block;
pub(crate) mod config;
mod config_bounds;
mod config_counts;
pub mod generate;
pub mod gpt;
mod logits_limit;
pub mod presets;
pub(crate) mod recompute;
pub(crate) mod sampling;
pub(crate) mod saved_activations;
pub(crate) mod sizes;
pub(crate) mod training;
pub(crate) mod transformer;
pub(crate) mod window_pattern;
