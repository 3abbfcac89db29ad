//! Encodes texts piece by piece, and finds those that would take too much memory.

use super::config::{AREA, MAX_STRETCH, SequenceLevel};
use super::cut::{CutRule, PIECE};
use crate::documents::sentences;
use crate::tokenizer::Tokenizer;
use ferrotron_tensor::{Error, Result};

/// Bytes of a piece for tokenizers that encode it as a whole, with several hundred bytes of memory for each.
const SMALL_PIECE: usize = 16 << 10;

/// Cuts texts into pieces and encodes them.
pub struct Cutter {
    rule: CutRule,
    tokenizer: Tokenizer,
    piece: usize,
}

impl Cutter {
    /// Cuts where `rule` says, which holds for the tokenizer.
    pub fn new(rule: CutRule, tokenizer: &Tokenizer) -> Cutter {
        let piece = if tokenizer.encodes_whole() { SMALL_PIECE } else { PIECE };
        Cutter { rule, tokenizer: tokenizer.clone(), piece }
    }

    fn try_for_each(&self, mut text: &str, mut take: impl FnMut(&str) -> Result<()>) -> Result<()> {
        while let Some(cut) = self.rule.find(text, self.piece) {
            take(&text[..cut.start])?;
            text = &text[cut.end..];
        }
        take(text)
    }

    /// Calls `take` with the tokens of a text, part by part. A long text is cut into pieces.
    ///
    /// # Errors
    /// The errors of [`Tokenizer::encode`] and of `take`.
    pub fn encode(&self, text: &str, mut take: impl FnMut(&[u32]) -> Result<()>) -> Result<()> {
        self.try_for_each(text, |piece| self.tokenizer.encode_parts(piece, &mut take))
    }

    /// Whether a text has a token.
    ///
    /// # Errors
    /// The errors of [`Tokenizer::encode`] in front of the first one.
    pub fn has_token(&self, text: &str) -> Result<bool> {
        let mut has_token = false;
        // The first token ends the call, as an error does.
        let encoded = self.encode(text, |tokens| {
            has_token |= !tokens.is_empty();
            if has_token { Err(Error::io(AREA, "a token was found")) } else { Ok(()) }
        });
        if has_token { Ok(true) } else { encoded.map(|()| false) }
    }

    /// The reason for which a text, at this level, would take too much memory, if it would.
    ///
    /// # Errors
    /// The errors of [`Tokenizer::encode`].
    pub fn too_long(&self, text: &str, level: SequenceLevel) -> Result<Option<String>> {
        if text.len() <= MAX_STRETCH {
            return Ok(None);
        }
        let mut longest = 0;
        let mut look = |text: &str| {
            self.try_for_each(text, |piece| {
                longest = longest.max(self.tokenizer.longest_whole(piece)?);
                Ok(())
            })
        };
        match level {
            SequenceLevel::Sentence => text.lines().flat_map(sentences).try_for_each(look)?,
            SequenceLevel::Document | SequenceLevel::PromptAndCompletion => look(text)?,
        }
        let message = format!(
            "{longest} bytes without a place at which this tokenizer cuts, such as a space between two letters, more than \
             {MAX_STRETCH}: give them such places, or shorter documents"
        );
        Ok((longest > MAX_STRETCH).then_some(message))
    }
}
