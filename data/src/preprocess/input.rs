//! The files that are read: found in folders, sorted, recognised by their extensions.

use super::config::AREA;
use ferrotron_tensor::{Error, Result};
use serde_json::{Value, json};
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

/// A file, with what shows that it is the same one later.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    pub path: PathBuf,
    pub bytes: u64,
    /// The time of its last change, in nanoseconds since 1970.
    modified: u64,
}

impl Source {
    /// The content and the compression, by the extensions: anything unknown is text.
    pub fn kind(&self) -> (Content, Compression) {
        let (content, compression) = recognised(&self.path);
        (content.unwrap_or(Content::Text), compression)
    }

    /// The fields that a journal compares.
    pub fn to_json(&self) -> Value {
        json!({ "path": self.name(), "bytes": self.bytes, "modified": self.modified })
    }

    /// The path, for messages.
    pub fn name(&self) -> String {
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
        if sources.iter().any(|source: &Source| source.path == path) {
            let message = format!("--input: '{}' is named twice", path.display());
            return Err(Error::config(AREA, message));
        }
        let modified =
            metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        let modified = modified.map_or(0, |time| time.as_nanos() as u64);
        sources.push(Source { path, bytes: metadata.len(), modified });
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
