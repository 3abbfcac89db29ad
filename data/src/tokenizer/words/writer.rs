//! Encodes words one after another, and gives their tokens part by part.

use super::long_word::{Piece, encode_by_windows};
use super::pattern::WordPattern;
use super::word_cache::WordCache;
use ferrotron_tensor::Result;
use std::ops::Range;

/// Tokens that are given at a time, about.
const PART: usize = 1 << 16;

/// The vocabulary that encodes words.
pub trait WordEncoder {
    /// The tokens of a word.
    fn word(&self, word: &str) -> Result<Vec<u32>>;

    /// Whether this word may be encoded by windows.
    fn has_pieces(&self, word: &str) -> bool;

    /// The tokens of a window of a word, with their places in the word: whole characters.
    fn pieces(&self, word: &str, window: Range<usize>) -> Result<Vec<Piece>>;
}

/// Tokens of words, and the function that gets them.
pub struct WordWriter<'a> {
    cache: &'a mut WordCache,
    tokens: Vec<u32>,
    give: &'a mut dyn FnMut(&[u32]) -> Result<()>,
    /// Bytes of the longest word that is encoded as a whole.
    window: usize,
}

impl<'a> WordWriter<'a> {
    /// Expects about so many tokens.
    pub fn new(
        cache: &'a mut WordCache,
        expected: usize,
        window: usize,
        give: &'a mut dyn FnMut(&[u32]) -> Result<()>,
    ) -> WordWriter<'a> {
        WordWriter { cache, tokens: Vec::with_capacity(expected.min(PART)), give, window }
    }

    /// Appends the tokens of a text's words.
    ///
    /// # Errors
    /// The errors of the encoder and of the function that gets the tokens.
    pub fn words(
        &mut self,
        text: &str,
        pattern: WordPattern,
        encoder: &impl WordEncoder,
    ) -> Result<()> {
        pattern.try_for_each_word(text, |word| {
            if word.len() > self.window {
                return self.uncached(word, encoder);
            }
            self.cache.append(word, &mut self.tokens, |word| encoder.word(word))?;
            self.flush_if_many()
        })
    }

    /// Appends the tokens of a word that is not looked for in the cache.
    ///
    /// # Errors
    /// Errors of [`WordWriter::words`].
    pub fn uncached(&mut self, word: &str, encoder: &impl WordEncoder) -> Result<()> {
        if word.len() > self.window && encoder.has_pieces(word) {
            self.flush()?;
            let pieces = |window| encoder.pieces(word, window);
            return encode_by_windows(word, self.window, pieces, self.give);
        }
        self.tokens.extend(encoder.word(word)?);
        self.flush_if_many()
    }

    /// Appends a token that is no word.
    pub fn token(&mut self, token: u32) {
        self.tokens.push(token);
    }

    /// Gives the tokens that are left.
    ///
    /// # Errors
    /// The errors of the function that gets them.
    pub fn flush(&mut self) -> Result<()> {
        (self.give)(&self.tokens)?;
        self.tokens.clear();
        Ok(())
    }

    #[inline]
    fn flush_if_many(&mut self) -> Result<()> {
        if self.tokens.len() < PART {
            return Ok(());
        }
        self.flush()
    }
}
