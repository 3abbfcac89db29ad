//! Evaluation tasks: of language models, whose texts become requests for scores, and scores the task's numbers; and of a
//! BERT, whose questions become samples.
//!
//! | task | definition |
//! |---|---|
//! | [`WikiText`] | word-level perplexity as Megatron-LM defines it |
//! | [`Lambada`] | accuracy and perplexity of the last word, in Megatron-LM's strict form or that of lm-evaluation-harness |
//! | [`Race`] | accuracy of a BERT that chooses among four options, as in Megatron-LM |

mod detokenize;
mod lambada;
mod race;
mod request;
mod wikitext;

pub use detokenize::detokenize_wikitext;
pub use lambada::{Lambada, LambadaForm, LambadaResult};
pub use race::{NUM_CHOICES, Race, RaceArticle, RaceQuestion, ShuffledRace};
pub use request::{ScoreRequest, TokenScore, requests_crc32};
pub use wikitext::{WikiText, WikiTextConfig, WikiTextResult};

#[cfg(test)]
mod tests;
