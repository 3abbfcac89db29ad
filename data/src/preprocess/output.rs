//! The files of one key, whatever their format.

use super::config::{PreprocessConfig, SequenceLevel, TokenFormat};
use super::encode::{End, Tokens};
use super::flat_file::{self, FlatFiles, FlatState};
use crate::indexed_dataset::{BuilderState, IndexedDatasetBuilder, with_suffix};
use crate::token_type::TokenType;
use ferrotron_tensor::Result;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Writes the documents of a key.
pub struct TokenOutput {
    files: Files,
    prefix: PathBuf,
    end_of_document: Option<u32>,
    counts: OutputCounts,
}

enum Files {
    Indexed(Box<IndexedDatasetBuilder>),
    Flat(Box<FlatFiles>),
}

/// The numbers written so far, and the document at hand.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutputCounts {
    pub documents: u64,
    pub sequences: u64,
    pub tokens: u64,
    /// Tokens of the document at hand.
    in_document: u64,
    /// Whether its last sentence is over, and ends with the next token.
    is_ending: bool,
}

/// The state of an output whose files are on disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutputState {
    counts: OutputCounts,
    indexed: Option<BuilderState>,
    flat: Option<FlatState>,
}

/// The prefix of the files of a key, as Megatron-LM calls them, or of a prompt and a completion.
pub fn prefix(config: &PreprocessConfig, key: &str) -> PathBuf {
    let level = match config.sequence_level {
        SequenceLevel::Document => "_document",
        SequenceLevel::Sentence => "_sentence",
        SequenceLevel::PromptAndCompletion => "",
    };
    with_suffix(&config.output_prefix, &format!("_{key}{level}"))
}

/// The first of the files of a prefix that is there already.
pub fn existing(prefix: &Path, format: TokenFormat) -> Option<PathBuf> {
    let names = match format {
        TokenFormat::Megatron => vec![with_suffix(prefix, ".bin"), with_suffix(prefix, ".idx")],
        _ => vec![flat_file::name(prefix, format, 0), with_suffix(prefix, ".bin")],
    };
    names.into_iter().find(|name| name.exists())
}

impl TokenOutput {
    /// Begins the files of `key`, or cuts them to `state` and goes on.
    ///
    /// # Errors
    /// Files that cannot be made, or are shorter than the state says.
    pub fn open(
        config: &PreprocessConfig,
        key: &str,
        token_type: TokenType,
        end_of_document: Option<u32>,
        state: Option<&OutputState>,
    ) -> Result<TokenOutput> {
        let prefix = prefix(config, key);
        let files = match config.format {
            TokenFormat::Megatron => {
                let state = state.and_then(|state| state.indexed.as_ref());
                let mut builder = match state {
                    Some(state) => IndexedDatasetBuilder::resume(&prefix, token_type, state)?,
                    None => IndexedDatasetBuilder::new(&prefix, token_type)?,
                };
                builder.keep_parts();
                Files::Indexed(Box::new(builder))
            }
            format => {
                let state = state.and_then(|state| state.flat.as_ref());
                let shard_tokens = config.shard_tokens;
                let files = FlatFiles::open(&prefix, format, token_type, shard_tokens, state)?;
                Files::Flat(Box::new(files))
            }
        };
        let counts = state.map(|state| state.counts.clone()).unwrap_or_default();
        Ok(TokenOutput { files, prefix, end_of_document, counts })
    }

    /// Appends the tokens of a batch.
    ///
    /// # Errors
    /// A token that the files cannot hold; a document of 2^31 tokens or more; a full disk.
    pub fn write(&mut self, batch: &Tokens) -> Result<()> {
        let mut at = 0;
        for &end in &batch.ends {
            let (End::Sequence(behind) | End::Paragraph(behind) | End::Document(behind)) = end;
            self.extend(&batch.tokens[at..behind])?;
            at = behind;
            match end {
                End::Sequence(_) => self.counts.is_ending = self.counts.in_document > 0,
                End::Paragraph(_) if self.counts.in_document == 0 => {}
                End::Paragraph(_) | End::Document(_) => self.end_document()?,
            }
        }
        self.extend(&batch.tokens[at..])
    }

    fn extend(&mut self, tokens: &[u32]) -> Result<()> {
        if tokens.is_empty() {
            return Ok(());
        }
        if std::mem::take(&mut self.counts.is_ending) {
            self.end_sequence()?;
        }
        match &mut self.files {
            Files::Indexed(builder) => builder.extend_sequence(tokens)?,
            Files::Flat(files) => files.extend(tokens)?,
        }
        self.counts.in_document += tokens.len() as u64;
        self.counts.tokens += tokens.len() as u64;
        Ok(())
    }

    fn end_sequence(&mut self) -> Result<()> {
        self.counts.sequences += 1;
        match &mut self.files {
            Files::Indexed(builder) => builder.end_sequence(),
            Files::Flat(_) => Ok(()),
        }
    }

    /// An empty document has no sequence and no token at its end, as in Megatron-LM.
    fn end_document(&mut self) -> Result<()> {
        self.counts.is_ending = false;
        if self.counts.in_document > 0 {
            if let Some(token) = self.end_of_document {
                self.extend(&[token])?;
            }
            self.end_sequence()?;
        }
        self.counts.in_document = 0;
        self.counts.documents += 1;
        match &mut self.files {
            Files::Indexed(builder) => builder.end_document(),
            Files::Flat(_) => Ok(()),
        }
    }

    /// Brings the files to disk.
    ///
    /// # Errors
    /// A full disk.
    pub fn sync(&mut self) -> Result<OutputState> {
        match &mut self.files {
            Files::Indexed(builder) => builder.sync().map(drop)?,
            Files::Flat(files) => files.sync()?,
        }
        Ok(self.state())
    }

    /// The state at this point, whose bytes the next [`TokenOutput::sync`] brings to disk.
    pub fn state(&self) -> OutputState {
        let (indexed, flat) = match &self.files {
            Files::Indexed(builder) => (Some(builder.state()), None),
            Files::Flat(files) => (None, Some(files.state())),
        };
        OutputState { counts: self.counts.clone(), indexed, flat }
    }

    /// Gives the files their names, and returns them. The output can still be resumed from its last state.
    ///
    /// # Errors
    /// A full disk.
    pub fn finish(&mut self) -> Result<Vec<PathBuf>> {
        match &mut self.files {
            Files::Indexed(builder) => {
                builder.write_whole()?;
                Ok([".bin", ".idx"].map(|suffix| with_suffix(&self.prefix, suffix)).to_vec())
            }
            Files::Flat(files) => files.finish(),
        }
    }

    /// Removes what only resuming needs.
    pub fn remove_parts(self) {
        match self.files {
            Files::Indexed(builder) => builder.remove_parts(),
            Files::Flat(files) => files.remove_part(),
        }
    }

    /// The prefix of the files.
    pub fn prefix(&self) -> &Path {
        &self.prefix
    }

    /// The numbers written so far.
    pub fn counts(&self) -> &OutputCounts {
        &self.counts
    }
}
