//! `index.json`: which files make a checkpoint, and where in them each global tensor lies.

use ferrotron_tensor::DType;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use super::is_moment;
use super::slices::{Slice, is_tiled, numel};
use crate::io::checked_file::{Fault, FileRecord, cannot};
use crate::io::tensor_file::TensorFile;

/// Name of the file.
pub(super) const INDEX: &str = "index.json";

const FORMAT: &str = "ferrotron checkpoint";

/// The version that is written. Version 1 had no `architecture` in `config.json`: the model was a GPT.
const VERSION: u32 = 2;

/// Most dims of a tensor: a box has 2^dims corners, and all are examined.
const MAX_DIMS: usize = 8;

/// The contents of `index.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Index {
    format: String,
    version: u32,
    /// Every other file of the folder.
    pub files: BTreeMap<String, FileRecord>,
    /// Every tensor, by its global name.
    pub tensors: BTreeMap<String, TensorRecord>,
}

/// The fields of an index that every version has.
#[derive(Deserialize)]
struct Header {
    format: String,
    version: u32,
}

/// A global tensor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TensorRecord {
    pub dtype: String,
    /// Dims of the whole.
    pub shape: Vec<usize>,
    /// Boxes that together make the whole, without overlap.
    pub pieces: Vec<SliceRecord>,
}

/// A box of a global tensor in a file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct SliceRecord {
    pub file: String,
    /// Its name there.
    pub key: String,
    #[serde(flatten)]
    pub slice: Slice,
    /// Its first byte in the file, once the [headers](Index::verify_headers) are read.
    #[serde(skip)]
    pub start: u64,
}

impl Index {
    pub fn new() -> Index {
        Index {
            format: FORMAT.into(),
            version: VERSION,
            files: BTreeMap::new(),
            tensors: BTreeMap::new(),
        }
    }

    /// The weights, with their names.
    pub fn weights(&self) -> impl Iterator<Item = (&String, &TensorRecord)> {
        self.tensors.iter().filter(|(name, _)| !is_moment(name))
    }

    /// The narrowest dtype of the weights, which is that of the run: some may be kept in f32 beside 16-bit ones. `None`
    /// if there are no weights.
    pub fn dtype(&self) -> Option<&str> {
        let dtypes = self.weights().map(|(_, record)| record.dtype.as_str());
        dtypes.min_by_key(|dtype| dtype.parse().map_or(usize::MAX, DType::size))
    }

    /// Reads the list of what another rank wrote, and removes it.
    pub fn take_part(path: &Path) -> Result<Index, Fault> {
        let text = std::fs::read(path).map_err(|error| cannot("read", path, &error))?;
        let part = serde_json::from_slice(&text)
            .map_err(|error| format!("'{}' is damaged: {error}", path.display()))?;
        std::fs::remove_file(path).map_err(|error| cannot("delete", path, &error))?;
        Ok(part)
    }

    /// Adds what another rank wrote.
    ///
    /// Errors if it has other dims or another dtype for a tensor of this one.
    pub fn join(&mut self, part: Index) -> Result<(), Fault> {
        self.files.extend(part.files);
        for (name, record) in part.tensors {
            match self.tensors.entry(name) {
                Entry::Vacant(entry) => drop(entry.insert(record)),
                Entry::Occupied(mut entry) => {
                    let (name, known) = (entry.key().clone(), entry.get_mut());
                    if (&known.dtype, &known.shape) != (&record.dtype, &record.shape) {
                        return Err(format!(
                            "ranks disagree about '{name}': {} {:?}, {} {:?}",
                            known.dtype, known.shape, record.dtype, record.shape
                        ));
                    }
                    known.pieces.extend(record.pieces);
                }
            }
        }
        Ok(())
    }

    /// Reads and checks the index of `folder`, not yet the files that it lists.
    pub fn read(folder: &Path) -> Result<Index, Fault> {
        let path = folder.join(INDEX);
        let text = std::fs::read(&path).map_err(|error| cannot("read", &path, &error))?;
        let wrong = |what: String| format!("'{}' is damaged: {what}", path.display());
        let unreadable = |error: serde_json::Error| wrong(error.to_string());
        let Header { format, version } = serde_json::from_slice(&text).map_err(unreadable)?;
        if format != FORMAT || !(1..=VERSION).contains(&version) {
            return Err(format!(
                "'{}' is of '{format}' version {version}; this program reads '{FORMAT}' versions 1 to {VERSION}",
                path.display(),
            ));
        }
        let index: Index = serde_json::from_slice(&text).map_err(unreadable)?;
        index.check().map_err(wrong)?;
        Ok(index)
    }

    /// Whether every tensor is there once and whole, in files that are listed.
    pub fn check(&self) -> Result<(), String> {
        if let Some(file) = self.files.keys().find(|file| !is_plain(file)) {
            return Err(format!("it lists '{file}', which is no plain file name"));
        }
        for (name, tensor) in &self.tensors {
            if tensor.shape.len() > MAX_DIMS {
                let dims = tensor.shape.len();
                return Err(format!("'{name}' has {dims} dims, more than {MAX_DIMS}"));
            }
            let outside = |piece: &&SliceRecord| {
                !piece.slice.lies_in(&tensor.shape) || !self.files.contains_key(&piece.file)
            };
            if let Some(piece) = tensor.pieces.iter().find(outside) {
                return Err(format!("piece '{}' of '{name}' is outside of it", piece.key));
            }
            let held = tensor
                .pieces
                .iter()
                .fold(0_usize, |sum, piece| sum.saturating_add(piece.slice.numel()));
            let numel = numel(&tensor.shape);
            if !is_tiled(&tensor.shape, tensor.pieces.iter().map(|piece| &piece.slice)) {
                return Err(format!("the pieces of '{name}' hold {held} of its {numel} elements"));
            }
        }
        Ok(())
    }

    /// Reads every `size`-th file of `folder`, by falling length from number `rank` on, and compares sizes and
    /// checksums. Errors soon after `cancelled` is set.
    pub fn verify_share(
        &self,
        folder: &Path,
        (rank, size): (usize, usize),
        cancelled: &AtomicBool,
    ) -> Result<(), Fault> {
        let mut files: Vec<_> = self.files.iter().collect();
        files.sort_by_key(|(_, record)| std::cmp::Reverse(record.bytes));
        let mut share = files.into_iter().skip(rank).step_by(size);
        share.try_for_each(|(file, record)| record.verify_unless(&folder.join(file), cancelled))
    }

    /// Compares the sizes of the files of `folder`, and whether the pieces are in them; reads headers alone, and learns
    /// from them where the pieces begin.
    pub fn verify_headers(&mut self, folder: &Path) -> Result<(), Fault> {
        for (file, record) in &self.files {
            record.verify_length(&folder.join(file))?;
        }
        // File by file, so that one is open at a time.
        let mut files: BTreeMap<String, Vec<(&str, &str, &mut SliceRecord)>> = BTreeMap::new();
        for (name, tensor) in &mut self.tensors {
            for piece in &mut tensor.pieces {
                let file = files.entry(piece.file.clone()).or_default();
                file.push((name, &tensor.dtype, piece));
            }
        }
        for (file, pieces) in files {
            let opened = TensorFile::open(&folder.join(&file))?;
            for (name, stored, piece) in pieces {
                let (dtype, dims) = opened.describe(&piece.key)?;
                if dtype.to_string() != stored || dims != piece.slice.shape {
                    return Err(format!(
                        "'{}' is damaged: '{name}' should be {stored} {:?} in '{file}', which has {dtype} {dims:?}",
                        folder.join(INDEX).display(),
                        piece.slice.shape,
                    ));
                }
                piece.start = opened.start_of(&piece.key)?;
                if piece.start % dtype.size() as u64 != 0 {
                    let path = folder.join(&file);
                    return Err(format!(
                        "'{}' is damaged: '{name}' is not aligned",
                        path.display()
                    ));
                }
            }
        }
        Ok(())
    }
}

impl TensorRecord {
    pub fn dtype(&self) -> ferrotron_tensor::Result<DType> {
        self.dtype.parse()
    }
}

/// Whether a name stays in its folder.
fn is_plain(file: &str) -> bool {
    Path::new(file).file_name().is_some_and(|name| name == file)
}
