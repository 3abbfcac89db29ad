//! GPT-2's byte pair encoding (Radford et al., 2019), from the `tiktoken-rs` crate, which embeds the merge ranks:
//! nothing is downloaded.

use ferrotron_tensor::{Error, Result};
use std::ops::Range;
use tiktoken_rs::{CoreBPE, r50k_base_singleton};

use super::char_boundary;
use super::lossy::{REPLACEMENT, lossy};
use super::words::{Piece, WordCaches, WordEncoder, WordPattern, WordWriter};

/// The text of the only special token.
const END_OF_TEXT: &str = "<|endoftext|>";

/// Tokens of words; they do not affect a result.
static CACHES: WordCaches = WordCaches::new();

/// GPT-2's vocabulary, which OpenAI calls r50k_base. Built on first use.
fn bpe() -> &'static CoreBPE {
    r50k_base_singleton()
}

/// Encodes a text in which the special token has the id `end_of_text`, part by part. Words of more than `window` bytes
/// are encoded by windows.
pub(super) fn encode(
    text: &str,
    end_of_text: u32,
    window: usize,
    give: &mut dyn FnMut(&[u32]) -> Result<()>,
) -> Result<()> {
    let words = Words(bpe());
    CACHES.with(|cache| {
        let mut writer = WordWriter::new(cache, text.len() / 4, window, give);
        for (number, part) in text.split(END_OF_TEXT).enumerate() {
            if number > 0 {
                writer.token(end_of_text);
            }
            writer.words(part, WordPattern::Gpt2, &words)?;
        }
        writer.flush()
    })
}

struct Words(&'static CoreBPE);

impl WordEncoder for Words {
    fn word(&self, word: &str) -> Result<Vec<u32>> {
        Ok(self.0.encode_ordinary(word))
    }

    fn has_pieces(&self, _: &str) -> bool {
        true
    }

    fn pieces(&self, word: &str, window: Range<usize>) -> Result<Vec<Piece>> {
        // Of a word the pattern makes one word, and so it does of its windows.
        let mut end = window.start;
        let piece = |id| {
            let bytes = self.0.decode_bytes(&[id]);
            let start = end;
            end += bytes.map_err(|error| Error::value("tokenizer", error.to_string()))?.len();
            let start = char_boundary::floor(word, start);
            Ok(Piece { id, start, end: char_boundary::ceil(word, end) })
        };
        self.0.encode_ordinary(&word[window]).into_iter().map(piece).collect()
    }
}

pub(super) fn decode(tokens: &[u32]) -> String {
    lossy(tokens, |token, bytes| match bpe().decode_bytes(&[token]) {
        Ok(token) => bytes.extend(token),
        Err(_) => bytes.extend(REPLACEMENT),
    })
}
