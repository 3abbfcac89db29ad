//! Reads whole documents into memory, for sets that are small.

use super::config::AREA;
use super::cut::CutRule;
use super::encode::row_texts;
use super::input::find;
use super::json_line::json_texts;
use super::reader::{InputBatch, Payload, Position, Reader};
use ferrotron_tensor::{Error, Result};
use std::path::PathBuf;

/// Reads the documents of files and folders: the strings under `key` of JSON lines and Parquet, and each text as one.
///
/// # Errors
/// A file that cannot be read; a broken line or row, with the file and its number; text that is not UTF-8.
pub fn read_documents(inputs: &[PathBuf], key: &str) -> Result<Vec<String>> {
    let read = || {
        let keys = vec![key.to_string()];
        let sources = find(inputs)?.0;
        let mut reader = Reader::new(
            sources.into(),
            keys.clone(),
            (CutRule::Nowhere, usize::MAX),
            Position::default(),
        );
        let mut documents = Vec::new();
        while let Some(batch) = reader.next_batch()? {
            append(&batch, &keys, &mut documents)?;
        }
        Ok(documents)
    };
    // The errors name an option of another command.
    read().map_err(|error: Error| {
        let context = error.context();
        let context = context.strip_prefix("--input: ").unwrap_or(context);
        Error::new(error.kind(), "documents", context.to_string())
    })
}

fn append(batch: &InputBatch, keys: &[String], documents: &mut Vec<String>) -> Result<()> {
    let broken = |what: &str, number: u64, why: &str| {
        Error::io(AREA, format!("'{}', {what} {number}: {why}", batch.name))
    };
    match &batch.payload {
        Payload::Lines(lines) => {
            for (line, number) in lines.split(|&byte| byte == b'\n').zip(batch.first + 1..) {
                match json_texts(line, number, keys) {
                    Ok(Some(mut texts)) => documents.append(&mut texts),
                    Ok(None) => {}
                    Err(why) => return Err(broken("line", number, &why)),
                }
            }
        }
        Payload::Rows(columns) => {
            for (row, number) in (0..columns[0].len()).zip(batch.first + 1..) {
                let texts = row_texts(columns, row, keys);
                let texts = texts.map_err(|why| broken("row", number, &why))?;
                documents.extend(texts.into_iter().map(String::from));
            }
        }
        // One that is cut nowhere is read whole.
        Payload::Text { piece, .. } => documents.push(piece.clone()),
    }
    Ok(())
}
