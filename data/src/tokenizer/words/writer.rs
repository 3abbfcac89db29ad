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

    /// The part of a word that has its tokens.
    fn whole<'a>(&self, word: &'a str) -> &'a str {
        word
    }

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
    /// Bytes of the longest word, if words are measured and not encoded.
    longest: Option<usize>,
}

impl<'a> WordWriter<'a> {
    /// Expects about so many tokens.
    pub fn new(
        cache: &'a mut WordCache,
        expected: usize,
        window: usize,
        give: &'a mut dyn FnMut(&[u32]) -> Result<()>,
    ) -> WordWriter<'a> {
        let tokens = Vec::with_capacity(expected.min(PART));
        WordWriter { cache, tokens, give, window, longest: None }
    }

    /// Measures words in place of encoding them. Nothing gets their tokens.
    #[cfg(feature = "preprocess")]
    pub fn measuring(
        cache: &'a mut WordCache,
        window: usize,
        give: &'a mut dyn FnMut(&[u32]) -> Result<()>,
    ) -> WordWriter<'a> {
        WordWriter { longest: Some(0), ..WordWriter::new(cache, 0, window, give) }
    }

    /// Bytes of the longest word that was measured and is encoded as a whole, if it is longer than a window.
    pub fn longest(&self) -> usize {
        self.longest.unwrap_or(0)
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
            if self.longest.is_some() {
                return Ok(());
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
        let has_pieces = word.len() > self.window && encoder.has_pieces(word);
        if let Some(longest) = &mut self.longest {
            if !has_pieces {
                *longest = encoder.whole(word).len().max(*longest);
            }
            return Ok(());
        }
        if has_pieces {
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
