//! Tokenizers, which convert text to token ids and back.
//!
//! | `--tokenizer` | vocabulary | file |
//! |---|---|---|
//! | `byte` | the 256 bytes of UTF-8 | this one |
//! | `char` | the characters of the training text, sorted by code point | `char_level.rs` |
//! | `gpt2` | GPT-2's 50257 byte pairs, embedded in the program | `gpt2.rs` |
//! | a path | a Hugging Face `tokenizer.json`, or one that Ferrotron wrote | `hugging_face.rs` |
//! | none, but `--vocab-size` | ids written as numbers, for files of tokens | `null.rs` |
//! | a path that ends in `.txt` | BERT's WordPieces, one a line | `word_piece.rs` |
//!
//! A checkpoint contains its tokenizer as `tokenizer.json` ([`Tokenizer::to_json`]). Those that are no files are a small JSON
//! object, `{"kind": "char", "chars": "..."}`. A Hugging Face file is copied verbatim, so that `transformers` can
//! read it from the checkpoint's folder.
//!
//! Files need the crate's feature `tokenizers`. Without it, `gpt2` still describes files of tokens, and a text or
//! a file that needs the feature is refused with its name.

#[cfg(feature = "tokenizers")]
mod char_boundary;
mod char_level;
#[cfg_attr(not(feature = "tokenizers"), path = "gpt2_absent.rs")]
mod gpt2;
#[cfg_attr(not(feature = "tokenizers"), path = "hugging_face_absent.rs")]
mod hugging_face;
mod lossy;
mod null;
mod sizes;
mod special_tokens;
mod word_piece;
#[cfg(feature = "tokenizers")]
mod words;

use ferrotron_tensor::{Error, Result};
use serde::{Deserialize, Serialize};
use std::{fmt, path::Path, path::PathBuf, str::FromStr};

use lossy::{REPLACEMENT, lossy};
use sizes::{SIZES, Sizes};

pub use char_level::CharTokenizer;
pub use hugging_face::HuggingFaceTokenizer;
pub use special_tokens::SpecialTokens;

/// The size of GPT-2's vocabulary: 50000 merges, 256 bytes and `<|endoftext|>`.
const GPT2_VOCAB_SIZE: usize = 50_257;
/// GPT-2's `<|endoftext|>`, which separates documents.
const GPT2_END_OF_TEXT: u32 = 50_256;

/// A tokenizer.
///
/// ```
/// use ferrotron_data::tokenizer::Tokenizer;
/// let tokenizer = Tokenizer::char("hello world")?;
/// assert_eq!(tokenizer.vocab_size(), 8); // space d e h l o r w
/// assert_eq!(tokenizer.encode("hold")?, [3, 5, 4, 1]);
/// assert_eq!(tokenizer.decode(&[3, 5, 4, 1]), "hold");
/// let same = Tokenizer::from_json(&tokenizer.to_json())?;
/// assert_eq!(same.encode("hold")?, [3, 5, 4, 1]);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Clone)]
pub enum Tokenizer {
    /// Each byte of the text's UTF-8 is a token.
    Byte,
    /// Each character is a token.
    Char(CharTokenizer),
    /// GPT-2's byte pair encoding.
    Gpt2,
    /// No tokenizer: so many token ids, written as numbers.
    Null(usize),
    /// The tokenizer described by a Hugging Face `tokenizer.json`.
    HuggingFace(HuggingFaceTokenizer),
}

impl Tokenizer {
    /// A character-level tokenizer for the characters of `text`, sorted by code point.
    ///
    /// # Errors
    /// Errors if the text is empty.
    pub fn char(text: &str) -> Result<Self> {
        CharTokenizer::from_text(text).map(Tokenizer::Char)
    }

    /// Loads a `tokenizer.json` of Hugging Face or of a Ferrotron checkpoint, or a `vocab.txt` of BERT.
    ///
    /// # Errors
    /// Errors if the file cannot be read or is neither.
    pub fn from_file(path: &Path) -> Result<Self> {
        let json = std::fs::read_to_string(path).map_err(|error| {
            Error::io("tokenizer", format!("cannot read '{}': {error}", path.display()))
        })?;
        // Some editors write a byte-order mark in front of UTF-8.
        let json = json.strip_prefix('\u{FEFF}').unwrap_or(&json);
        let parsed = match path.extension().is_some_and(|extension| extension == "txt") {
            true => word_piece::tokenizer_json(json).and_then(|json| Tokenizer::from_json(&json)),
            false => Tokenizer::from_json(json),
        };
        parsed.map_err(|error| {
            Error::io("tokenizer", format!("'{}' is no tokenizer: {error}", path.display()))
        })
    }

    /// Parses the text of a `tokenizer.json` of Hugging Face or from [`Tokenizer::to_json`].
    ///
    /// # Errors
    /// Errors if the text is not JSON, or describes no known tokenizer.
    pub fn from_json(json: &str) -> Result<Self> {
        // Hugging Face files have no top-level "kind"; it is the only required key of ours.
        match serde_json::from_str::<SavedTokenizer>(json) {
            Ok(SavedTokenizer { kind: Some(kind), chars, vocab_size }) => {
                match (kind.as_str(), chars) {
                    ("byte", _) => Ok(Tokenizer::Byte),
                    ("gpt2", _) => Ok(Tokenizer::Gpt2),
                    ("null", _) => match vocab_size {
                        Some(size @ 1..) => Ok(Tokenizer::Null(size)),
                        _ => Err(Error::io(
                            "tokenizer",
                            "kind 'null' without a positive \"vocab_size\"",
                        )),
                    },
                    ("char", Some(chars)) => CharTokenizer::new(&chars).map(Tokenizer::Char),
                    ("char", None) => Err(Error::io("tokenizer", "kind 'char' without \"chars\"")),
                    (kind, _) => Err(Error::io(
                        "tokenizer",
                        format!("unknown kind '{kind}': byte, char, gpt2 and null exist"),
                    )),
                }
            }
            Ok(_) => HuggingFaceTokenizer::from_json(json).map(Tokenizer::HuggingFace),
            Err(error) => Err(Error::io("tokenizer", format!("not a tokenizer.json: {error}"))),
        }
    }

    /// The text of this tokenizer's `tokenizer.json`, which [`Tokenizer::from_json`] restores.
    pub fn to_json(&self) -> String {
        let (kind, chars, vocab_size) = match self {
            Tokenizer::Byte => ("byte", None, None),
            Tokenizer::Gpt2 => ("gpt2", None, None),
            Tokenizer::Char(char_level) => ("char", Some(char_level.chars()), None),
            Tokenizer::Null(size) => ("null", None, Some(*size)),
            Tokenizer::HuggingFace(file) => return file.json().to_string(),
        };
        let saved = SavedTokenizer { kind: Some(kind.to_string()), chars, vocab_size };
        serde_json::to_string(&saved).expect("strings and a number are always JSON")
    }

    /// `byte`, `char`, `gpt2`, `null` or `huggingface`.
    pub fn name(&self) -> &'static str {
        match self {
            Tokenizer::Byte => "byte",
            Tokenizer::Char(_) => "char",
            Tokenizer::Gpt2 => "gpt2",
            Tokenizer::Null(_) => "null",
            Tokenizer::HuggingFace(_) => "huggingface",
        }
    }

    /// The vocabulary size: an upper bound of all ids.
    pub fn vocab_size(&self) -> usize {
        match self {
            Tokenizer::Byte => 256,
            Tokenizer::Char(char_level) => char_level.vocab_size(),
            Tokenizer::Gpt2 => GPT2_VOCAB_SIZE,
            Tokenizer::Null(size) => *size,
            Tokenizer::HuggingFace(file) => file.vocab_size(),
        }
    }

    /// The token that separates documents, if there is one: GPT-2's 50256, or the `<|endoftext|>`, `</s>` or
    /// `<|end_of_text|>` of a file.
    pub fn end_of_text(&self) -> Option<u32> {
        match self {
            Tokenizer::Byte | Tokenizer::Char(_) | Tokenizer::Null(_) => None,
            Tokenizer::Gpt2 => Some(GPT2_END_OF_TEXT),
            Tokenizer::HuggingFace(file) => file.end_of_text(),
        }
    }

    /// Encodes `text`. Special tokens spelled out in it (`<|endoftext|>`) become their id, as in Hugging Face's
    /// tokenizers; none is added at either end.
    ///
    /// # Errors
    /// Errors, with the position, if a character is not in the vocabulary of a char tokenizer; for GPT-2, without the
    /// feature `tokenizers`.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let mut tokens = Vec::new();
        self.encode_parts(text, |part| {
            tokens.extend_from_slice(part);
            Ok(())
        })?;
        Ok(tokens)
    }

    /// Encodes `text` as [`Tokenizer::encode`] does: `give` gets the tokens, part by part, so that those of a long text
    /// need not be in memory.
    ///
    /// # Errors
    /// Errors of [`Tokenizer::encode`]; the first error of `give`.
    ///
    /// ```
    /// use ferrotron_data::tokenizer::Tokenizer;
    /// let (text, mut count) = ("word ".repeat(100_000), 0);
    /// Tokenizer::Byte.encode_parts(&text, |tokens| {
    ///     count += tokens.len();
    ///     Ok(())
    /// })?;
    /// assert_eq!(count, 500_000);
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn encode_parts(
        &self,
        text: &str,
        mut give: impl FnMut(&[u32]) -> Result<()>,
    ) -> Result<()> {
        self.encode_in(text, SIZES, &mut give)
    }

    fn encode_in(
        &self,
        text: &str,
        sizes: Sizes,
        give: &mut dyn FnMut(&[u32]) -> Result<()>,
    ) -> Result<()> {
        match self {
            Tokenizer::Byte => text.as_bytes().chunks(sizes.chunk).try_for_each(|bytes| {
                give(&bytes.iter().map(|&byte| u32::from(byte)).collect::<Vec<_>>())
            }),
            Tokenizer::Char(char_level) => give(&char_level.encode(text)?),
            Tokenizer::Gpt2 => gpt2::encode(text, GPT2_END_OF_TEXT, sizes.window, give),
            Tokenizer::Null(size) => give(&null::encode(text, *size)?),
            Tokenizer::HuggingFace(file) => file.encode(text, sizes, give),
        }
    }

    /// Whether texts are encoded as a whole, with several hundred bytes of memory for each of their bytes.
    #[cfg(feature = "preprocess")]
    pub(crate) fn encodes_whole(&self) -> bool {
        matches!(self, Tokenizer::HuggingFace(file) if file.encodes_whole())
    }

    /// Bytes of the longest part of a text that is encoded as a whole, as [`Tokenizer::encodes_whole`] says: 0 if it is known
    /// to be short.
    ///
    /// # Errors
    /// Errors of [`Tokenizer::encode`].
    #[cfg(feature = "preprocess")]
    pub(crate) fn longest_whole(&self, text: &str) -> Result<usize> {
        match self {
            Tokenizer::HuggingFace(file) => file.longest_whole(text, SIZES),
            _ => Ok(0),
        }
    }

    /// Decodes `tokens`. It never fails: bytes that are not UTF-8 (a split character) and ids beyond the vocabulary
    /// become U+FFFD, the replacement character; without the feature `tokenizers`, so do all ids of GPT-2.
    pub fn decode(&self, tokens: &[u32]) -> String {
        match self {
            Tokenizer::Byte => lossy(tokens, |token, bytes| match u8::try_from(token) {
                Ok(byte) => bytes.push(byte),
                Err(_) => bytes.extend(REPLACEMENT),
            }),
            Tokenizer::Char(char_level) => char_level.decode(tokens),
            Tokenizer::Gpt2 => gpt2::decode(tokens),
            Tokenizer::Null(_) => null::decode(tokens),
            Tokenizer::HuggingFace(file) => file.decode(tokens),
        }
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tokenizer({}, {} tokens)", self.name(), self.vocab_size())
    }
}

/// The JSON object of [`Tokenizer::to_json`].
#[derive(Serialize, Deserialize)]
struct SavedTokenizer {
    kind: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    chars: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    vocab_size: Option<usize>,
}

/// The value of `--tokenizer`.
///
/// ```
/// use ferrotron_data::tokenizer::TokenizerChoice;
/// let choice: TokenizerChoice = "char".parse()?;
/// let tokenizer = choice.build(|| Ok("the training text".to_string()))?;
/// assert_eq!(tokenizer.name(), "char");
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TokenizerChoice {
    /// `byte`
    Byte,
    /// `char`
    Char,
    /// `gpt2`
    Gpt2,
    /// A path: any other value.
    File(PathBuf),
}

impl TokenizerChoice {
    /// Builds the tokenizer. `training_text` is called only if the vocabulary depends on it.
    ///
    /// # Errors
    /// Errors as `training_text`, [`Tokenizer::char`] and [`Tokenizer::from_file`] do.
    pub fn build(&self, training_text: impl FnOnce() -> Result<String>) -> Result<Tokenizer> {
        match self {
            TokenizerChoice::Byte => Ok(Tokenizer::Byte),
            TokenizerChoice::Char => Tokenizer::char(&training_text()?),
            TokenizerChoice::Gpt2 => Ok(Tokenizer::Gpt2),
            TokenizerChoice::File(path) if !path.exists() => Err(Error::config(
                "tokenizer",
                format!(
                    "'{}' is neither byte, char or gpt2 nor an existing tokenizer.json",
                    path.display()
                ),
            )),
            TokenizerChoice::File(path) => Tokenizer::from_file(path),
        }
    }
}

impl FromStr for TokenizerChoice {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Ok(match name {
            "" => {
                return Err(Error::config(
                    "tokenizer",
                    "empty name: use byte, char, gpt2 or a file",
                ));
            }
            "byte" => TokenizerChoice::Byte,
            "char" => TokenizerChoice::Char,
            "gpt2" => TokenizerChoice::Gpt2,
            path => TokenizerChoice::File(PathBuf::from(path)),
        })
    }
}

impl fmt::Display for TokenizerChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TokenizerChoice::Byte => f.pad("byte"),
            TokenizerChoice::Char => f.pad("char"),
            TokenizerChoice::Gpt2 => f.pad("gpt2"),
            TokenizerChoice::File(path) => path.display().fmt(f),
        }
    }
}

#[cfg(all(test, feature = "tokenizers"))]
mod tests;
