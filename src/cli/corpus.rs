//! The data of a command: what `--data` names, or the corpus that the program carries, its own documentation.

use ferrotron::models::data::{DataConfig, Dataset, Documents, TokenSource, holds_pairs};
use ferrotron::models::tokenizer::Tokenizer;
use ferrotron::{Error, Result};
use std::ffi::OsStr;
use std::path::Path;

/// Extensions of files of documents, which `ferrotron tokenize` reads.
const DOCUMENTS: [&str; 6] = ["jsonl", "ndjson", "json", "parquet", "gz", "zst"];

/// Bytes of text from which on token files are recommended.
const LARGE_TEXT: u64 = 100_000_000;

/// Opens what `config` names, or else the program's own corpus. Empty files are left out, which `warn` is told.
pub fn open(config: &DataConfig, tokenizer: &Tokenizer, warn: impl Fn(&str)) -> Result<Dataset> {
    if config.data.is_empty() {
        return Dataset::from_text(&text(), tokenizer, config.split);
    }
    warn_of_documents(config, &warn);
    warn_of_large_texts(config, tokenizer, &warn)?;
    let dataset = Dataset::open(config, tokenizer)?;
    warn_of_empty_files(config, warn)?;
    Ok(dataset)
}

/// Opens what `config` names, and its validation sets as a stream each. Empty files are left out, which `warn` is told.
pub fn open_with_sets(
    config: &DataConfig,
    tokenizer: &Tokenizer,
    warn: impl Fn(&str),
) -> Result<(Dataset, Vec<TokenSource>)> {
    warn_of_documents(config, &warn);
    warn_of_large_texts(config, tokenizer, &warn)?;
    let opened = Dataset::open_with_sets(config, tokenizer)?;
    warn_of_empty_files(config, warn)?;
    Ok(opened)
}

/// Opens the same data as documents, for training and for validation.
pub fn open_documents(
    config: &DataConfig,
    tokenizer: &Tokenizer,
    warn: impl Fn(&str),
) -> Result<(Documents, Option<Documents>)> {
    if config.data.is_empty() {
        return Documents::from_text(&text(), tokenizer)?.split(config.split);
    }
    warn_of_documents(config, &warn);
    warn_of_large_texts(config, tokenizer, &warn)?;
    let documents = Documents::open(config, tokenizer)?;
    warn_of_empty_files(config, warn)?;
    Ok(documents)
}

/// Opens what `config` names as documents, for training and for validation, and its validation sets by themselves.
pub fn open_documents_with_sets(
    config: &DataConfig,
    tokenizer: &Tokenizer,
    warn: impl Fn(&str),
) -> Result<(Documents, Documents, Vec<Documents>)> {
    warn_of_documents(config, &warn);
    warn_of_large_texts(config, tokenizer, &warn)?;
    let opened = Documents::open_with_sets(config, tokenizer)?;
    warn_of_empty_files(config, warn)?;
    Ok(opened)
}

/// Tells `warn` of the data sets of prompts and completions among `paths`, which are about to be read as one stream.
pub fn warn_of_pairs<'a>(paths: impl Iterator<Item = &'a Path>, warn: impl Fn(&str)) {
    for path in paths.filter(|path| holds_pairs(path) == Some(true)) {
        warn(&format!(
            "warning: '{}' has prompts and completions, which are read as one stream: with --data-path, --packing first-fit \
             packs them and counts completions alone",
            path.display()
        ));
    }
}

/// Tells `warn` of files of documents, which are about to be read as plain text.
fn warn_of_documents(config: &DataConfig, warn: impl Fn(&str)) {
    let is_known = |end: &OsStr| DOCUMENTS.iter().any(|known| end.eq_ignore_ascii_case(known));
    let named = config.data.iter().chain(&config.validation_data);
    for path in named.filter(|path| path.is_file() && path.extension().is_some_and(is_known)) {
        let path = path.display();
        warn(&format!(
            "warning: '{path}' is read as plain text: ferrotron tokenize --input {path} makes token files of its documents"
        ));
    }
}

/// Tells `warn` of much text, which each rank is about to tokenize in memory. Bytes are read in place.
fn warn_of_large_texts(
    config: &DataConfig,
    tokenizer: &Tokenizer,
    warn: impl Fn(&str),
) -> Result<()> {
    let bytes = match tokenizer {
        Tokenizer::Byte => 0,
        _ => config.text_bytes()?,
    };
    if bytes > LARGE_TEXT {
        warn(&format!(
            "warning: each rank tokenizes {} MB of text and keeps the tokens in memory: ferrotron tokenize makes token files, \
             which are read in place",
            bytes / 1_000_000
        ));
    }
    Ok(())
}

fn warn_of_empty_files(config: &DataConfig, warn: impl Fn(&str)) -> Result<()> {
    let empty = config.empty_files()?;
    if !empty.is_empty() {
        let names: Vec<String> = empty.iter().map(|file| format!("'{}'", file.display())).collect();
        warn(&format!("warning: left out, for they are empty: {}", names.join(", ")));
    }
    Ok(())
}

/// The error of a resumed run whose tokenizer cannot encode the text of this version of the program.
pub fn not_encoded(error: &Error) -> Error {
    let message = format!(
        "the run was started with the built-in corpus of another version of the program: {error}; resume it with that \
         version, or go on with files by --data and --allow-data-change"
    );
    Error::config("data", message)
}

/// Everything that is read when `--data` is not given.
///
/// These pages and no others: a page more would be other data, with which every loss that the documentation
/// prints (README, `docs/loss.svg`) would have to be measured again.
pub fn text() -> String {
    [
        include_str!("../../README.md"),
        include_str!("../../ARCHITECTURE.md"),
        include_str!("../../CONTRIBUTING.md"),
        include_str!("../../docs/custom-op.md"),
        include_str!("../../docs/data.md"),
        include_str!("../../docs/memory.md"),
        include_str!("../../docs/numerics.md"),
        include_str!("../../docs/parallelism.md"),
        include_str!("../../docs/command-line.md"),
    ]
    .concat()
}
