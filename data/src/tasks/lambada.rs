//! LAMBADA: the last word of a passage, given the rest.
//!
//! An example counts as right if each token of the word is the likeliest, given the true tokens before it. The perplexity
//! is exp of minus the mean log-probability of a word.

use super::request::{ScoreRequest, TokenScore};
use crate::tokenizer::Tokenizer;
use ferrotron_tensor::{Error, Result};

/// The rule by which a passage becomes a context and a word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LambadaForm {
    /// Megatron-LM's `--strict-lambada`: the context without white space at its end, and a space with the last word, are
    /// tokenized each by itself.
    Strict,
    /// `lambada_openai` of lm-evaluation-harness: the passage is cut at its last space; the word's tokens are those of the
    /// passage behind as many as the context has.
    OpenAi,
}

/// The examples of a file.
#[derive(Debug, Clone)]
pub struct Lambada {
    requests: Vec<ScoreRequest>,
}

impl Lambada {
    /// Tokenizes `passages` for a model that reads `longest` tokens; of longer contexts the end is kept.
    ///
    /// # Errors
    /// No passage; a passage of fewer than two words, by its number; as [`Tokenizer::encode`].
    pub fn new(
        passages: &[String],
        tokenizer: &Tokenizer,
        form: LambadaForm,
        longest: usize,
    ) -> Result<Lambada> {
        let request = |(index, passage): (usize, &String)| {
            let refuse = |why: &str| {
                let start: String = passage.chars().take(40).collect();
                let message = format!("passage {} {why}: '{start}'", index + 1);
                Error::value("lambada", message)
            };
            let (context, word) = match form {
                LambadaForm::Strict => strict(passage, tokenizer)?,
                LambadaForm::OpenAi => open_ai(passage, tokenizer)?,
            }
            .ok_or_else(|| refuse("has no word behind another"))?;
            ScoreRequest::continuation(&context, &word, longest).ok_or_else(|| {
                refuse(&format!(
                    "has a last word of more than {longest} tokens, or no token before it"
                ))
            })
        };
        let requests = passages.iter().enumerate().map(request).collect::<Result<Vec<_>>>()?;
        if requests.is_empty() {
            return Err(Error::value("lambada", "there is no passage"));
        }
        Ok(Lambada { requests })
    }

    /// A request for each passage.
    pub fn requests(&self) -> &[ScoreRequest] {
        &self.requests
    }

    /// The result for the scores of the passages.
    pub fn result(scores: &[Vec<TokenScore>]) -> LambadaResult {
        let log_prob =
            |word: &Vec<TokenScore>| word.iter().map(|token| token.log_prob).sum::<f64>();
        let right = scores.iter().filter(|word| word.iter().all(TokenScore::is_greedy)).count();
        let count = scores.len() as f64;
        LambadaResult {
            accuracy: right as f64 / count,
            perplexity: (-scores.iter().map(log_prob).sum::<f64>() / count).exp(),
            examples: scores.len() as u64,
        }
    }
}

/// The numbers of the task.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LambadaResult {
    /// The share of passages whose word is right.
    pub accuracy: f64,
    /// The perplexity of a word.
    pub perplexity: f64,
    /// Passages.
    pub examples: u64,
}

type Parts = Option<(Vec<u32>, Vec<u32>)>;

fn strict(passage: &str, tokenizer: &Tokenizer) -> Result<Parts> {
    let Some(word) = passage.split_whitespace().last() else { return Ok(None) };
    let Some(start) = passage.rfind(word) else { return Ok(None) };
    let context = passage[..start].trim();
    if context.is_empty() {
        return Ok(None);
    }
    Ok(Some((tokenizer.encode(context)?, tokenizer.encode(&format!(" {word}"))?)))
}

fn open_ai(passage: &str, tokenizer: &Tokenizer) -> Result<Parts> {
    let Some((context, _)) = passage.rsplit_once(' ') else { return Ok(None) };
    // Spaces at the end of the context belong to the word.
    let context = tokenizer.encode(context.trim_end())?;
    let mut whole = tokenizer.encode(passage)?;
    if context.is_empty() || whole.len() <= context.len() {
        return Ok(None);
    }
    let word = whole.split_off(context.len());
    Ok(Some((whole, word)))
}
