//! Cuts long texts where neither a normalizer nor an added token reaches over the cut.
//!
//! The crate keeps 16 bytes and more for each byte of a text that it normalizes, so long ones are normalized in chunks. A
//! place is a cut if the text around it has no added token, and is normalized as its two sides are by themselves.

use super::super::char_boundary;
use tokenizers::{OffsetReferential, OffsetType, Tokenizer};

/// Places that are tried behind the wanted one, before those a chunk further on.
const TRIES: usize = 64;

/// The rules of cuts of a tokenizer.
pub struct Chunks {
    /// The text that the normalizer puts in front of each text.
    prefix: String,
    /// Bytes on each side of a cut that are looked at.
    margin: usize,
    /// Whether added tokens take the white space beside them, which may be long.
    strips: bool,
}

impl Chunks {
    /// None if it is not known what the normalizer puts in front of texts.
    pub fn new(tokenizer: &Tokenizer) -> Option<Chunks> {
        let tokens = || tokenizer.get_added_vocabulary().get_added_tokens_decoder().values();
        let longest = tokens().map(|token| token.content.len()).max().unwrap_or(0);
        let prefix = normalized(tokenizer, "a")?.strip_suffix('a')?.to_string();
        let strips = tokens().any(|token| token.lstrip || token.rstrip);
        // What an added token is normalized to may be longer than the token.
        Some(Chunks { prefix, margin: 4 * longest + 32, strips })
    }

    /// Whether added tokens take the white space beside them, however long it is, which then is no place to cut.
    #[cfg(feature = "preprocess")]
    pub fn strips(&self) -> bool {
        self.strips
    }

    /// The end of a chunk of `chunk` bytes of the text or, where it finds no cut, of more.
    pub fn end(&self, tokenizer: &Tokenizer, text: &str, chunk: usize) -> usize {
        let mut from = chunk;
        while from + self.margin < text.len() {
            let start = char_boundary::floor(text, from);
            let places = text[start..].char_indices().map(|(at, _)| start + at);
            if let Some(cut) = places.take(TRIES).find(|&at| self.is_cut(tokenizer, text, at)) {
                return cut;
            }
            from += chunk;
        }
        text.len()
    }

    /// The normalized text of a chunk behind a cut, without what is put in front of texts alone.
    pub fn behind_cut<'a>(&self, normalized: &'a str) -> &'a str {
        normalized.strip_prefix(&self.prefix).unwrap_or(normalized)
    }

    fn is_cut(&self, tokenizer: &Tokenizer, text: &str, at: usize) -> bool {
        let (before, behind) = (text[..at].chars().next_back(), text[at..].chars().next());
        let (Some(before), Some(behind)) = (before, behind) else { return false };
        if self.strips && (before.is_whitespace() || behind.is_whitespace()) {
            return false;
        }
        // No mark, which belongs to the character in front of it.
        if !(behind.is_ascii() || behind.is_alphanumeric() || behind.is_whitespace()) {
            return false;
        }
        let start = char_boundary::floor(text, at.saturating_sub(self.margin));
        let end = char_boundary::ceil(text, (at + self.margin).min(text.len()));
        let parts = [start..end, start..at, at..end].map(|part| normalized(tokenizer, &text[part]));
        let [Some(whole), Some(left), Some(right)] = parts else { return false };
        right.strip_prefix(&self.prefix).is_some_and(|right| whole == left + right)
    }
}

/// A text as the normalizer makes it; none if an added token is in it.
fn normalized(tokenizer: &Tokenizer, text: &str) -> Option<String> {
    let added = tokenizer.get_added_vocabulary();
    let parts = added.extract_and_normalize(tokenizer.get_normalizer(), text);
    match &parts.get_splits(OffsetReferential::Normalized, OffsetType::Byte)[..] {
        [(part, _, None)] => Some(part.to_string()),
        _ => None,
    }
}
