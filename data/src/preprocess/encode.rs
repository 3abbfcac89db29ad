//! Turns a batch into tokens: the work of a worker.

use super::config::{AREA, SequenceLevel};
use super::cut::{CutRule, PIECE};
use super::reader::{InputBatch, Payload};
use crate::documents::sentences;
use crate::tokenizer::Tokenizer;
use ferrotron_tensor::{Error, Result};
use serde_json::{Map, Value};

/// The remedy of a line that is broken.
const SKIP: &str = "; --skip-broken-lines leaves such lines out";

/// The state that all workers share.
pub struct Encoder {
    pub tokenizer: Tokenizer,
    pub cut: CutRule,
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
        if self.sequence_level != SequenceLevel::PromptAndCompletion {
            let mut columns = texts.iter().enumerate();
            return columns
                .try_for_each(|(column, text)| self.document(text.as_ref(), column, output))
                .map(|()| None);
        }
        let out = &mut output.columns[0];
        let start = out.tokens.len();
        let mut ends = [start; 2];
        for ((text, key), place) in texts.iter().zip(&self.keys).zip(0..) {
            let before = out.tokens.len();
            self.pieces(text.as_ref(), |tokens| {
                out.tokens.extend_from_slice(tokens);
                Ok(())
            })?;
            ends[place] = out.tokens.len();
            if text.as_ref().trim().is_empty() || ends[place] == before {
                out.tokens.truncate(start);
                return Ok(Some(format!("the value of '{key}' is empty")));
            }
        }
        out.ends.extend([End::Sequence(ends[0]), End::Document(ends[1])]);
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
        self.pieces(text, |tokens| {
            output.columns[column].tokens.extend_from_slice(tokens);
            output.give_if_many()
        })
    }

    /// Calls `take` with the tokens of a text, part by part. A long text is cut into pieces.
    fn pieces(&self, mut text: &str, mut take: impl FnMut(&[u32]) -> Result<()>) -> Result<()> {
        while let Some(cut) = self.cut.find(text, PIECE) {
            self.tokenizer.encode_parts(&text[..cut.start], &mut take)?;
            text = &text[cut.end..];
        }
        self.tokenizer.encode_parts(text, &mut take)
    }
}

/// The strings under `keys` of the JSON object in a line; none if the line is blank. Errors with the reason.
pub fn json_texts(
    line: &[u8],
    number: u64,
    keys: &[String],
) -> std::result::Result<Option<Vec<String>>, String> {
    let line = match number {
        1 => line.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(line),
        _ => line,
    };
    if line.trim_ascii().is_empty() {
        return Ok(None);
    }
    let mut object = serde_json::from_slice::<Map<String, Value>>(line).map_err(|error| {
        let why = error.to_string();
        let why = why.rsplit_once(" at line ").map_or(why.as_str(), |(why, _)| why);
        format!("no JSON object: {why}, column {}", error.column())
    })?;
    for key in keys {
        match object.get(key) {
            Some(Value::String(_)) => {}
            Some(other) => {
                return Err(format!("the value of '{key}' is no string, but {}", kind(other)));
            }
            None => return Err(format!("no key '{key}'; it has {}", names(&object))),
        }
    }
    let text = |key: &String| match object.remove(key) {
        Some(Value::String(text)) => text,
        _ => String::new(),
    };
    Ok(Some(keys.iter().map(text).collect()))
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

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// The first keys of an object, for messages.
fn names(object: &Map<String, Value>) -> String {
    let names: Vec<String> = object.keys().take(8).map(|key| format!("'{key}'")).collect();
    match names.is_empty() {
        true => "none".to_string(),
        false => names.join(", "),
    }
}
