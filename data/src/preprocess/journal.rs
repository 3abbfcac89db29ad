//! The journal of a call: how far input and output are, in `PREFIX.journal.json`, which is replaced as a whole.

use super::config::{AREA, PreprocessConfig};
use super::output::OutputState;
use super::reader::Position;
use crate::indexed_dataset::with_suffix;
use ferrotron_tensor::{Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// An entry.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Journal {
    /// The settings that decide the bytes of the files: options, tokenizer, and number, bytes and hash of the sources.
    pub settings: Value,
    pub position: Position,
    /// Bytes of the sources in front of it.
    pub read: u64,
    pub skipped: u64,
    /// The files of each key.
    pub outputs: Vec<OutputState>,
}

/// The journal's file.
pub fn path(config: &PreprocessConfig) -> PathBuf {
    with_suffix(&config.output_prefix, ".journal.json")
}

impl Journal {
    /// Reads the journal of an interrupted call, if there is one.
    ///
    /// # Errors
    /// A file that cannot be read; another input, tokenizer or options than those of `settings`.
    pub fn read(path: &Path, settings: &Value) -> Result<Option<Journal>> {
        let name = path.display();
        let bytes = match std::fs::read(path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => {
                return Err(Error::io(AREA, format!("cannot read '{name}': {error}")));
            }
        };
        let journal: Journal = serde_json::from_slice(&bytes).map_err(|error| {
            Error::io(AREA, format!("'{name}' is damaged: {error}; delete it to start anew"))
        })?;
        if journal.settings != *settings {
            let differs = ["tokenizer", "options", "sources"]
                .into_iter()
                .find(|key| journal.settings[key] != settings[key])
                .unwrap_or("settings");
            let message = format!(
                "'{name}' is of an interrupted call with other {differs}: give the same, or delete it to start anew"
            );
            return Err(Error::config(AREA, message));
        }
        Ok(Some(journal))
    }

    /// Compares the journal with the numbers of keys and of sources.
    ///
    /// # Errors
    /// A journal that this program did not write.
    pub fn check(&self, path: &Path, keys: usize, sources: usize) -> Result<()> {
        if self.outputs.len() == keys && self.position.source <= sources {
            return Ok(());
        }
        let message = format!("'{}' is damaged: delete it to start anew", path.display());
        Err(Error::io(AREA, message))
    }

    /// Replaces the journal.
    ///
    /// # Errors
    /// A full disk.
    pub fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string(self).expect("it has no map but of strings");
        replace(path, |file| file.write_all(text.as_bytes()))
    }
}

/// Writes a file that is there as a whole or not at all.
///
/// # Errors
/// A full disk.
pub fn replace(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
) -> Result<()> {
    let part = with_suffix(path, ".part");
    let write = || {
        let mut file = BufWriter::new(File::create(&part)?);
        write(&mut file)?;
        file.into_inner()?.sync_data()?;
        std::fs::rename(&part, path)
    };
    write().map_err(|error: io::Error| {
        Error::io(AREA, format!("cannot write '{}': {error}", path.display()))
    })
}
