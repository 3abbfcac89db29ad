//! The fingerprint beside token files: what they were made of, and their hashes.

use super::config::{AREA, PreprocessConfig, SequenceLevel, TokenFormat};
use super::hexadecimal::hexadecimal;
use super::input::{self, Source};
use super::journal::Journal;
use super::output::OutputCounts;
use crate::indexed_dataset::with_suffix;
use crate::token_type::TokenType;
use crate::tokenizer::Tokenizer;
use ferrotron_tensor::{Error, Result};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// The contents of `PREFIX.fingerprint.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PreprocessFingerprint {
    /// The tokenizer's name, number of token ids, and the SHA-256 of its JSON.
    pub tokenizer: Value,
    /// The files that were read, with their sizes.
    #[serde(serialize_with = "write_sources", deserialize_with = "read_sources")]
    pub sources: Arc<[Source]>,
    /// The options that decide the bytes.
    pub options: Value,
    /// The key whose texts these are.
    pub key: String,
    /// Number of documents, the empty ones included.
    pub documents: u64,
    /// Number of sequences: documents or sentences that have a token.
    pub sequences: u64,
    /// Number of tokens.
    pub tokens: u64,
    /// Number of lines and rows that were skipped.
    pub skipped: u64,
    /// The type of the tokens in the files.
    pub token_type: String,
    /// The files.
    pub files: Vec<HashedFile>,
}

fn write_sources<S: Serializer>(
    sources: &Arc<[Source]>,
    serializer: S,
) -> std::result::Result<S::Ok, S::Error> {
    serializer.collect_seq(sources.iter())
}

fn read_sources<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> std::result::Result<Arc<[Source]>, D::Error> {
    Vec::deserialize(deserializer).map(Arc::from)
}

/// A file with its size and hash.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HashedFile {
    /// The name, without a folder.
    pub name: String,
    /// The size.
    pub bytes: u64,
    /// SHA-256 in hexadecimal.
    pub sha256: String,
}

/// The fingerprint of the files of a prefix.
pub fn path(prefix: &Path) -> PathBuf {
    with_suffix(prefix, ".fingerprint.json")
}

/// The settings that decide the bytes of the files, as the journal compares them.
pub fn settings(config: &PreprocessConfig, tokenizer: &Tokenizer, sources: &[Source]) -> Value {
    let mut options = json!({
        "json_keys": config.json_keys,
        "format": config.format.name(),
        "append_eod": config.append_eod,
        "split_sentences": config.sequence_level == SequenceLevel::Sentence,
    });
    if config.sequence_level == SequenceLevel::PromptAndCompletion {
        options["prompt_completion"] = true.into();
    }
    if config.format == TokenFormat::LlmC {
        options["shard_tokens"] = config.shard_tokens.into();
    }
    let json = tokenizer.to_json();
    json!({
        "tokenizer": {
            "name": tokenizer.name(),
            "vocab_size": tokenizer.vocab_size(),
            "sha256": hexadecimal(&Sha256::digest(json.as_bytes())),
        },
        "options": options,
        "sources": input::summary(sources),
    })
}

impl PreprocessFingerprint {
    /// Hashes the files of a key; none if `stop` is set.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub(super) fn new(
        (journal, sources): (&Journal, &Arc<[Source]>),
        key: &str,
        counts: &OutputCounts,
        token_type: TokenType,
        files: &[PathBuf],
        stop: &AtomicBool,
    ) -> Result<Option<PreprocessFingerprint>> {
        let mut hashed = Vec::new();
        for file in files {
            let Some(file) = HashedFile::new(file, stop)? else { return Ok(None) };
            hashed.push(file);
        }
        let Journal { settings, skipped, .. } = journal;
        Ok(Some(PreprocessFingerprint {
            tokenizer: settings["tokenizer"].clone(),
            sources: sources.clone(),
            options: settings["options"].clone(),
            key: key.to_string(),
            documents: counts.documents,
            sequences: counts.sequences,
            tokens: counts.tokens,
            skipped: *skipped,
            token_type: format!("{token_type:?}").to_lowercase(),
            files: hashed,
        }))
    }
}

impl HashedFile {
    /// Reads a file once; none if `stop` is set.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub(super) fn new(path: &Path, stop: &AtomicBool) -> Result<Option<HashedFile>> {
        let failed = |error: std::io::Error| {
            Error::io(AREA, format!("cannot read '{}': {error}", path.display()))
        };
        let mut file = File::open(path).map_err(failed)?;
        let (mut hash, mut bytes, mut buffer) = (Sha256::new(), 0, vec![0; 1 << 18]);
        loop {
            if stop.load(Relaxed) {
                return Ok(None);
            }
            let read = file.read(&mut buffer).map_err(failed)?;
            if read == 0 {
                break;
            }
            hash.update(&buffer[..read]);
            bytes += read as u64;
        }
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok(Some(HashedFile { name, bytes, sha256: hexadecimal(&hash.finalize()) }))
    }
}
