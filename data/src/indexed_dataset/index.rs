//! An open `.idx` file, whose arrays are read by position.

use super::header::{HEADER, Header};
use crate::token_file::TokenFile;
use ferrotron_tensor::{Error, Result};
use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::path::Path;

/// Entries of an array that are read at a time.
const CHUNK: u64 = 1 << 14;

/// An `.idx` file.
pub struct Index {
    name: String,
    file: TokenFile,
    pub header: Header,
    /// Number of tokens in the `.bin`.
    tokens: u64,
}

impl Index {
    /// Opens an index and checks its header.
    ///
    /// # Errors
    /// A file that cannot be read; the field that is wrong.
    pub fn open(path: &Path) -> Result<Index> {
        let name = path.display().to_string();
        let failed =
            |error: std::io::Error| Error::io("data", format!("cannot open '{name}': {error}"));
        let metadata = std::fs::metadata(path).map_err(failed)?;
        if !metadata.is_file() {
            return Err(Error::io("data", format!("'{name}' is not a regular file")));
        }
        let file = File::open(path).map_err(failed)?;
        let mut head = Vec::with_capacity(HEADER);
        (&file).take(HEADER as u64).read_to_end(&mut head).map_err(failed)?;
        let header = Header::parse(&head, metadata.len()).map_err(|why| wrong(&name, &why))?;
        let file = TokenFile::new(path, file).map_err(failed)?;
        Ok(Index { name, file, header, tokens: 0 })
    }

    /// Compares the ends of the arrays with each other and with a `.bin` of `bytes` bytes.
    ///
    /// # Errors
    /// The field that is wrong.
    pub fn check_ends(&mut self, bin: &str, bytes: u64) -> Result<()> {
        let width = self.header.token_type.bytes() as u64;
        if !bytes.is_multiple_of(width) {
            let message = format!(
                "'{bin}' has {bytes} bytes, no multiple of {width}, but the dtype code of '{}' says tokens of {width} \
                 bytes: is it truncated?",
                self.name
            );
            return Err(Error::io("data", message));
        }
        self.tokens = bytes / width;
        let Header { sequences, boundaries, .. } = self.header;
        let [first] = self.boundaries_at(0)?;
        let [last] = self.boundaries_at(boundaries - 1)?;
        if first != 0 {
            return Err(self.wrong(format!("document index: begins with {first}, not 0")));
        }
        if last != sequences as i64 {
            return Err(self.wrong(format!(
                "document index: ends with {last}, but the sequence count is {sequences}"
            )));
        }
        let end = match sequences.checked_sub(1) {
            None => 0,
            Some(last) => self.sequence(last)?.end,
        };
        if end != self.tokens {
            return Err(self.wrong(format!(
                "sequence offsets: the last sequence ends at byte {}, but '{bin}' has {bytes} bytes: is it truncated, \
                 or of another index?",
                end * width
            )));
        }
        Ok(())
    }

    /// Reads all of it once.
    ///
    /// # Errors
    /// The first field that is wrong, with its place.
    pub fn check(&self) -> Result<()> {
        self.compare_lengths(0..self.header.sequences, |_| {})?;
        let mut before = 0;
        for chunk in chunks(0..self.header.boundaries) {
            let first = chunk.start;
            for (place, boundary) in (first..).zip(self.numbers(self.header.documents(), &chunk)?) {
                self.compare_boundary(place, boundary, before)?;
                before = boundary;
            }
        }
        Ok(())
    }

    /// The lengths of sequences, and the first sequences of the documents that begin behind the first of them. Reads their
    /// part of the index once and compares it.
    ///
    /// # Errors
    /// The first field of this part that is wrong, with its place.
    pub fn part(&self, sequences: Range<u64>) -> Result<(Vec<u32>, Vec<u64>)> {
        let mut lengths = Vec::with_capacity((sequences.end - sequences.start) as usize);
        self.compare_lengths(sequences.clone(), |length| lengths.push(length))?;
        let (mut first, mut behind) = (0, self.header.boundaries);
        while first < behind {
            let middle = first + (behind - first) / 2;
            let [boundary] = self.boundaries_at(middle)?;
            match boundary <= sequences.start as i64 {
                true => first = middle + 1,
                false => behind = middle,
            }
        }
        let (mut boundaries, mut before) = (Vec::new(), sequences.start as i64);
        for chunk in chunks(first..self.header.boundaries) {
            let place = chunk.start;
            for (place, boundary) in (place..).zip(self.numbers(self.header.documents(), &chunk)?) {
                if before >= sequences.end as i64 {
                    return Ok((lengths, boundaries));
                }
                self.compare_boundary(place, boundary, before)?;
                before = boundary;
                if boundary < sequences.end as i64 {
                    boundaries.push(boundary as u64);
                }
            }
        }
        Ok((lengths, boundaries))
    }

    /// Calls `take` with the length of each sequence of a range, and compares them with their offsets.
    fn compare_lengths(&self, sequences: Range<u64>, mut take: impl FnMut(u32)) -> Result<()> {
        let width = self.header.token_type.bytes() as u64;
        let mut tokens = match sequences.is_empty() || sequences.start == 0 {
            true => 0,
            false => self.sequence(sequences.start)?.start,
        };
        let is_last = sequences.end == self.header.sequences;
        for chunk in chunks(sequences) {
            let lengths = self.lengths(chunk.clone())?;
            let offsets = self.numbers(self.header.offsets(), &chunk)?;
            for ((sequence, length), offset) in chunk.zip(lengths).zip(offsets) {
                // Fewer than 2^61 sequences of fewer than 2^31 tokens: only a file that lies can overflow.
                if tokens.checked_mul(width) != u64::try_from(offset).ok() {
                    return Err(self.wrong(format!(
                        "sequence offsets: {offset} for sequence {sequence}, but the lengths before it make {}",
                        u128::from(tokens) * u128::from(width)
                    )));
                }
                tokens = tokens.saturating_add(length.into());
                take(length);
            }
        }
        if tokens > self.tokens || is_last && tokens != self.tokens {
            return Err(self.wrong(format!(
                "sequence lengths: their sum is {tokens}, but the .bin has {} tokens",
                self.tokens
            )));
        }
        Ok(())
    }

    fn compare_boundary(&self, place: u64, boundary: i64, before: i64) -> Result<()> {
        if boundary < before || boundary > self.header.sequences as i64 {
            return Err(self.wrong(format!(
                "document index: entry {place} is {boundary}, not within {before} to {}",
                self.header.sequences
            )));
        }
        Ok(())
    }

    /// The lengths of sequences, which the caller has compared with their number.
    ///
    /// # Errors
    /// A length below 0.
    pub fn lengths(&self, sequences: Range<u64>) -> Result<Vec<u32>> {
        let bytes = self.bytes(
            self.header.lengths() + 4 * sequences.start,
            sequences.end - sequences.start,
            4,
        )?;
        let lengths = bytes.as_chunks::<4>().0.iter().map(|&length| i32::from_le_bytes(length));
        let length = |(sequence, length): (u64, i32)| {
            u32::try_from(length).map_err(|_| {
                self.wrong(format!("sequence lengths: {length} for sequence {sequence}, below 0"))
            })
        };
        (sequences.start..).zip(lengths).map(length).collect()
    }

    /// The tokens of a sequence, within the `.bin`.
    ///
    /// # Errors
    /// A length or an offset that does not fit.
    pub fn sequence(&self, sequence: u64) -> Result<Range<u64>> {
        let width = self.header.token_type.bytes() as i64;
        let length = u64::from(self.lengths(sequence..sequence + 1)?[0]);
        let offset = self.numbers(self.header.offsets(), &(sequence..sequence + 1))?[0];
        let start = match u64::try_from(offset) {
            Ok(_) if offset % width == 0 => (offset / width) as u64,
            _ => {
                return Err(self.wrong(format!(
                    "sequence offsets: {offset} for sequence {sequence}, no multiple of {width} from 0 on"
                )));
            }
        };
        if start + length > self.tokens {
            return Err(self.wrong(format!(
                "sequence lengths and offsets: sequence {sequence} has {length} tokens from byte {offset} on, but the \
                 .bin has {} bytes",
                self.tokens * width as u64
            )));
        }
        Ok(start..start + length)
    }

    /// The error of sequences of which the last one begins before the first.
    pub fn decreasing(&self, sequences: Range<u64>) -> Error {
        self.wrong(format!(
            "sequence offsets: sequence {} begins before sequence {}",
            sequences.end - 1,
            sequences.start
        ))
    }

    /// The sequences of a document.
    ///
    /// # Errors
    /// Boundaries that do not ascend from 0 to the number of sequences.
    pub fn document(&self, document: u64) -> Result<Range<u64>> {
        let [start, end] = self.boundaries_at(document)?;
        match (u64::try_from(start), u64::try_from(end)) {
            (Ok(first), Ok(behind)) if first <= behind && behind <= self.header.sequences => {
                Ok(first..behind)
            }
            _ => Err(self.wrong(format!(
                "document index: document {document} has the sequences {start} to {end} of {}",
                self.header.sequences
            ))),
        }
    }

    /// The first document whose number of sequences is like this, and the number.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn find_document(&self, is_like: impl Fn(i64) -> bool) -> Result<Option<(u64, i64)>> {
        let mut before = 0;
        for chunk in chunks(0..self.header.boundaries) {
            let first = chunk.start;
            for (place, boundary) in (first..).zip(self.numbers(self.header.documents(), &chunk)?) {
                let sequences = boundary.saturating_sub(before);
                if place > 0 && is_like(sequences) {
                    return Ok(Some((place - 1, sequences)));
                }
                before = boundary;
            }
        }
        Ok(None)
    }

    /// The mode of a sequence, in a multimodal file.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn mode(&self, sequence: u64) -> Result<Option<i8>> {
        match self.header.has_modes {
            true => Ok(Some(self.bytes(self.header.modes() + sequence, 1, 1)?[0] as i8)),
            false => Ok(None),
        }
    }

    /// Gives the file descriptor back.
    pub fn close(&mut self) {
        self.file.close();
    }

    fn boundaries_at<const N: usize>(&self, first: u64) -> Result<[i64; N]> {
        let found = self.numbers(self.header.documents(), &(first..first + N as u64))?;
        Ok(found.try_into().expect("as many as were asked for"))
    }

    /// Entries of an array of i64 that begins at byte `array`.
    fn numbers(&self, array: u64, entries: &Range<u64>) -> Result<Vec<i64>> {
        let bytes = self.bytes(array + 8 * entries.start, entries.end - entries.start, 8)?;
        Ok(bytes.as_chunks::<8>().0.iter().map(|&number| i64::from_le_bytes(number)).collect())
    }

    fn bytes(&self, at: u64, count: u64, width: u64) -> Result<Vec<u8>> {
        let mut bytes = vec![0; (count * width) as usize];
        self.file.read_exact_at(&mut bytes, at).map_err(|error| {
            let why = match error.kind() {
                std::io::ErrorKind::UnexpectedEof => {
                    "it has become shorter since it was opened".to_string()
                }
                _ => error.to_string(),
            };
            Error::io("data", format!("cannot read '{}': {why}", self.name))
        })?;
        Ok(bytes)
    }

    fn wrong(&self, why: String) -> Error {
        wrong(&self.name, &why)
    }
}

fn wrong(name: &str, why: &str) -> Error {
    let remedy = "write the pair of .idx and .bin anew, or copy both again";
    Error::io("data", format!("'{name}' is no index of Megatron, or is damaged: {why}; {remedy}"))
}

/// A range in ranges of at most [`CHUNK`].
fn chunks(entries: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let end = entries.end;
    entries.step_by(CHUNK as usize).map(move |start| start..end.min(start + CHUNK))
}
