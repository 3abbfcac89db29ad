//! Models and training of Ferrotron, with the data and tokenizers of [`ferrotron_data`].
#![deny(missing_docs)]
#![forbid(unsafe_code)]

// `#[derive(Module)]` writes `::ferrotron::nn`.
extern crate ferrotron_nn as ferrotron;

pub mod finite;
mod io;
mod model;
mod planning;
mod training;

pub use io::{checkpoint, data, entropy, hugging_face, tensorboard, tokenizer};
pub use model::{bert, generate, gpt, presets};
pub use planning::{activation_bytes, memory, memory_limit, support, traffic};
#[cfg(feature = "plot")]
pub use training::plot;
pub use training::{
    batch_size, bench, evaluate, generate_on_ranks, loss_curve, profile, run, run_lock, score,
    stop, trainer,
};
