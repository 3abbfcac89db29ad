//! GPT-2's byte pairs in a build without the feature `tokenizers`: texts are refused with its name.

use ferrotron_tensor::{Error, Result};

use super::lossy::{REPLACEMENT, lossy};

/// The error about a tokenizer that needs the feature.
pub(super) fn refuse<T>(tokenizer: &str) -> Result<T> {
    let message = format!("{tokenizer} needs the feature `tokenizers` of ferrotron in Cargo.toml");
    Err(Error::config("tokenizer", message))
}

pub(super) fn encode(
    _: &str,
    _: u32,
    _: usize,
    _: &mut dyn FnMut(&[u32]) -> Result<()>,
) -> Result<()> {
    refuse("a text in GPT-2's byte pairs")
}

pub(super) fn decode(tokens: &[u32]) -> String {
    lossy(tokens, |_, bytes| bytes.extend(REPLACEMENT))
}
