//! The checkpoints of a run's folder, as a list.

use ferrotron_tensor::{Error, Result};
use serde::Serialize;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::folder;
use super::index::{INDEX, Index};
use super::load::document;
use super::slices::numel;
use super::{CONFIG, is_moment};
use crate::io::checked_file::{Fault, cannot};

/// An entry of a run's folder: a checkpoint, or the remains of one.
#[derive(Debug, Clone)]
pub struct CheckpointSummary {
    /// Its folder.
    pub folder: PathBuf,
    /// The step in its name.
    pub step: u64,
    /// Time at which it was saved, or its last file written where it records none.
    pub written: SystemTime,
    /// Whether `latest` names it.
    pub latest: bool,
    /// Its contents, or why they cannot be loaded: headers and lengths are looked at, checksums of
    /// tensors are not compared.
    pub contents: std::result::Result<CheckpointContents, String>,
}

/// The contents of a checkpoint in numbers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CheckpointContents {
    /// Bytes of all files.
    pub bytes: u64,
    /// Number of files.
    pub files: usize,
    /// Number of elements of all weights.
    pub parameters: u64,
    /// Dtype of most elements of the weights.
    pub dtype: String,
    /// Whether it holds the optimizer's state.
    pub optimizer: bool,
}

/// Lists the checkpoints of a run's folder, first written first, those that are being written or deleted last. One that
/// is deleted meanwhile is left out.
///
/// # Errors
/// A folder that cannot be read.
pub fn list(dir: &Path) -> Result<Vec<CheckpointSummary>> {
    let unreadable = |error| Error::io("checkpoint", cannot("read", dir, &error));
    let entries = std::fs::read_dir(dir).map_err(unreadable)?;
    let latest = folder::latest(dir);
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.map_err(unreadable)?.path();
        let Some(step) = folder::step(&path) else { continue };
        let whole = path.extension().is_none();
        let stamp =
            if whole && path.join(INDEX).exists() { path.join(INDEX) } else { path.clone() };
        let age = folder::age(&path);
        let recorded = age.0.filter(|_| whole).map(|saved| SystemTime::UNIX_EPOCH + saved);
        let written = recorded.or_else(|| stamp.metadata().ok()?.modified().ok());
        let contents = match whole {
            true => contents(&path),
            false => {
                Err("incomplete: it is being written or deleted, or a killed run left it".into())
            }
        };
        if !path.exists() {
            continue;
        }
        let summary = CheckpointSummary {
            step,
            written: written.unwrap_or(SystemTime::UNIX_EPOCH),
            latest: latest.is_some() && path.file_name() == latest.as_deref().map(OsStr::new),
            contents,
            folder: path,
        };
        found.push(((!whole, age, summary.folder.clone()), summary));
    }
    found.sort_by(|(a, _), (b, _)| a.cmp(b));
    Ok(found.into_iter().map(|(_, summary)| summary).collect())
}

/// The index of a checkpoint, after a look at what can be read soon: lengths, headers and the configuration.
pub(super) fn inspect(folder: &Path) -> std::result::Result<Index, Fault> {
    let mut index = Index::read(folder)?;
    index.verify_headers(folder)?;
    let _: serde_json::Value = document(folder, &index, CONFIG)?;
    Ok(index)
}

fn contents(folder: &Path) -> std::result::Result<CheckpointContents, Fault> {
    let index = inspect(folder)?;
    Ok(CheckpointContents {
        bytes: index.files.values().map(|record| record.bytes).sum(),
        files: index.files.len(),
        parameters: index.weights().map(|(_, record)| numel(&record.shape) as u64).sum(),
        dtype: index.dtype().unwrap_or("none").to_string(),
        optimizer: index.tensors.keys().any(|name| is_moment(name)),
    })
}
