//! Character-level tokenizer: the vocabulary is the set of characters of the training text, sorted by code point, as
//! in nanoGPT's Shakespeare example.

use ferrotron_tensor::{Error, Result};
use std::collections::{BTreeSet, HashMap};

/// A vocabulary of characters; a character's id is its index.
#[derive(Debug, Clone)]
pub struct CharTokenizer {
    chars: Vec<char>,
    ids: HashMap<char, u32>,
}

impl CharTokenizer {
    /// The characters of `text`, sorted by code point.
    ///
    /// # Errors
    /// Errors if the text is empty.
    pub fn from_text(text: &str) -> Result<Self> {
        let chars: BTreeSet<char> = text.chars().collect();
        CharTokenizer::new(&chars.into_iter().collect::<String>())
    }

    /// The vocabulary `chars`, with ids in this order.
    ///
    /// # Errors
    /// Errors if `chars` is empty or contains a character twice.
    pub fn new(chars: &str) -> Result<Self> {
        let chars: Vec<char> = chars.chars().collect();
        if chars.is_empty() {
            return Err(Error::value(
                "tokenizer",
                "a char vocabulary needs a text that is not empty",
            ));
        }
        let mut ids = HashMap::with_capacity(chars.len());
        for (id, &c) in chars.iter().enumerate() {
            if let Some(first) = ids.insert(c, id as u32) {
                return Err(Error::value(
                    "tokenizer",
                    format!("char vocabulary has {c:?} twice, as {first} and {id}"),
                ));
            }
        }
        Ok(CharTokenizer { chars, ids })
    }

    /// The vocabulary in the order of its ids.
    pub fn chars(&self) -> String {
        self.chars.iter().collect()
    }

    /// Number of characters.
    pub fn vocab_size(&self) -> usize {
        self.chars.len()
    }

    pub(super) fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let id = |(position, c): (usize, char)| {
            self.ids.get(&c).copied().ok_or_else(|| {
                Error::value(
                    "tokenizer",
                    format!(
                        "character {c:?} (U+{:04X}) at position {position} is not in the char vocabulary of {}: \
                         train on text that has it, or use --tokenizer byte",
                        c as u32,
                        self.chars.len()
                    ),
                )
            })
        };
        text.chars().enumerate().map(id).collect()
    }

    pub(super) fn decode(&self, tokens: &[u32]) -> String {
        let char_of = |&token: &u32| self.chars.get(token as usize).copied();
        tokens.iter().map(|token| char_of(token).unwrap_or(char::REPLACEMENT_CHARACTER)).collect()
    }
}
