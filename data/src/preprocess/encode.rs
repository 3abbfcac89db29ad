//! Turns a batch into tokens: the work of a worker.

use super::config::{AREA, SequenceLevel};
use super::cut::PIECE;
use super::cutter::Cutter;
use super::json_line::json_texts;
use super::reader::{InputBatch, Payload};
use crate::documents::sentences;
use ferrotron_tensor::{Error, Result};

/// The remedy of a line that is broken.
const SKIP: &str = "; --skip-broken-lines leaves such lines out";

/// The state that all workers share.
pub struct Encoder {
    pub cut: Cutter,
    pub keys: Vec<String>,
    pub sequence_level: SequenceLevel,
    pub skip_broken_lines: bool,
}

/// The tokens of a batch, for each key, or the next part of them.
pub struct Encoded {
    pub columns: Vec<Tokens>,
    /// At the end of the batch, the number of lines and rows that were skipped.
    pub end: Option<u64>,
}

/// Tokens of a column that are given on before the batch ends, so that long documents take little memory.
const PART: usize = 1 << 18;

/// The tokens of a batch so far, and who takes them part by part.
struct Output<'a> {
    columns: Vec<Tokens>,
    skipped: u64,
    give: &'a mut dyn FnMut(Encoded) -> bool,
}

impl Output<'_> {
    /// Gives the tokens on, if they are many.
    ///
    /// # Errors
    /// Nobody takes them any more.
    fn give_if_many(&mut self) -> Result<()> {
        if self.columns.iter().all(|column| column.tokens.len() < PART) {
            return Ok(());
        }
        let columns = self.columns.iter_mut().map(std::mem::take).collect();
        match (self.give)(Encoded { columns, end: None }) {
            true => Ok(()),
            false => Err(Error::io(AREA, "stopped")),
        }
    }
}

/// Tokens, and where sequences and documents end. Tokens behind the last end belong to a document that goes on.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Tokens {
    pub tokens: Vec<u32>,
    pub ends: Vec<End>,
}

/// An end behind so many tokens of the batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The end of a sentence.
    Sequence(usize),
    /// The end of a document, if it has a token.
    Paragraph(usize),
    /// The end of a document.
    Document(usize),
}

impl Encoder {
    /// Encodes a batch: `give` gets its tokens, in one part or several. A false answer ends the call.
    ///
    /// # Errors
    /// A broken line or row, with the file and its number, unless they are skipped; as [`Tokenizer::encode`].
    pub fn encode(&self, batch: &InputBatch, give: &mut dyn FnMut(Encoded) -> bool) -> Result<()> {
        let outputs = match self.sequence_level {
            SequenceLevel::PromptAndCompletion => 1,
            SequenceLevel::Document | SequenceLevel::Sentence => self.keys.len(),
        };
        let columns = (0..outputs).map(|_| Tokens::default()).collect();
        let mut output = Output { columns, skipped: 0, give };
        match &batch.payload {
            Payload::Lines(lines) => self.lines(batch, lines, &mut output)?,
            Payload::Rows(columns) => self.rows(batch, columns, &mut output)?,
            Payload::Text { piece, at_end } => {
                let in_text = |error: Error| {
                    let message = format!(
                        "'{}', from byte {} on: {}",
                        batch.name,
                        batch.first,
                        error.context()
                    );
                    Error::new(error.kind(), AREA, message)
                };
                let too_long = self.cut.too_long(piece, self.sequence_level);
                if let Some(why) = too_long.map_err(in_text)? {
                    return Err(in_text(Error::io(AREA, why)));
                }
                let in_sentences = self.sequence_level == SequenceLevel::Sentence;
                match in_sentences {
                    true => self.paragraphs(piece, &mut output),
                    false => self.text(piece, 0, &mut output),
                }
                .map_err(in_text)?;
                let tokens = &mut output.columns[0];
                let end = tokens.tokens.len();
                match (at_end, in_sentences) {
                    (false, _) => {}
                    (true, true) => tokens.ends.push(End::Paragraph(end)),
                    (true, false) => tokens.ends.push(End::Document(end)),
                }
            }
        }
        let Output { columns, skipped, give } = output;
        give(Encoded { columns, end: Some(skipped) });
        Ok(())
    }

    fn lines(&self, batch: &InputBatch, lines: &[u8], output: &mut Output) -> Result<()> {
        let mut number = batch.first;
        for line in lines.split(|&byte| byte == b'\n') {
            number += 1;
            let added = match json_texts(line, number, &self.keys) {
                Ok(None) => continue,
                Ok(Some(texts)) => self.texts(&texts, output),
                Err(why) => Ok(Some(why)),
            };
            self.count(added, (batch, "line", number), output)?;
        }
        Ok(())
    }

    fn rows(
        &self,
        batch: &InputBatch,
        columns: &[Vec<Option<Vec<u8>>>],
        output: &mut Output,
    ) -> Result<()> {
        for row in 0..columns[0].len() {
            let number = batch.first + row as u64 + 1;
            let added = match row_texts(columns, row, &self.keys) {
                Ok(texts) => self.texts(&texts, output),
                Err(why) => Ok(Some(why)),
            };
            self.count(added, (batch, "row", number), output)?;
        }
        Ok(())
    }

    /// Appends the texts of a line or row. Returns why nothing was appended, if they are broken.
    fn texts<T: AsRef<str>>(&self, texts: &[T], output: &mut Output) -> Result<Option<String>> {
        for text in texts {
            if let Some(why) = self.cut.too_long(text.as_ref(), self.sequence_level)? {
                return Ok(Some(why));
            }
        }
        if self.sequence_level != SequenceLevel::PromptAndCompletion {
            let mut columns = texts.iter().enumerate();
            return columns
                .try_for_each(|(column, text)| self.document(text.as_ref(), column, output))
                .map(|()| None);
        }
        self.pair(texts, output)
    }

    /// Appends a prompt and its completion. Returns why nothing was appended, if one of them is empty.
    fn pair<T: AsRef<str>>(&self, texts: &[T], output: &mut Output) -> Result<Option<String>> {
        let is_long = texts.iter().map(|text| text.as_ref().len()).sum::<usize>() > PIECE;
        let empty = |key: &String| Ok(Some(format!("the value of '{key}' is empty")));
        for (text, key) in texts.iter().zip(&self.keys) {
            let text = text.as_ref();
            // The tokens of a long prompt are given on before its completion is encoded.
            if text.trim().is_empty() || is_long && !self.cut.has_token(text)? {
                return empty(key);
            }
        }
        let out = &output.columns[0];
        let (tokens, ends) = (out.tokens.len(), out.ends.len());
        for ((text, key), end) in texts.iter().zip(&self.keys).zip([End::Sequence, End::Document]) {
            let before = output.columns[0].tokens.len();
            if is_long {
                self.text(text.as_ref(), 0, output)?;
            } else {
                self.cut.encode(text.as_ref(), |part| {
                    output.columns[0].tokens.extend_from_slice(part);
                    Ok(())
                })?;
            }
            let out = &mut output.columns[0];
            if !is_long && out.tokens.len() == before {
                out.tokens.truncate(tokens);
                out.ends.truncate(ends);
                return empty(key);
            }
            out.ends.push(end(out.tokens.len()));
        }
        output.give_if_many()?;
        Ok(None)
    }

    /// Counts a broken line or row as skipped, or refuses it.
    fn count(
        &self,
        added: Result<Option<String>>,
        (batch, what, number): (&InputBatch, &str, u64),
        output: &mut Output,
    ) -> Result<()> {
        match added.map_err(|error| broken(batch, what, number, error.context()))? {
            None => Ok(()),
            Some(_) if self.skip_broken_lines => {
                output.skipped += 1;
                Ok(())
            }
            Some(why) => Err(broken(batch, what, number, &(why + SKIP))),
        }
    }

    /// Appends a whole document.
    fn document(&self, text: &str, column: usize, output: &mut Output) -> Result<()> {
        match self.sequence_level {
            SequenceLevel::Sentence => {
                text.lines().try_for_each(|line| self.sentences(line, column, output))?;
            }
            _ => self.text(text, column, output)?,
        }
        let out = &mut output.columns[column];
        out.ends.push(End::Document(out.tokens.len()));
        Ok(())
    }

    /// Appends documents that blank lines separate.
    fn paragraphs(&self, text: &str, output: &mut Output) -> Result<()> {
        for line in text.lines() {
            if line.trim().is_empty() {
                let out = &mut output.columns[0];
                out.ends.push(End::Paragraph(out.tokens.len()));
            }
            self.sentences(line, 0, output)?;
        }
        Ok(())
    }

    fn sentences(&self, line: &str, column: usize, output: &mut Output) -> Result<()> {
        for sentence in sentences(line) {
            self.text(sentence, column, output)?;
            let out = &mut output.columns[column];
            out.ends.push(End::Sequence(out.tokens.len()));
        }
        Ok(())
    }

    /// Appends the tokens of a text.
    fn text(&self, text: &str, column: usize, output: &mut Output) -> Result<()> {
        self.cut.encode(text, |tokens| {
            output.columns[column].tokens.extend_from_slice(tokens);
            output.give_if_many()
        })
    }
}

/// The strings of a row, one of each column. Errors with the reason.
pub fn row_texts<'a>(
    columns: &'a [Vec<Option<Vec<u8>>>],
    row: usize,
    keys: &[String],
) -> std::result::Result<Vec<&'a str>, String> {
    let text = |(column, key): (&'a Vec<Option<Vec<u8>>>, &String)| match column[row]
        .as_deref()
        .map(std::str::from_utf8)
    {
        Some(Ok(text)) => Ok(text),
        Some(Err(error)) => Err(format!("'{key}' is not UTF-8: {error}")),
        None => Err(format!("'{key}' is null")),
    };
    columns.iter().zip(keys).map(text).collect()
}

fn broken(batch: &InputBatch, what: &str, number: u64, why: &str) -> Error {
    Error::io(AREA, format!("'{}', {what} {number}: {why}", batch.name))
}
