//! Megatron-LM's indexed data sets: tokens in `PREFIX.bin`, sequences and documents in `PREFIX.idx`.
//!
//! [`IndexedDataset`] reads them in place: opening one reads the header and the ends of the arrays, whatever the size.
//! [`IndexedDatasetBuilder`] writes the bytes that Megatron writes.

mod builder;
mod header;
mod index;

use crate::token_array::TokenArray;
use crate::token_file::TokenFile;
use crate::token_type::TokenType;
use ferrotron_tensor::{Error, Result};
use std::ffi::OsString;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

pub use builder::{BuilderState, IndexedDatasetBuilder};
use index::Index;

/// An indexed data set of Megatron-LM, open for reading.
///
/// A sequence is what one line of the source became; a document is one sequence or several (its sentences, for BERT).
///
/// ```
/// use ferrotron_data::{IndexedDataset, IndexedDatasetBuilder, TokenType};
/// # let folder = tempfile::tempdir().unwrap();
/// let prefix = folder.path().join("my_text_document");
/// let mut builder = IndexedDatasetBuilder::new(&prefix, TokenType::U16)?;
/// for document in [&[5, 6, 7][..], &[8, 9]] {
///     builder.add_sequence(document)?;
///     builder.end_document()?;
/// }
/// builder.finish()?;
///
/// let dataset = IndexedDataset::open(&prefix)?;
/// assert_eq!((dataset.num_documents(), dataset.num_sequences(), dataset.num_tokens()), (2, 2, 5));
/// assert_eq!(dataset.sequence(1)?, [8, 9]);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub struct IndexedDataset {
    index: Index,
    /// The `.bin`, for messages.
    name: String,
    tokens: TokenArray,
    /// Set once everything was compared.
    checked: OnceLock<()>,
}

impl IndexedDataset {
    /// The index that `path` names: itself, the one beside a `.bin`, or `PREFIX.idx` where there is no file PREFIX.
    pub fn index_path(path: &Path) -> Option<PathBuf> {
        let has = |name: &str| path.extension().is_some_and(|extension| extension == name);
        let index = match (has("idx"), has("bin") || !path.exists()) {
            (true, _) => return Some(path.to_path_buf()),
            (false, true) if has("bin") => path.with_extension("idx"),
            (false, true) => with_suffix(path, ".idx"),
            (false, false) => return None,
        };
        index.is_file().then_some(index)
    }

    /// Opens `PREFIX`, `PREFIX.idx` or `PREFIX.bin`.
    ///
    /// # Errors
    /// A file that is missing or cannot be read; a field of the header that is wrong, or ends of the arrays that
    /// contradict each other or the size of the `.bin`. [`IndexedDataset::check`] compares everything.
    pub fn open(path: &Path) -> Result<IndexedDataset> {
        let index_path =
            IndexedDataset::index_path(path).unwrap_or_else(|| with_suffix(path, ".idx"));
        let mut index = Index::open(&index_path)?;
        let bin = index_path.with_extension("bin");
        let name = bin.display().to_string();
        let failed = |error: std::io::Error| {
            let message = format!(
                "cannot open '{name}', which has the tokens of '{}': {error}",
                index_path.display()
            );
            Error::io("data", message)
        };
        let metadata = std::fs::metadata(&bin).map_err(failed)?;
        if !metadata.is_file() {
            return Err(Error::io("data", format!("'{name}' is not a regular file")));
        }
        index.check_ends(&name, metadata.len())?;
        let file = File::open(&bin).and_then(|file| TokenFile::new(&bin, file)).map_err(failed)?;
        let token_type = index.header.token_type;
        let len = metadata.len() / token_type.bytes() as u64;
        let tokens = TokenArray { file, offset: 0, token_type, len };
        Ok(IndexedDataset { index, name, tokens, checked: OnceLock::new() })
    }

    /// The type of the tokens.
    pub fn token_type(&self) -> TokenType {
        self.tokens.token_type
    }

    /// Number of tokens.
    pub fn num_tokens(&self) -> u64 {
        self.tokens.len
    }

    /// Number of sequences.
    pub fn num_sequences(&self) -> u64 {
        self.index.header.sequences
    }

    /// Number of documents.
    pub fn num_documents(&self) -> u64 {
        self.index.header.boundaries - 1
    }

    /// The sequences of a document.
    ///
    /// # Errors
    /// No such document; boundaries that contradict the number of sequences.
    pub fn document(&self, document: u64) -> Result<Range<u64>> {
        refuse_beyond("document", document, self.num_documents())?;
        self.index.document(document)
    }

    /// The lengths of sequences, and the first sequences of the documents that begin behind the first of them. Reads their
    /// part of the index once and compares it.
    ///
    /// # Errors
    /// A range beyond the sequences; the first entry that is wrong, with its field.
    pub(crate) fn part(&self, sequences: Range<u64>) -> Result<(Vec<u32>, Vec<u64>)> {
        if sequences.is_empty() {
            return Ok((Vec::new(), Vec::new()));
        }
        refuse_beyond("sequence", sequences.end - 1, self.num_sequences())?;
        self.index.part(sequences)
    }

    /// The first document whose number of sequences is like this, and the number.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub(crate) fn find_document(
        &self,
        is_like: impl Fn(i64) -> bool,
    ) -> Result<Option<(u64, i64)>> {
        self.index.find_document(is_like)
    }

    /// The tokens of a sequence; numbers that are none become `u32::MAX`.
    ///
    /// # Errors
    /// No such sequence; a length or an offset that does not fit the `.bin`.
    pub fn sequence(&self, sequence: u64) -> Result<Vec<u32>> {
        let range = self.sequence_tokens(sequence)?;
        let mut tokens = vec![0; (range.end - range.start) as usize];
        self.read(range.start, &mut tokens)?;
        Ok(tokens)
    }

    /// The lengths of the sequences of a range, in tokens.
    ///
    /// # Errors
    /// A range beyond the sequences; a length below 0.
    pub fn sequence_lengths(&self, sequences: Range<u64>) -> Result<Vec<u32>> {
        if sequences.is_empty() {
            return Ok(Vec::new());
        }
        refuse_beyond("sequence", sequences.end - 1, self.num_sequences())?;
        self.index.lengths(sequences)
    }

    /// The mode of a sequence, in a multimodal data set.
    ///
    /// # Errors
    /// No such sequence.
    pub fn mode(&self, sequence: u64) -> Result<Option<i8>> {
        refuse_beyond("sequence", sequence, self.num_sequences())?;
        self.index.mode(sequence)
    }

    /// Reads the whole index and compares lengths, offsets and documents; not the tokens. Later calls read nothing.
    ///
    /// # Errors
    /// The first entry that is wrong, with its field.
    pub fn check(&self) -> Result<()> {
        if self.checked.get().is_none() {
            self.index.check()?;
            self.checked.get_or_init(|| ());
        }
        Ok(())
    }

    /// The tokens of a sequence, as positions in the `.bin`.
    pub(crate) fn sequence_tokens(&self, sequence: u64) -> Result<Range<u64>> {
        refuse_beyond("sequence", sequence, self.num_sequences())?;
        self.index.sequence(sequence)
    }

    /// The tokens of consecutive sequences, as positions in the `.bin`.
    pub(crate) fn tokens_of(&self, sequences: Range<u64>) -> Result<Range<u64>> {
        if sequences.is_empty() {
            return Ok(0..0);
        }
        let start = self.sequence_tokens(sequences.start)?.start;
        let end = self.sequence_tokens(sequences.end - 1)?.end;
        match start <= end {
            true => Ok(start..end),
            false => Err(self.index.decreasing(sequences)),
        }
    }

    /// The `.bin`, for messages.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Copies tokens `at .. at + out.len()` of the `.bin`, which the caller has checked against the length.
    pub(crate) fn read(&self, at: u64, out: &mut [u32]) -> Result<()> {
        self.tokens.read(&self.name, at, out)
    }

    /// The number at position `at` of the `.bin` as it is there.
    pub(crate) fn number(&self, at: u64) -> Result<i64> {
        self.tokens.number(&self.name, at)
    }

    /// Gives the file descriptors back. From now on each read opens its file.
    pub(crate) fn close(&mut self) {
        self.index.close();
        self.tokens.file.close();
    }
}

fn refuse_beyond(what: &str, index: u64, count: u64) -> Result<()> {
    match index < count {
        true => Ok(()),
        false => Err(Error::value("data", format!("no {what} {index} in a data set of {count}"))),
    }
}

/// The path with `suffix` behind its name, whose own extension stays.
pub(crate) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(suffix);
    PathBuf::from(name)
}

#[cfg(test)]
mod tests;
