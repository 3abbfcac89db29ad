//! Turns a batch into tokens: the work of a worker.

use super::config::AREA;
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
    pub split_sentences: bool,
    pub skip_broken_lines: bool,
}

/// The tokens of a batch, for each key.
pub struct Encoded {
    pub columns: Vec<Tokens>,
    /// Lines and rows that were skipped.
    pub skipped: u64,
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
    /// Encodes a batch.
    ///
    /// # Errors
    /// A broken line or row, with the file and its number, unless they are skipped; as [`Tokenizer::encode`].
    pub fn encode(&self, batch: &InputBatch) -> Result<Encoded> {
        let columns = self.keys.iter().map(|_| Tokens::default()).collect();
        let mut encoded = Encoded { columns, skipped: 0 };
        match &batch.payload {
            Payload::Lines(lines) => self.lines(batch, lines, &mut encoded)?,
            Payload::Rows(columns) => self.rows(batch, columns, &mut encoded)?,
            Payload::Text { piece, at_end } => {
                let tokens = &mut encoded.columns[0];
                let in_text = |error: Error| {
                    let message = format!(
                        "'{}', from byte {} on: {}",
                        batch.name,
                        batch.first,
                        error.context()
                    );
                    Error::new(error.kind(), AREA, message)
                };
                match self.split_sentences {
                    true => self.paragraphs(piece, tokens),
                    false => self.text(piece, &mut tokens.tokens),
                }
                .map_err(in_text)?;
                let end = tokens.tokens.len();
                match (at_end, self.split_sentences) {
                    (false, _) => {}
                    (true, true) => tokens.ends.push(End::Paragraph(end)),
                    (true, false) => tokens.ends.push(End::Document(end)),
                }
            }
        }
        Ok(encoded)
    }

    fn lines(&self, batch: &InputBatch, lines: &[u8], encoded: &mut Encoded) -> Result<()> {
        let mut number = batch.first;
        for line in lines.split(|&byte| byte == b'\n') {
            number += 1;
            match json_texts(line, number, &self.keys) {
                Ok(None) => {}
                Ok(Some(texts)) => {
                    for (text, tokens) in texts.iter().zip(&mut encoded.columns) {
                        self.document(text, tokens)
                            .map_err(|error| broken(batch, "line", number, error.context()))?;
                    }
                }
                Err(_) if self.skip_broken_lines => encoded.skipped += 1,
                Err(why) => return Err(broken(batch, "line", number, &(why + SKIP))),
            }
        }
        Ok(())
    }

    fn rows(
        &self,
        batch: &InputBatch,
        columns: &[Vec<Option<Vec<u8>>>],
        encoded: &mut Encoded,
    ) -> Result<()> {
        for row in 0..columns[0].len() {
            let number = batch.first + row as u64 + 1;
            match row_texts(columns, row, &self.keys) {
                Ok(texts) => {
                    for (text, tokens) in texts.into_iter().zip(&mut encoded.columns) {
                        self.document(text, tokens)
                            .map_err(|error| broken(batch, "row", number, error.context()))?;
                    }
                }
                Err(_) if self.skip_broken_lines => encoded.skipped += 1,
                Err(why) => return Err(broken(batch, "row", number, &(why + SKIP))),
            }
        }
        Ok(())
    }

    /// Appends a whole document.
    fn document(&self, text: &str, out: &mut Tokens) -> Result<()> {
        match self.split_sentences {
            true => text.lines().try_for_each(|line| self.sentences(line, out))?,
            false => self.text(text, &mut out.tokens)?,
        }
        out.ends.push(End::Document(out.tokens.len()));
        Ok(())
    }

    /// Appends documents that blank lines separate.
    fn paragraphs(&self, text: &str, out: &mut Tokens) -> Result<()> {
        for line in text.lines() {
            if line.trim().is_empty() {
                out.ends.push(End::Paragraph(out.tokens.len()));
            }
            self.sentences(line, out)?;
        }
        Ok(())
    }

    fn sentences(&self, line: &str, out: &mut Tokens) -> Result<()> {
        for sentence in sentences(line) {
            self.text(sentence, &mut out.tokens)?;
            out.ends.push(End::Sequence(out.tokens.len()));
        }
        Ok(())
    }

    /// Appends the tokens of a text, which is cut into pieces if it is long.
    fn text(&self, mut text: &str, out: &mut Vec<u32>) -> Result<()> {
        while let Some(cut) = self.cut.find(text, PIECE) {
            out.extend(self.tokenizer.encode(&text[..cut.start])?);
            text = &text[cut.end..];
        }
        out.extend(self.tokenizer.encode(text)?);
        Ok(())
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
    let object = serde_json::from_slice::<Map<String, Value>>(line).map_err(|error| {
        let why = error.to_string();
        let why = why.rsplit_once(" at line ").map_or(why.as_str(), |(why, _)| why);
        format!("no JSON object: {why}, column {}", error.column())
    })?;
    let text = |key: &String| match object.get(key) {
        Some(Value::String(text)) => Ok(text.clone()),
        Some(other) => Err(format!("the value of '{key}' is no string, but {}", kind(other))),
        None => Err(format!("no key '{key}'; it has {}", names(&object))),
    };
    keys.iter().map(text).collect::<std::result::Result<_, _>>().map(Some)
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
