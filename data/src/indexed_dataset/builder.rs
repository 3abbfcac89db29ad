//! Writes an indexed data set, byte for byte as Megatron-LM does, in memory that does not grow with it.
//!
//! Lengths go to their place in the index at once. Offsets are computed from them at the end, and the boundaries of
//! documents wait in a file of their own.

use super::header::{HEADER, Header};
use super::with_suffix;
use crate::token_type::TokenType;
use ferrotron_tensor::{Error, Result};
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// Writes `PREFIX.bin` and `PREFIX.idx`. Until [`IndexedDatasetBuilder::finish`] they have other names, and files of
/// these names stay as they are.
pub struct IndexedDatasetBuilder {
    prefix: PathBuf,
    header: Header,
    tokens: BufWriter<File>,
    index: BufWriter<File>,
    boundaries: BufWriter<File>,
    modes: BufWriter<File>,
    buffer: Vec<u8>,
    /// Sequences up to the end of the last document.
    ended: u64,
}

/// Extensions of the files that a data set is written under, until it is whole.
const PARTS: [&str; 4] = [".bin.part", ".idx.part", ".boundaries.part", ".modes.part"];

impl IndexedDatasetBuilder {
    /// Begins a data set of tokens of `token_type`, which Megatron must have a code for: any but `U32`.
    ///
    /// # Errors
    /// `TokenType::U32`; files that cannot be made.
    pub fn new(prefix: &Path, token_type: TokenType) -> Result<IndexedDatasetBuilder> {
        if !Header::has_code(token_type) {
            return Err(Error::value(
                "data",
                "Megatron's index has no code for unsigned 32-bit tokens: take TokenType::I32",
            ));
        }
        let create = |suffix: &str| {
            let mut options = File::options();
            options.read(true).write(true).create(true).truncate(true);
            options
                .open(with_suffix(prefix, suffix))
                .map(|file| BufWriter::with_capacity(1 << 18, file))
        };
        let open = || {
            let (tokens, mut index) = (create(PARTS[0])?, create(PARTS[1])?);
            index.write_all(&[0; HEADER])?;
            let (mut boundaries, modes) = (create(PARTS[2])?, create(PARTS[3])?);
            boundaries.write_all(&0_i64.to_le_bytes())?;
            Ok((tokens, index, boundaries, modes))
        };
        let (tokens, index, boundaries, modes) = open().map_err(|error| failed(prefix, &error))?;
        let header = Header { token_type, sequences: 0, boundaries: 1, has_modes: false };
        let prefix = prefix.to_path_buf();
        let (buffer, ended) = (Vec::new(), 0);
        Ok(IndexedDatasetBuilder {
            prefix,
            header,
            tokens,
            index,
            boundaries,
            modes,
            buffer,
            ended,
        })
    }

    /// Appends a sequence to the document at hand.
    ///
    /// # Errors
    /// A token that the type cannot hold; 2^31 tokens or more; a full disk; a set whose other sequences have modes.
    pub fn add_sequence(&mut self, tokens: &[u32]) -> Result<()> {
        if self.header.has_modes {
            return Err(Error::value(
                "data",
                "the sequences before this one have modes, so it needs one",
            ));
        }
        self.add(tokens)
    }

    /// Appends a sequence with a mode, as multimodal sets have.
    ///
    /// # Errors
    /// As [`IndexedDatasetBuilder::add_sequence`]; a set whose other sequences have no modes.
    pub fn add_sequence_with_mode(&mut self, tokens: &[u32], mode: i8) -> Result<()> {
        if !self.header.has_modes && self.header.sequences > 0 {
            return Err(Error::value("data", "the sequences before this one have no modes"));
        }
        self.add(tokens)?;
        self.header.has_modes = true;
        self.modes.write_all(&mode.to_le_bytes()).map_err(|error| failed(&self.prefix, &error))
    }

    fn add(&mut self, tokens: &[u32]) -> Result<()> {
        let largest = self.header.token_type.max();
        if let Some(at) = tokens.iter().position(|&token| token > largest) {
            return Err(Error::value(
                "data",
                format!(
                    "sequence {} has token {} at position {at}, but {:?} holds 0 to {largest}",
                    self.header.sequences, tokens[at], self.header.token_type
                ),
            ));
        }
        let Ok(length) = i32::try_from(tokens.len()) else {
            let message = format!(
                "a sequence has {} tokens, and Megatron takes less than 2^31",
                tokens.len()
            );
            return Err(Error::value("data", message));
        };
        self.buffer.clear();
        self.header.token_type.encode(tokens, &mut self.buffer);
        let written = self.tokens.write_all(&self.buffer);
        written
            .and_then(|()| self.index.write_all(&length.to_le_bytes()))
            .map_err(|error| failed(&self.prefix, &error))?;
        self.header.sequences += 1;
        Ok(())
    }

    /// Ends the document at hand, which may be empty.
    ///
    /// # Errors
    /// A full disk.
    pub fn end_document(&mut self) -> Result<()> {
        self.header.boundaries += 1;
        self.ended = self.header.sequences;
        let boundary = (self.header.sequences as i64).to_le_bytes();
        self.boundaries.write_all(&boundary).map_err(|error| failed(&self.prefix, &error))
    }

    /// Writes the index and gives both files their names.
    ///
    /// # Errors
    /// Sequences behind the last document, which Megatron would refuse to read; a full disk.
    pub fn finish(mut self) -> Result<()> {
        if self.ended < self.header.sequences {
            let message = format!(
                "{} sequences lie behind the last document: end it before the data set is finished",
                self.header.sequences - self.ended
            );
            return Err(Error::value("data", message));
        }
        let written = self.write_index();
        written.map_err(|error| failed(&self.prefix, &error))
    }

    fn write_index(&mut self) -> io::Result<()> {
        self.tokens.flush()?;
        self.index.flush()?;
        // The lengths are read while the offsets are written behind them.
        let mut lengths = BufReader::new(File::open(with_suffix(&self.prefix, PARTS[1]))?);
        lengths.seek(SeekFrom::Start(HEADER as u64))?;
        let (mut offset, mut length) = (0_i64, [0; 4]);
        for _ in 0..self.header.sequences {
            lengths.read_exact(&mut length)?;
            self.index.write_all(&offset.to_le_bytes())?;
            offset += i64::from(i32::from_le_bytes(length)) * self.header.token_type.bytes() as i64;
        }
        for part in [&mut self.boundaries, &mut self.modes] {
            part.flush()?;
            let file = part.get_mut();
            file.seek(SeekFrom::Start(0))?;
            io::copy(file, &mut self.index)?;
        }
        self.index.seek(SeekFrom::Start(0))?;
        self.index.write_all(&self.header.to_bytes())?;
        self.index.flush()?;
        self.tokens.get_ref().sync_all()?;
        self.index.get_ref().sync_all()?;
        for (part, name) in [(PARTS[0], ".bin"), (PARTS[1], ".idx")] {
            std::fs::rename(with_suffix(&self.prefix, part), with_suffix(&self.prefix, name))?;
        }
        Ok(())
    }
}

impl Drop for IndexedDatasetBuilder {
    /// Removes what is left of the parts.
    fn drop(&mut self) {
        for part in PARTS {
            let _ = std::fs::remove_file(with_suffix(&self.prefix, part));
        }
    }
}

fn failed(prefix: &Path, error: &io::Error) -> Error {
    Error::io("data", format!("cannot write '{}.idx' and .bin: {error}", prefix.display()))
}
