//! Writes files of tokens alone: one of nanoGPT, or shards of llm.c.

use super::config::{AREA, TokenFormat};
use crate::indexed_dataset::with_suffix;
use crate::token_type::TokenType;
use ferrotron_tensor::{Error, Result};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// Bytes of the header of llm.c.
const HEADER: usize = 1024;

/// Writes the tokens of all documents one after another.
pub struct FlatFiles {
    prefix: PathBuf,
    format: TokenFormat,
    token_type: TokenType,
    /// Tokens of a shard.
    shard_tokens: u64,
    file: BufWriter<File>,
    state: FlatState,
    buffer: Vec<u8>,
}

/// The progress of the files.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlatState {
    /// The shard at hand, and its tokens.
    shard: u64,
    tokens: u64,
}

impl FlatFiles {
    /// Begins the first file, or cuts the files to `state` and goes on.
    ///
    /// # Errors
    /// Files that cannot be made, or are shorter than the state says.
    pub fn open(
        prefix: &Path,
        format: TokenFormat,
        token_type: TokenType,
        shard_tokens: u64,
        state: Option<&FlatState>,
    ) -> Result<FlatFiles> {
        let shard_tokens = if format == TokenFormat::LlmC { shard_tokens } else { u64::MAX };
        let is_new = state.is_none();
        let state = state.cloned().unwrap_or_default();
        let open = || -> io::Result<File> {
            let part = part(prefix);
            let whole = name(prefix, format, state.shard);
            if !is_new && whole.exists() {
                // It was given its name since, and the part is of a later one.
                std::fs::rename(&whole, &part)?;
            }
            for later in state.shard + 1.. {
                if is_new || std::fs::remove_file(name(prefix, format, later)).is_err() {
                    break;
                }
            }
            let mut options = File::options();
            let mut file =
                options.read(true).write(true).create(is_new).truncate(is_new).open(part)?;
            let length = header(format).len() as u64 + state.tokens * token_type.bytes() as u64;
            if is_new {
                file.write_all(&header(format))?;
            } else if file.metadata()?.len() < length {
                return Err(io::Error::other(format!(
                    "it has less than the {length} bytes of before"
                )));
            }
            file.set_len(length)?;
            file.seek(SeekFrom::End(0))?;
            Ok(file)
        };
        let file = open().map_err(|error| failed(prefix, &error))?;
        let file = BufWriter::with_capacity(1 << 18, file);
        let (prefix, buffer) = (prefix.to_path_buf(), Vec::new());
        Ok(FlatFiles { prefix, format, token_type, shard_tokens, file, state, buffer })
    }

    /// Appends tokens, to as many shards as it takes.
    ///
    /// # Errors
    /// A full disk.
    pub fn extend(&mut self, mut tokens: &[u32]) -> Result<()> {
        while !tokens.is_empty() {
            if self.state.tokens == self.shard_tokens {
                self.next_shard().map_err(|error| failed(&self.prefix, &error))?;
            }
            let count = (self.shard_tokens - self.state.tokens).min(tokens.len() as u64) as usize;
            self.buffer.clear();
            self.token_type.encode(&tokens[..count], &mut self.buffer);
            self.file.write_all(&self.buffer).map_err(|error| failed(&self.prefix, &error))?;
            self.state.tokens += count as u64;
            tokens = &tokens[count..];
        }
        Ok(())
    }

    /// Brings the files to disk.
    ///
    /// # Errors
    /// A full disk.
    pub fn sync(&mut self) -> Result<()> {
        let synced = self.file.flush().and_then(|()| self.file.get_ref().sync_data());
        synced.map_err(|error| failed(&self.prefix, &error))
    }

    /// The progress so far.
    pub fn state(&self) -> FlatState {
        self.state.clone()
    }

    /// Gives the last file its name, and returns all of them.
    ///
    /// # Errors
    /// A full disk.
    pub fn finish(&mut self) -> Result<Vec<PathBuf>> {
        self.end_shard().map_err(|error| failed(&self.prefix, &error))?;
        Ok((0..=self.state.shard).map(|shard| name(&self.prefix, self.format, shard)).collect())
    }

    /// Removes a file that has no name yet.
    pub fn remove_part(self) {
        let _ = std::fs::remove_file(part(&self.prefix));
    }

    fn next_shard(&mut self) -> io::Result<()> {
        self.end_shard()?;
        let mut file = File::create(part(&self.prefix))?;
        file.write_all(&header(self.format))?;
        self.file = BufWriter::with_capacity(1 << 18, file);
        self.state = FlatState { shard: self.state.shard + 1, tokens: 0 };
        Ok(())
    }

    fn end_shard(&mut self) -> io::Result<()> {
        self.file.flush()?;
        if self.format == TokenFormat::LlmC {
            let (magic, version) = match self.token_type {
                TokenType::U32 => (20_240_801_i32, 7_i32),
                _ => (20_240_520, 1),
            };
            self.file.seek(SeekFrom::Start(0))?;
            for word in [magic, version, self.state.tokens as i32] {
                self.file.write_all(&word.to_le_bytes())?;
            }
            self.file.flush()?;
        }
        self.file.get_ref().sync_all()?;
        std::fs::rename(part(&self.prefix), name(&self.prefix, self.format, self.state.shard))
    }
}

/// The name of a file that is whole.
pub fn name(prefix: &Path, format: TokenFormat, shard: u64) -> PathBuf {
    match format {
        TokenFormat::LlmC => with_suffix(prefix, &format!("_{shard:06}.bin")),
        _ => with_suffix(prefix, ".bin"),
    }
}

fn part(prefix: &Path) -> PathBuf {
    with_suffix(prefix, ".bin.part")
}

/// A header whose words are filled in at the end.
fn header(format: TokenFormat) -> Vec<u8> {
    vec![0; if format == TokenFormat::LlmC { HEADER } else { 0 }]
}

fn failed(prefix: &Path, error: &io::Error) -> Error {
    Error::io(AREA, format!("cannot write '{}.bin': {error}", prefix.display()))
}
