//! WikiText: word-level perplexity of one long text in overlapping windows, as Megatron-LM's task WIKITEXT103.
//!
//! The text is detokenized and tokenized. Each token but the first is scored once. The loss is the mean over these
//! T - 1 tokens; the adjusted perplexity is exp(loss (T - 1) / (W - 1)) for W words of the file, which are its parts
//! between single spaces. It therefore does not depend on the tokenizer.
//!
//! Source: `tasks/zeroshot_gpt` of Megatron-LM, and Shoeybi et al., arXiv 1909.08053, appendix E.

use super::detokenize::detokenize_wikitext;
use super::request::ScoreRequest;
use crate::tokenizer::Tokenizer;
use ferrotron_tensor::{Error, Result};

/// The windows of the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WikiTextConfig {
    /// Tokens that the model reads at once.
    pub seq_length: usize,
    /// Tokens between the beginnings of two windows. Of each window but the first, only the last ones so many are scored.
    pub overlapping_eval: usize,
}

/// The windows of a text.
#[derive(Debug, Clone)]
pub struct WikiText {
    tokens: Vec<u32>,
    words: u64,
    config: WikiTextConfig,
}

impl WikiText {
    /// Detokenizes and tokenizes `text`, the content of a WikiText file.
    ///
    /// # Errors
    /// Windows of no token, or further apart than they are long; a text of fewer than two tokens or words; as
    /// [`Tokenizer::encode`].
    pub fn new(text: &str, tokenizer: &Tokenizer, config: WikiTextConfig) -> Result<WikiText> {
        let WikiTextConfig { seq_length, overlapping_eval } = config;
        if overlapping_eval == 0 || overlapping_eval > seq_length {
            let message = format!(
                "{overlapping_eval} must be from 1 to the sequence length, {seq_length}: windows must not leave tokens out"
            );
            return Err(Error::config("--overlapping-eval", message));
        }
        let words = text.trim().split(' ').count() as u64;
        let tokens = tokenizer.encode(&detokenize_wikitext(text))?;
        if tokens.len() < 2 || words < 2 {
            let message = format!(
                "the text has {} tokens and {words} words: at least 2 of each are needed",
                tokens.len()
            );
            return Err(Error::value("wikitext", message));
        }
        Ok(WikiText { tokens, words, config })
    }

    /// The windows, in order. Each token but the first is scored by one of them.
    pub fn requests(&self) -> Vec<ScoreRequest> {
        let WikiTextConfig { seq_length, overlapping_eval } = self.config;
        let window = |start: usize| {
            let end = self.tokens.len().min(start + seq_length + 1);
            let first_target = if start == 0 { 1 } else { seq_length - overlapping_eval + 1 };
            let tokens = &self.tokens[start..end];
            (tokens.len() > first_target).then(|| ScoreRequest {
                tokens: tokens.to_vec(),
                first_target,
                wants_next: false,
            })
        };
        (0..self.tokens.len()).step_by(overlapping_eval).map_while(window).collect()
    }

    /// The result for the sum of the log-probabilities of all scored tokens.
    pub fn result(&self, log_likelihood: f64) -> WikiTextResult {
        let (tokens, words) = (self.tokens.len() as u64, self.words);
        let loss = -log_likelihood / (tokens - 1) as f64;
        let token_ratio = (tokens - 1) as f64 / (words - 1) as f64;
        let adjusted_ppl = (loss * token_ratio).exp();
        WikiTextResult { loss, ppl: loss.exp(), adjusted_ppl, token_ratio, tokens, words }
    }
}

/// The numbers of the task, with Megatron-LM's names.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WikiTextResult {
    /// Mean of the negative log-probabilities, in nats per token.
    pub loss: f64,
    /// e^loss.
    pub ppl: f64,
    /// The perplexity by words: exp(loss x token ratio).
    pub adjusted_ppl: f64,
    /// Scored tokens over words.
    pub token_ratio: f64,
    /// Tokens of the text.
    pub tokens: u64,
    /// Words of the file, between single spaces.
    pub words: u64,
}
