//! Evaluation tasks of language models: texts become requests for scores, and scores become the task's numbers.
//!
//! | task | definition |
//! |---|---|
//! | [`WikiText`] | word-level perplexity as Megatron-LM defines it |
//! | [`Lambada`] | accuracy and perplexity of the last word, in Megatron-LM's strict form or that of lm-evaluation-harness |

mod detokenize;
mod lambada;
mod request;
mod wikitext;

pub use detokenize::detokenize_wikitext;
pub use lambada::{Lambada, LambadaForm, LambadaResult};
pub use request::{ScoreRequest, TokenScore};
pub use wikitext::{WikiText, WikiTextConfig, WikiTextResult};

#[cfg(test)]
mod tests;
