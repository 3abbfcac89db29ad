//! Fast encoding by words: a scanner cuts them, and the tokens of words come from a cache.
//!
//! The patterns by which GPT-2 and its successors cut words are regular expressions with a lookahead, on which the crates
//! spend most of their time; `pattern.rs` implements the fixed ones by hand, and cuts at spaces where a tokenizer cannot
//! join what they separate. `recognize.rs` finds the pattern of a `tokenizer.json`. Words repeat, so `word_cache.rs` keeps
//! their tokens, and the crate that owns the vocabulary encodes the others, one word at a time. `long_word.rs` encodes words
//! of any length by windows.

mod char_class;
mod long_word;
mod pattern;
mod recognize;
mod word_cache;
mod writer;

pub(super) use long_word::Piece;
pub(super) use pattern::WordPattern;
pub(super) use recognize::WordRule;
pub(super) use word_cache::WordCaches;
pub(super) use writer::{WordEncoder, WordWriter};

#[cfg(test)]
mod tests;
