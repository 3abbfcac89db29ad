//! The tokens that BERT adds to a text: `[PAD]`, `[CLS]`, `[SEP]` and `[MASK]`.

use super::Tokenizer;
use ferrotron_tensor::{Error, Result};

/// The ids of BERT's tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpecialTokens {
    /// Fills a sample up.
    pub pad: u32,
    /// Begins a sample.
    pub cls: u32,
    /// Ends a segment.
    pub sep: u32,
    /// Stands for a token that is to be predicted.
    pub mask: u32,
    /// Number of ids, with these.
    pub vocab_size: usize,
}

impl Tokenizer {
    /// BERT's tokens: those of a file's vocabulary or, behind a built-in one, four more.
    ///
    /// # Errors
    /// A file without one of them.
    ///
    /// ```
    /// use ferrotron_data::tokenizer::Tokenizer;
    /// let special = Tokenizer::Byte.special_tokens()?;
    /// assert_eq!((special.pad, special.mask, special.vocab_size), (256, 259, 260));
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn special_tokens(&self) -> Result<SpecialTokens> {
        const NAMES: [&str; 4] = ["[PAD]", "[CLS]", "[SEP]", "[MASK]"];
        let size = self.vocab_size();
        let Tokenizer::HuggingFace(file) = self else {
            let [pad, cls, sep, mask] = [0, 1, 2, 3].map(|i| size as u32 + i);
            return Ok(SpecialTokens { pad, cls, sep, mask, vocab_size: size + NAMES.len() });
        };
        let ids = NAMES.map(|name| file.id(name));
        let [Some(pad), Some(cls), Some(sep), Some(mask)] = ids else {
            let missing = NAMES.iter().zip(ids).filter(|(_, id)| id.is_none());
            let missing: Vec<&str> = missing.map(|(name, _)| *name).collect();
            let message = format!(
                "the tokenizer.json has no {}, which bert needs: take a WordPiece vocabulary, or char or byte",
                missing.join(", ")
            );
            return Err(Error::config("--tokenizer", message));
        };
        Ok(SpecialTokens { pad, cls, sep, mask, vocab_size: size })
    }
}
