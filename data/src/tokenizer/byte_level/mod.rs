//! Fast encoding with byte-level byte pairs: words are cut by a scanner, and the tokens of words come from a cache.
//!
//! The patterns by which GPT-2 and its successors cut words are regular expressions with a lookahead, on which the crates
//! spend most of their time. `words.rs` implements the fixed ones by hand. Words repeat, so `word_cache.rs` keeps their
//! tokens, and the crate that owns the vocabulary encodes the others, one word at a time.

mod char_class;
mod word_cache;
mod words;

pub(super) use word_cache::WordCaches;
pub(super) use words::WordPattern;

#[cfg(test)]
mod tests;
