//! GPT-2's byte pair encoding (Radford et al., 2019), from the `tiktoken-rs` crate, which embeds the merge ranks:
//! nothing is downloaded.

use ferrotron_tensor::{Error, Result};
use std::collections::HashSet;
use tiktoken_rs::{CoreBPE, r50k_base_singleton};

use super::lossy::{REPLACEMENT, lossy};

/// GPT-2's vocabulary, which OpenAI calls r50k_base. Built on first use.
fn bpe() -> &'static CoreBPE {
    r50k_base_singleton()
}

pub(super) fn encode(text: &str) -> Result<Vec<u32>> {
    let special = HashSet::from(["<|endoftext|>"]);
    match bpe().encode(text, &special) {
        Ok((tokens, _)) => Ok(tokens),
        Err(error) => {
            Err(Error::value("tokenizer", format!("gpt2 cannot encode the text: {error}")))
        }
    }
}

pub(super) fn decode(tokens: &[u32]) -> String {
    lossy(tokens, |token, bytes| match bpe().decode_bytes(&[token]) {
        Ok(token) => bytes.extend(token),
        Err(_) => bytes.extend(REPLACEMENT),
    })
}
