//! Writes an indexed data set, byte for byte as Megatron-LM does, in memory that does not grow with it.
//!
//! Lengths go to their place in the index at once. Offsets are computed from them at the end, and the boundaries of
//! documents wait in a file of their own.

use super::header::{HEADER, Header};
use super::with_suffix;
use crate::token_type::TokenType;
use ferrotron_tensor::{Error, Result};
use serde::{Deserialize, Serialize};
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
    /// Tokens of the sequence at hand.
    open: u64,
    /// Tokens of all sequences, that one included.
    written: u64,
    /// Sequences up to the end of the last document.
    ended: u64,
    on_drop: OnDrop,
}

/// The treatment of the parts of a data set that is dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OnDrop {
    Remove,
    Keep,
}

/// The state of a builder whose parts are on disk: enough to cut them to it and append from there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BuilderState {
    sequences: u64,
    boundaries: u64,
    tokens: u64,
    open: u64,
    ended: u64,
}

/// Extensions of the files that a data set is written under, until it is whole.
const PARTS: [&str; 4] = [".bin.part", ".idx.part", ".boundaries.part", ".modes.part"];

/// The parts that remain, and the extensions that they get.
const NAMES: [(&str, &str); 2] = [(PARTS[0], ".bin"), (PARTS[1], ".idx")];

/// Whether parts are there already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OpenAs {
    New,
    Existing,
}

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
        let mut builder = IndexedDatasetBuilder::open(prefix, token_type, OpenAs::New)?;
        let begun = builder
            .index
            .write_all(&[0; HEADER])
            .and_then(|()| builder.boundaries.write_all(&0_i64.to_le_bytes()));
        begun.map_err(|error| failed(prefix, &error))?;
        builder.header.boundaries = 1;
        Ok(builder)
    }

    /// Reopens the parts of a data set without modes that [`IndexedDatasetBuilder::sync`] had brought to `state`, and cuts
    /// off what was written behind it. Parts that had got their last names get the first ones back. They stay if the
    /// builder is dropped.
    ///
    /// # Errors
    /// Parts that are missing, or shorter than the state says.
    pub fn resume(
        prefix: &Path,
        token_type: TokenType,
        state: &BuilderState,
    ) -> Result<IndexedDatasetBuilder> {
        for (part, name) in NAMES {
            let (part, name) = (with_suffix(prefix, part), with_suffix(prefix, name));
            if !part.exists() && name.exists() {
                std::fs::rename(&name, &part).map_err(|error| failed(prefix, &error))?;
            }
        }
        let mut builder = IndexedDatasetBuilder::open(prefix, token_type, OpenAs::Existing)?;
        let lengths = [
            state.tokens * token_type.bytes() as u64,
            HEADER as u64 + 4 * state.sequences,
            8 * state.boundaries,
            0,
        ];
        let files =
            [&mut builder.tokens, &mut builder.index, &mut builder.boundaries, &mut builder.modes];
        for ((file, length), part) in files.into_iter().zip(lengths).zip(PARTS) {
            let mut cut = || {
                let file = file.get_mut();
                let found = file.metadata()?.len();
                if found < length {
                    let message =
                        format!("{part} has {found} bytes, less than the {length} before");
                    return Err(io::Error::other(message));
                }
                file.set_len(length)?;
                file.seek(SeekFrom::End(0)).map(drop)
            };
            cut().map_err(|error: io::Error| failed(prefix, &error))?;
        }
        builder.header.sequences = state.sequences;
        builder.header.boundaries = state.boundaries;
        (builder.open, builder.written, builder.ended) = (state.open, state.tokens, state.ended);
        Ok(builder)
    }

    fn open(
        prefix: &Path,
        token_type: TokenType,
        open_as: OpenAs,
    ) -> Result<IndexedDatasetBuilder> {
        let is_new = open_as == OpenAs::New;
        let open = |part: &str| {
            let mut options = File::options();
            options.read(true).write(true).create(is_new).truncate(is_new);
            let file = options.open(with_suffix(prefix, part));
            file.map(|file| BufWriter::with_capacity(1 << 18, file))
                .map_err(|error| failed(prefix, &error))
        };
        Ok(IndexedDatasetBuilder {
            prefix: prefix.to_path_buf(),
            header: Header { token_type, sequences: 0, boundaries: 0, has_modes: false },
            tokens: open(PARTS[0])?,
            index: open(PARTS[1])?,
            boundaries: open(PARTS[2])?,
            modes: open(PARTS[3])?,
            buffer: Vec::new(),
            open: 0,
            written: 0,
            ended: 0,
            on_drop: if is_new { OnDrop::Remove } else { OnDrop::Keep },
        })
    }

    /// Leaves the parts where they are if the builder is dropped, to be resumed.
    pub fn keep_parts(&mut self) {
        self.on_drop = OnDrop::Keep;
    }

    /// Removes the parts that have no last name.
    pub fn remove_parts(mut self) {
        self.on_drop = OnDrop::Remove;
    }

    /// Brings the parts to disk, and returns the state from which [`IndexedDatasetBuilder::resume`] goes on.
    ///
    /// # Errors
    /// A full disk.
    pub fn sync(&mut self) -> Result<BuilderState> {
        for file in [&mut self.tokens, &mut self.index, &mut self.boundaries] {
            let synced = file.flush().and_then(|()| file.get_ref().sync_data());
            synced.map_err(|error| failed(&self.prefix, &error))?;
        }
        Ok(self.state())
    }

    /// The state at this point, of which the next [`IndexedDatasetBuilder::sync`] brings the bytes to disk.
    pub fn state(&self) -> BuilderState {
        BuilderState {
            sequences: self.header.sequences,
            boundaries: self.header.boundaries,
            tokens: self.written,
            open: self.open,
            ended: self.ended,
        }
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
    /// The errors of [`IndexedDatasetBuilder::add_sequence`]; a set whose other sequences have no modes.
    pub fn add_sequence_with_mode(&mut self, tokens: &[u32], mode: i8) -> Result<()> {
        if !self.header.has_modes && self.header.sequences > 0 {
            return Err(Error::value("data", "the sequences before this one have no modes"));
        }
        self.add(tokens)?;
        self.header.has_modes = true;
        self.modes.write_all(&mode.to_le_bytes()).map_err(|error| failed(&self.prefix, &error))
    }

    fn add(&mut self, tokens: &[u32]) -> Result<()> {
        self.extend_sequence(tokens)?;
        self.end_sequence()
    }

    /// Appends tokens to the sequence at hand, which [`IndexedDatasetBuilder::end_sequence`] ends: for sequences that are
    /// too long to be given whole.
    ///
    /// # Errors
    /// A token that the type cannot hold; 2^31 tokens or more in the sequence; a full disk.
    pub fn extend_sequence(&mut self, tokens: &[u32]) -> Result<()> {
        let largest = self.header.token_type.max();
        if let Some(at) = tokens.iter().position(|&token| token > largest) {
            return Err(Error::value(
                "data",
                format!(
                    "sequence {} has token {} at position {}, but {:?} holds 0 to {largest}",
                    self.header.sequences,
                    tokens[at],
                    self.open + at as u64,
                    self.header.token_type
                ),
            ));
        }
        let open = self.open + tokens.len() as u64;
        if i32::try_from(open).is_err() {
            let message =
                format!("a sequence has {open} tokens, and Megatron takes less than 2^31");
            return Err(Error::value("data", message));
        }
        self.buffer.clear();
        self.header.token_type.encode(tokens, &mut self.buffer);
        self.tokens.write_all(&self.buffer).map_err(|error| failed(&self.prefix, &error))?;
        self.open = open;
        self.written += tokens.len() as u64;
        Ok(())
    }

    /// Ends the sequence at hand, which may be empty.
    ///
    /// # Errors
    /// A full disk.
    pub fn end_sequence(&mut self) -> Result<()> {
        let length = (self.open as i32).to_le_bytes();
        self.index.write_all(&length).map_err(|error| failed(&self.prefix, &error))?;
        self.open = 0;
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
        self.write_whole()?;
        self.on_drop = OnDrop::Remove;
        Ok(())
    }

    /// Like [`IndexedDatasetBuilder::finish`], but the boundaries of documents stay in their part, so that
    /// [`IndexedDatasetBuilder::resume`] is possible until [`IndexedDatasetBuilder::remove_parts`].
    ///
    /// # Errors
    /// The errors of [`IndexedDatasetBuilder::finish`].
    pub fn write_whole(&mut self) -> Result<()> {
        if self.open > 0 {
            let message =
                format!("{} tokens lie behind the last sequence: end it first", self.open);
            return Err(Error::value("data", message));
        }
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
        for (part, name) in NAMES {
            std::fs::rename(with_suffix(&self.prefix, part), with_suffix(&self.prefix, name))?;
        }
        Ok(())
    }
}

impl Drop for IndexedDatasetBuilder {
    /// Removes what is left of the parts, unless they are to be resumed.
    fn drop(&mut self) {
        if self.on_drop == OnDrop::Keep {
            return;
        }
        for part in PARTS {
            let _ = std::fs::remove_file(with_suffix(&self.prefix, part));
        }
    }
}

fn failed(prefix: &Path, error: &io::Error) -> Error {
    Error::io("data", format!("cannot write '{}.idx' and .bin: {error}", prefix.display()))
}
