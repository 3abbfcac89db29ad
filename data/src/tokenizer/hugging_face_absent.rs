//! Hugging Face's `tokenizer.json` in a build without the feature `tokenizers`: files are refused with its name.

use ferrotron_tensor::Result;
use std::convert::Infallible;

use super::gpt2::refuse;
use super::sizes::Sizes;

/// A loaded `tokenizer.json`, which does not exist without the feature `tokenizers`.
#[derive(Clone)]
pub struct HuggingFaceTokenizer(Infallible);

impl HuggingFaceTokenizer {
    /// Loads the text of a `tokenizer.json`.
    ///
    /// # Errors
    /// Errors always, with the name of the feature.
    pub fn from_json(_: &str) -> Result<Self> {
        refuse("a tokenizer.json of Hugging Face")
    }

    /// The file's text, unchanged.
    pub fn json(&self) -> &str {
        match self.0 {}
    }

    /// The largest id plus one.
    pub fn vocab_size(&self) -> usize {
        match self.0 {}
    }

    pub(super) fn id(&self, _: &str) -> Option<u32> {
        match self.0 {}
    }

    pub(super) fn end_of_text(&self) -> Option<u32> {
        match self.0 {}
    }

    pub(super) fn encode(
        &self,
        _: &str,
        _: Sizes,
        _: &mut dyn FnMut(&[u32]) -> Result<()>,
    ) -> Result<()> {
        match self.0 {}
    }

    pub(super) fn decode(&self, _: &[u32]) -> String {
        match self.0 {}
    }
}
