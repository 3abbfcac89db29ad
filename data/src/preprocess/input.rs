//! The files that are read: found in folders, sorted, recognised by their extensions.

use super::config::AREA;
use super::hexadecimal::hexadecimal;
use ferrotron_tensor::{Error, Result};
use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

/// The contents of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// A JSON object on each line.
    JsonLines,
    /// Rows in columns.
    Parquet,
    /// One document of plain text.
    Text,
}

/// The compression of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    None,
    Gzip,
    Zstd,
}

/// A file that was read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Source {
    /// The path.
    #[serde(serialize_with = "as_text")]
    pub path: PathBuf,
    /// The size.
    pub bytes: u64,
    /// The time of its last change, in nanoseconds since 1970.
    #[serde(skip)]
    modified: u64,
}

/// Writes a path as text, with replacement characters for what is not UTF-8.
fn as_text<S: Serializer>(path: &Path, serializer: S) -> std::result::Result<S::Ok, S::Error> {
    serializer.collect_str(&path.display())
}

/// The fields of sources that a journal compares: their number, their bytes, and a hash of paths, sizes and times.
pub fn summary(sources: &[Source]) -> Value {
    let mut hash = Sha256::new();
    for Source { path, bytes, modified } in sources {
        let path = path.as_os_str().as_encoded_bytes();
        for number in [path.len() as u64, *bytes, *modified] {
            hash.update(number.to_le_bytes());
        }
        hash.update(path);
    }
    let bytes: u64 = sources.iter().map(|source| source.bytes).sum();
    json!({ "count": sources.len(), "bytes": bytes, "sha256": hexadecimal(&hash.finalize()) })
}

impl Source {
    /// The content and the compression, by the extensions: anything unknown is text.
    pub(super) fn kind(&self) -> (Content, Compression) {
        let (content, compression) = recognised(&self.path);
        (content.unwrap_or(Content::Text), compression)
    }

    /// The path, for messages.
    pub(super) fn name(&self) -> String {
        self.path.display().to_string()
    }
}

/// The extensions that are looked for in folders.
const KNOWN: &str = ".jsonl, .ndjson, .json, .parquet or .txt, perhaps with .gz or .zst";

fn recognised(path: &Path) -> (Option<Content>, Compression) {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    let (name, compression) = match name.rsplit_once('.') {
        Some((rest, "gz")) => (rest, Compression::Gzip),
        Some((rest, "zst")) => (rest, Compression::Zstd),
        _ => (name.as_str(), Compression::None),
    };
    let content = match name.rsplit_once('.') {
        Some((_, "jsonl" | "ndjson" | "json")) => Some(Content::JsonLines),
        Some((_, "parquet")) => Some(Content::Parquet),
        Some((_, "txt")) => Some(Content::Text),
        _ => None,
    };
    (content, compression)
}

/// The files of `inputs` in their order, those of a folder and the folders below it sorted by path. Returns those of 0
/// bytes apart.
///
/// # Errors
/// A path that cannot be read; a folder without a file of a known extension; no file that has a byte.
pub fn find(inputs: &[PathBuf]) -> Result<(Vec<Source>, Vec<PathBuf>)> {
    let mut paths = Vec::new();
    for input in inputs {
        let metadata = std::fs::metadata(input).map_err(|error| failed(input, &error))?;
        if !metadata.is_dir() {
            paths.push(input.clone());
            continue;
        }
        let before = paths.len();
        search(input, &mut paths)?;
        if paths.len() == before {
            let message =
                format!("--input: the folder '{}' has no file in {KNOWN}", input.display());
            return Err(Error::config(AREA, message));
        }
        paths[before..].sort();
    }
    let (mut sources, mut empty) = (Vec::new(), Vec::new());
    for path in paths {
        let metadata = std::fs::metadata(&path).map_err(|error| failed(&path, &error))?;
        if metadata.is_file() && metadata.len() == 0 {
            empty.push(path);
            continue;
        }
        let modified =
            metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        let modified = modified.map_or(0, |time| time.as_nanos() as u64);
        sources.push(Source { path, bytes: metadata.len(), modified });
    }
    let mut seen = HashSet::new();
    if let Some(twice) = sources.iter().find(|source: &&Source| !seen.insert(&source.path)) {
        let message = format!("--input: '{}' is named twice", twice.path.display());
        return Err(Error::config(AREA, message));
    }
    if sources.is_empty() {
        return Err(Error::config(AREA, "--input: every file is empty"));
    }
    Ok((sources, empty))
}

/// Collects the files of known extensions in `folder` and below; hidden ones are left alone.
fn search(folder: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(folder).map_err(|error| failed(folder, &error))? {
        let entry = entry.map_err(|error| failed(folder, &error))?;
        let path = entry.path();
        if entry.file_name().to_string_lossy().starts_with('.') {
            continue;
        }
        if path.is_dir() {
            search(&path, found)?;
        } else if recognised(&path).0.is_some() {
            found.push(path);
        }
    }
    Ok(())
}

fn failed(path: &Path, error: &std::io::Error) -> Error {
    Error::io(AREA, format!("--input: cannot read '{}': {error}", path.display()))
}
