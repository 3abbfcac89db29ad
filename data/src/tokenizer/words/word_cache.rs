//! Keeps the tokens of words.

use ferrotron_tensor::Result;
use rustc_hash::FxHashMap;
use std::sync::Mutex;

/// Words of one generation: with two, and tables that are half full, some 4 MB for each thread that encodes.
const GENERATION: usize = 1 << 15;
/// Longer words are rarely repeated.
const LONGEST: usize = 48;

/// A cache for each thread that encodes at the same time, lent for a text.
#[derive(Default)]
pub struct WordCaches(Mutex<Vec<WordCache>>);

impl WordCaches {
    pub const fn new() -> WordCaches {
        WordCaches(Mutex::new(Vec::new()))
    }

    /// Runs `encode` with a cache that no other thread has.
    pub fn with<R>(&self, encode: impl FnOnce(&mut WordCache) -> R) -> R {
        let lent = self.0.lock().expect("no holder panics").pop();
        let mut cache = lent.unwrap_or_default();
        let result = encode(&mut cache);
        self.0.lock().expect("no holder panics").push(cache);
        result
    }
}

/// The tokens of the words that were used last. When the young generation is full, it becomes the old one, whose words
/// are forgotten unless they were used since.
#[derive(Default)]
pub struct WordCache {
    young: Generation,
    old: Generation,
}

#[derive(Default)]
struct Generation {
    /// The only token, or the place of several among `tokens`, and their number.
    words: FxHashMap<Box<str>, (u32, u32)>,
    tokens: Vec<u32>,
}

impl WordCache {
    /// Appends the tokens of a word. `encode` is asked for those of a word that is not in the cache.
    ///
    /// # Errors
    /// The errors of `encode`.
    #[inline]
    pub fn append(
        &mut self,
        word: &str,
        out: &mut Vec<u32>,
        encode: impl FnOnce(&str) -> Result<Vec<u32>>,
    ) -> Result<()> {
        if self.young.append(word, out) {
            return Ok(());
        }
        let start = out.len();
        if !self.old.append(word, out) {
            out.extend(encode(word)?);
        }
        if word.len() <= LONGEST {
            if self.young.words.len() == GENERATION {
                std::mem::swap(&mut self.young, &mut self.old);
                self.young.words.clear();
                self.young.tokens.clear();
            }
            self.young.insert(word, &out[start..]);
        }
        Ok(())
    }
}

impl Generation {
    /// Appends the tokens of a word, if it is known.
    #[inline]
    fn append(&self, word: &str, out: &mut Vec<u32>) -> bool {
        match self.words.get(word) {
            Some(&(token, 1)) => out.push(token),
            Some(&(start, len)) => {
                out.extend_from_slice(&self.tokens[start as usize..(start + len) as usize])
            }
            None => return false,
        }
        true
    }

    fn insert(&mut self, word: &str, tokens: &[u32]) {
        let value = match tokens {
            [token] => (*token, 1),
            tokens => {
                let start = self.tokens.len() as u32;
                self.tokens.extend_from_slice(tokens);
                (start, tokens.len() as u32)
            }
        };
        self.words.insert(word.into(), value);
    }
}
