//! Inputs and outputs of a call, and the limits of both.

use crate::token_type::TokenType;
use ferrotron_tensor::{Error, Result};
use std::path::PathBuf;
use std::time::Duration;

/// Inputs and outputs of a call, and their formats.
#[derive(Debug, Clone)]
pub struct PreprocessConfig {
    /// Files, and folders that are searched for files.
    pub inputs: Vec<PathBuf>,
    /// The files are called `PREFIX_KEY_document`, `PREFIX_KEY_sentence` or `PREFIX_KEY_KEY`, with the extensions of the
    /// format.
    pub output_prefix: PathBuf,
    /// Fields of JSON lines and columns of Parquet; each gets files of its own. Plain text is that of a single key.
    pub json_keys: Vec<String>,
    /// The layout of the files.
    pub format: TokenFormat,
    /// Ends each document that has a token with the tokenizer's end-of-text token.
    pub append_eod: bool,
    /// The texts that become sequences.
    pub sequence_level: SequenceLevel,
    /// Counts lines and rows that have no such document and goes on, in place of an error.
    pub skip_broken_lines: bool,
    /// Threads that tokenize.
    pub workers: usize,
    /// Tokens of a shard, for [`TokenFormat::LlmC`].
    pub shard_tokens: u64,
    /// Time between two entries of the journal.
    pub journal_interval: Duration,
}

impl PreprocessConfig {
    /// Documents under the key `text`, as a data set of Megatron-LM, by one worker.
    pub fn new(inputs: Vec<PathBuf>, output_prefix: PathBuf) -> PreprocessConfig {
        PreprocessConfig {
            inputs,
            output_prefix,
            json_keys: vec!["text".to_string()],
            format: TokenFormat::Megatron,
            append_eod: false,
            sequence_level: SequenceLevel::Document,
            skip_broken_lines: false,
            workers: 1,
            shard_tokens: 100_000_000,
            journal_interval: Duration::from_secs(1),
        }
    }

    /// The names of the outputs: the keys, or both in one.
    pub(super) fn outputs(&self) -> Vec<String> {
        match self.sequence_level {
            SequenceLevel::PromptAndCompletion => vec![self.json_keys.join("_")],
            SequenceLevel::Document | SequenceLevel::Sentence => self.json_keys.clone(),
        }
    }
}

/// The texts that become sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SequenceLevel {
    /// The document under each key.
    Document,
    /// Each sentence of a document.
    Sentence,
    /// The prompt and the completion of a document: the strings under two keys, neither of which is blank. They go to the
    /// same files.
    PromptAndCompletion,
}

/// The layout of the files that are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenFormat {
    /// `.bin` and `.idx` of Megatron-LM.
    Megatron,
    /// One `.bin` of 16-bit tokens, without a header.
    NanoGpt,
    /// Shards `_000000.bin` of llm.c: 16-bit tokens, or 32-bit ones for more than 65536 token ids.
    LlmC,
}

impl TokenFormat {
    /// Its name as an option's value.
    pub fn name(self) -> &'static str {
        match self {
            TokenFormat::Megatron => "megatron",
            TokenFormat::NanoGpt => "nanogpt",
            TokenFormat::LlmC => "llmc",
        }
    }

    /// The type of the tokens of a vocabulary.
    ///
    /// # Errors
    /// A vocabulary that nanoGPT's 16 bits cannot hold.
    pub fn token_type(self, vocab_size: usize) -> Result<TokenType> {
        match self {
            TokenFormat::Megatron => Ok(TokenType::for_vocab_size(vocab_size)),
            _ if vocab_size <= 1 << 16 => Ok(TokenType::U16),
            TokenFormat::LlmC => Ok(TokenType::U32),
            TokenFormat::NanoGpt => Err(Error::config(
                AREA,
                format!(
                    "--format: nanogpt has tokens of 16 bits, too few for a vocabulary of {vocab_size}: take megatron or llmc"
                ),
            )),
        }
    }
}

/// The area of this module's errors.
pub const AREA: &str = "tokenize";

/// Bytes of a batch, about.
pub const BATCH: usize = 256 << 10;

/// The largest document: a line, a row, or a text that cannot be cut.
pub const MAX_DOCUMENT: usize = 32 << 20;

/// The longest stretch of a text that a tokenizer may encode as a whole, with up to a kilobyte of memory for each of its bytes.
pub const MAX_STRETCH: usize = 128 << 10;

/// The most bytes of Parquet pages and dictionaries in memory, beside a vocabulary of so many tokens, some 500 bytes each.
pub fn max_pages(vocab_size: usize) -> usize {
    (228_usize << 20).saturating_sub(500 * vocab_size).max(64 << 20)
}
