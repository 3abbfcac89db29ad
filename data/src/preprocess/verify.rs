//! Compares token files with their fingerprint, and each field of an index with the others.

use super::config::AREA;
use super::fingerprint::{self, HashedFile};
use crate::indexed_dataset::IndexedDataset;
use ferrotron_tensor::{Error, Result};
use serde::Deserialize;
use std::fs::File;
use std::io::{BufReader, ErrorKind};
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// The numbers of a data set that is right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verified {
    /// Number of documents; none for files without an index or a fingerprint.
    pub documents: u64,
    /// Number of tokens.
    pub tokens: u64,
    /// Number of bytes of the files.
    pub bytes: u64,
    /// Whether there was a fingerprint to compare them with.
    pub has_fingerprint: bool,
}

/// The fields of a fingerprint that are compared: its sources may be many.
#[derive(Deserialize)]
struct Stated {
    documents: u64,
    sequences: u64,
    tokens: u64,
    token_type: String,
    files: Vec<HashedFile>,
}

/// Verifies the files of `prefix`: the index against itself and the size of the `.bin`, and all files against the
/// fingerprint. Without a fingerprint only the index is verified. Returns none if `stop` is set.
///
/// # Errors
/// The first file, field or count that is wrong.
pub fn verify(prefix: &Path, stop: &AtomicBool) -> Result<Option<Verified>> {
    let without = |suffix: &str| {
        let name = prefix.to_string_lossy();
        name.strip_suffix(suffix).map(|name| Path::new(name).to_path_buf())
    };
    let prefix = without(".bin").or_else(|| without(".idx")).unwrap_or(prefix.to_path_buf());
    let dataset = match IndexedDataset::index_path(&prefix) {
        Some(_) => Some(IndexedDataset::open(&prefix)?),
        None => None,
    };
    if let Some(dataset) = &dataset {
        dataset.check()?;
    }
    let path = fingerprint::path(&prefix);
    let name = path.display();
    let file = match (File::open(&path), &dataset) {
        (Ok(file), _) => BufReader::new(file),
        (Err(error), Some(dataset)) if error.kind() == ErrorKind::NotFound => {
            return Ok(Some(Verified {
                documents: dataset.num_documents(),
                tokens: dataset.num_tokens(),
                bytes: dataset.num_tokens() * dataset.token_type().bytes() as u64,
                has_fingerprint: false,
            }));
        }
        (Err(error), _) => {
            return Err(Error::io(AREA, format!("--verify: cannot read '{name}': {error}")));
        }
    };
    let stated: Stated = serde_json::from_reader(file)
        .map_err(|error| Error::io(AREA, format!("'{name}' is no fingerprint: {error}")))?;
    let mut bytes = 0;
    for file in &stated.files {
        let path = prefix.with_file_name(&file.name);
        let Some(found) = HashedFile::new(&path, stop)? else { return Ok(None) };
        if found.bytes != file.bytes {
            return Err(differs(&path, "bytes", found.bytes, file.bytes));
        }
        if found.sha256 != file.sha256 {
            return Err(differs(&path, "SHA-256", found.sha256, &file.sha256));
        }
        bytes += found.bytes;
    }
    if let Some(dataset) = &dataset {
        for (what, found, stated) in [
            ("documents", dataset.num_documents(), stated.documents),
            ("sequences", dataset.num_sequences(), stated.sequences),
            ("tokens", dataset.num_tokens(), stated.tokens),
        ] {
            if found != stated {
                return Err(differs(&prefix, what, found, stated));
            }
        }
        let found = format!("{:?}", dataset.token_type()).to_lowercase();
        if found != stated.token_type {
            return Err(differs(&prefix, "token type", found, &stated.token_type));
        }
    }
    let Stated { documents, tokens, .. } = stated;
    Ok(Some(Verified { documents, tokens, bytes, has_fingerprint: true }))
}

fn differs<T: std::fmt::Display>(file: &Path, what: &str, found: T, stated: impl Into<T>) -> Error {
    let (file, stated) = (file.display(), stated.into());
    Error::io(AREA, format!("'{file}': {what} {found}, but the fingerprint says {stated}"))
}
