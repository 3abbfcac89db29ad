//! Reads the inputs in batches of whole lines, rows or pieces of text.

use super::compressed;
use super::config::{AREA, BATCH, MAX_DOCUMENT};
use super::cut::CutRule;
use super::input::{Content, Source};
use super::parquet_rows::{Columns, ParquetRows};
use ferrotron_tensor::{Error, Result};
use serde::{Deserialize, Serialize};
use std::io::{self, Read};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// The progress of the inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Position {
    /// The number of the source.
    pub source: usize,
    /// Bytes of it, decompressed, or rows.
    pub offset: u64,
    /// Lines or rows of it.
    pub line: u64,
}

/// Some of the input.
pub struct InputBatch {
    /// The source, for messages.
    pub name: Arc<str>,
    pub payload: Payload,
    /// The first line or row, counted from 0, or the first byte of a text.
    pub first: u64,
    /// The position behind it.
    pub next: Position,
    /// Bytes of all files that are read up to here.
    pub read: u64,
}

pub enum Payload {
    /// Whole lines of JSON.
    Lines(Vec<u8>),
    /// Rows of Parquet.
    Rows(Columns),
    /// A piece of a text, and whether the text ends with it.
    Text { piece: String, at_end: bool },
}

impl Payload {
    /// Bytes in memory.
    pub fn bytes(&self) -> usize {
        match self {
            Payload::Lines(lines) => lines.len(),
            Payload::Rows(columns) => columns.iter().flatten().flatten().map(Vec::len).sum(),
            Payload::Text { piece, .. } => piece.len(),
        }
    }
}

/// Reads the sources one after another.
pub struct Reader {
    sources: Arc<[Source]>,
    keys: Vec<String>,
    cut: CutRule,
    /// The most bytes of Parquet pages in memory.
    pages: usize,
    at: Position,
    open: Option<Open>,
    /// Bytes of the files in front of the open one, and those read of it.
    before: u64,
    count: Arc<AtomicU64>,
}

enum Open {
    Stream(Content, Stream),
    Rows(ParquetRows),
}

impl Reader {
    /// Reads from `at` on. `cut` says where a text may be cut, and `pages` how many bytes of Parquet pages may be in memory.
    pub fn new(
        sources: Arc<[Source]>,
        keys: Vec<String>,
        (cut, pages): (CutRule, usize),
        at: Position,
    ) -> Reader {
        let before = sources[..at.source].iter().map(|source| source.bytes).sum();
        Reader { sources, keys, cut, pages, at, open: None, before, count: Arc::default() }
    }

    /// The next batch; none at the end of the last source.
    ///
    /// # Errors
    /// A file that cannot be read or decompressed; text that is not UTF-8; a document that is too large.
    pub fn next_batch(&mut self) -> Result<Option<InputBatch>> {
        while let Some(source) = self.sources.get(self.at.source) {
            let name = source.name();
            let open = match self.open.take() {
                Some(open) => open,
                None => self.open_source(source, &name)?,
            };
            let open = self.open.insert(open);
            let read = match open {
                Open::Stream(Content::JsonLines, stream) => {
                    stream.lines(&name)?.map(|lines| (Payload::Lines(lines), stream.taken))
                }
                Open::Stream(_, stream) => stream
                    .text(&name, self.cut)?
                    .map(|(piece, at_end)| (Payload::Text { piece, at_end }, stream.taken)),
                Open::Rows(rows) => {
                    rows.read(&name)?.map(|columns| (Payload::Rows(columns), rows.at()))
                }
            };
            let Some((payload, offset)) = read else {
                self.before += source.bytes;
                self.count.store(0, Relaxed);
                self.at = Position { source: self.at.source + 1, offset: 0, line: 0 };
                self.open = None;
                continue;
            };
            let first = match payload {
                Payload::Text { .. } => self.at.offset,
                _ => self.at.line,
            };
            let lines = match &payload {
                Payload::Lines(lines) => lines.iter().filter(|&&byte| byte == b'\n').count() as u64,
                Payload::Rows(columns) => columns[0].len() as u64,
                // One, behind its end.
                Payload::Text { at_end, .. } => (*at_end).into(),
            };
            self.at = Position { offset, line: self.at.line + lines, ..self.at };
            if let Open::Rows(rows) = open {
                self.count.store(rows.bytes(source.bytes), Relaxed);
            }
            let read = self.before + self.count.load(Relaxed).min(source.bytes);
            return Ok(Some(InputBatch { name: name.into(), payload, first, next: self.at, read }));
        }
        Ok(None)
    }

    /// Opens a source at the position.
    fn open_source(&self, source: &Source, name: &str) -> Result<Open> {
        let (content, compression) = source.kind();
        if content == Content::Parquet {
            return ParquetRows::open(&source.path, name, &self.keys, self.at.offset, self.pages)
                .map(Open::Rows);
        }
        if content == Content::Text && self.keys.len() > 1 {
            let message = format!(
                "'{name}' is plain text, which has no {}: give one key, or JSON lines",
                self.keys.join(" and ")
            );
            return Err(Error::config(AREA, format!("--json-keys: {message}")));
        }
        let input = compressed::open(&source.path, compression, self.count.clone());
        let mut input = input.map_err(|error| unreadable(name, &error))?;
        let skipped = io::copy(&mut (&mut input).take(self.at.offset), &mut io::sink());
        match skipped.map_err(|error| unreadable(name, &error))? {
            skipped if skipped == self.at.offset => {}
            skipped => {
                let message = format!("it has {skipped} bytes, less than the journal says");
                return Err(Error::io(AREA, format!("cannot read '{name}': {message}")));
            }
        }
        let is_done = content == Content::Text && self.at.line > 0;
        let (buffer, taken) = (Vec::new(), self.at.offset);
        let stream = Stream { input, buffer, is_ended: false, is_done, taken };
        Ok(Open::Stream(content, stream))
    }
}

/// A stream of bytes, cut into batches.
struct Stream {
    input: Box<dyn Read + Send>,
    buffer: Vec<u8>,
    is_ended: bool,
    /// Whether the last piece of a text is given out, which may be empty.
    is_done: bool,
    /// Bytes given out.
    taken: u64,
}

impl Stream {
    /// Reads until the buffer has so many bytes, or the stream ends.
    fn fill(&mut self, bytes: usize, name: &str) -> Result<()> {
        while !self.is_ended && self.buffer.len() < bytes {
            let missing = (bytes - self.buffer.len()) as u64;
            // No more than that: half of a large buffer would be empty.
            self.buffer.reserve_exact(missing as usize);
            let read = (&mut self.input).take(missing).read_to_end(&mut self.buffer);
            self.is_ended = read.map_err(|error| unreadable(name, &error))? == 0;
        }
        Ok(())
    }

    fn take(&mut self, bytes: usize) -> Vec<u8> {
        let rest = self.buffer[bytes..].to_vec();
        let mut taken = std::mem::replace(&mut self.buffer, rest);
        taken.truncate(bytes);
        self.taken += bytes as u64;
        taken
    }

    /// Whole lines, about a batch of them.
    fn lines(&mut self, name: &str) -> Result<Option<Vec<u8>>> {
        let mut searched = 0;
        loop {
            // One more, for the line break behind the longest line.
            self.fill((searched.max(BATCH / 2) * 2).min(MAX_DOCUMENT + 1), name)?;
            let line_break = self.buffer[searched..].iter().rposition(|&byte| byte == b'\n');
            if let Some(at) = line_break {
                return Ok(Some(self.take(searched + at + 1)));
            }
            searched = self.buffer.len();
            if searched > MAX_DOCUMENT {
                let message = format!(
                    "'{name}': a line has more than {MAX_DOCUMENT} bytes: give shorter documents, or plain text"
                );
                return Err(Error::io(AREA, message));
            }
            if self.is_ended {
                return Ok((searched > 0).then(|| self.take(searched)));
            }
        }
    }

    /// A piece of text, and whether it is the last one.
    fn text(&mut self, name: &str, cut: CutRule) -> Result<Option<(String, bool)>> {
        if self.is_done {
            return Ok(None);
        }
        let mut wanted = BATCH;
        loop {
            // One more, so that the last piece is known to be the last.
            self.fill(wanted + 1, name)?;
            let valid = match std::str::from_utf8(&self.buffer) {
                Ok(_) => self.buffer.len(),
                Err(error) if error.error_len().is_none() && !self.is_ended => error.valid_up_to(),
                Err(error) => {
                    let at = self.taken + error.valid_up_to() as u64;
                    let message = format!(
                        "'{name}' is not UTF-8: byte {at}; convert it, as by `iconv -t UTF-8`"
                    );
                    return Err(Error::io(AREA, message));
                }
            };
            let text = std::str::from_utf8(&self.buffer[..valid]).expect("it is valid up to there");
            let found = cut.find(text, BATCH);
            if found.is_none() && !self.is_ended && wanted >= MAX_DOCUMENT {
                let message = match cut {
                    CutRule::Nowhere => format!(
                        "'{name}' has more than {MAX_DOCUMENT} bytes, and this tokenizer has no rule by which a text \
                         can be cut: give JSON lines of shorter documents"
                    ),
                    _ => format!(
                        "'{name}': {MAX_DOCUMENT} bytes without a place to cut the text, such as a space between two \
                         letters: give JSON lines of shorter documents"
                    ),
                };
                return Err(Error::io(AREA, message));
            }
            let cut = match found {
                Some(cut) => cut,
                None if self.is_ended => valid..valid,
                None => {
                    wanted *= 2;
                    continue;
                }
            };
            let is_first = self.taken == 0;
            let at_end = self.is_ended && cut.end == self.buffer.len();
            self.is_done = at_end;
            let mut piece =
                String::from_utf8(self.take(cut.end)).expect("it is a prefix of valid text");
            piece.truncate(cut.start);
            if is_first && let Some(rest) = piece.strip_prefix('\u{FEFF}') {
                piece = rest.to_string();
            }
            return Ok(Some((piece, at_end)));
        }
    }
}

pub fn unreadable(name: &str, error: &io::Error) -> Error {
    let is_cut = error.kind() == io::ErrorKind::UnexpectedEof;
    let why = if is_cut { "it is truncated".to_string() } else { error.to_string() };
    Error::io(AREA, format!("cannot read '{name}': {why}"))
}
