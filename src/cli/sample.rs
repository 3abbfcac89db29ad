//! The sample of text that a run prints at its end.

use ferrotron::Result;
use ferrotron::models::generate::{Sampling, generate as continue_tokens};
use ferrotron::models::gpt::Gpt;
use ferrotron::models::stop::StopFlag;
use ferrotron::models::tokenizer::Tokenizer;
use std::ops::ControlFlow;

/// A short sample; `None` if the program is asked to stop.
pub fn sample(
    gpt: &Gpt,
    tokenizer: &Tokenizer,
    length: usize,
    stop: &StopFlag,
) -> Result<Option<String>> {
    let end_of_text = tokenizer.end_of_text();
    let sampling = Sampling { temperature: 0.8, top_k: None, top_p: None, seed: 1234, end_of_text };
    let until_stopped = |_| match stop.is_set() {
        true => ControlFlow::Break(()),
        false => ControlFlow::Continue(()),
    };
    let tokens = continue_tokens(gpt, &line_break(tokenizer), length, &sampling, until_stopped)?;
    Ok((!stop.is_set()).then(|| tokenizer.decode(&tokens)))
}

/// The tokens of a line break, or the first of a vocabulary that has none.
pub fn line_break(tokenizer: &Tokenizer) -> Vec<u32> {
    let found = tokenizer.encode("\n").ok().filter(|tokens| !tokens.is_empty());
    found.unwrap_or_else(|| vec![0])
}
