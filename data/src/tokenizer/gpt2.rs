//! GPT-2's byte pair encoding (Radford et al., 2019), from the `tiktoken-rs` crate, which embeds the merge ranks:
//! nothing is downloaded.

use ferrotron_tensor::Result;
use tiktoken_rs::{CoreBPE, r50k_base_singleton};

use super::lossy::{REPLACEMENT, lossy};
use super::words::{WordCaches, WordPattern};

/// The text of the only special token.
const END_OF_TEXT: &str = "<|endoftext|>";

/// Tokens of words; they do not affect a result.
static CACHES: WordCaches = WordCaches::new();

/// GPT-2's vocabulary, which OpenAI calls r50k_base. Built on first use.
fn bpe() -> &'static CoreBPE {
    r50k_base_singleton()
}

/// Encodes a text in which the special token has the id `end_of_text`.
pub(super) fn encode(text: &str, end_of_text: u32) -> Result<Vec<u32>> {
    let bpe = bpe();
    CACHES.with(|cache| {
        let mut tokens = Vec::with_capacity(text.len() / 4);
        for (number, part) in text.split(END_OF_TEXT).enumerate() {
            if number > 0 {
                tokens.push(end_of_text);
            }
            WordPattern::Gpt2.try_for_each_word(part, |word| {
                cache.append(word, &mut tokens, |word| Ok(bpe.encode_ordinary(word)))
            })?;
        }
        Ok(tokens)
    })
}

pub(super) fn decode(tokens: &[u32]) -> String {
    lossy(tokens, |token, bytes| match bpe().decode_bytes(&[token]) {
        Ok(token) => bytes.extend(token),
        Err(_) => bytes.extend(REPLACEMENT),
    })
}
