//! One call: from the sources to the named files, or to a journal.

use super::config::{self, AREA, PreprocessConfig, SequenceLevel, TokenFormat};
use super::cut::CutRule;
use super::cutter::Cutter;
use super::encode::Encoder;
use super::fingerprint::{self, PreprocessFingerprint};
use super::input::{self, Source};
use super::journal::{self, Journal};
use super::output::{self, OutputCounts, TokenOutput};
use super::pipeline::Pipeline;
use super::reader::{Position, Reader};
use crate::tokenizer::Tokenizer;
use ferrotron_tensor::{Error, Result};
use std::collections::HashSet;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Instant;

/// The progress of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PreprocessProgress {
    /// Bytes of the files that are read and written out as tokens.
    pub bytes: u64,
    /// Bytes of all files.
    pub total_bytes: u64,
    /// Bytes that an interrupted call had read.
    pub resumed_bytes: u64,
    /// Documents of the first key.
    pub documents: u64,
    /// Tokens of all keys.
    pub tokens: u64,
}

/// The result of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreprocessReport {
    /// The prefix of each key's files, and their number of documents and of tokens.
    pub outputs: Vec<(PathBuf, u64, u64)>,
    /// Lines and rows that were skipped.
    pub skipped: u64,
    /// Files that were left out, for they are empty.
    pub empty_files: Vec<PathBuf>,
}

/// Tokenizes the files of `config`. `observe` is told of the progress after each batch. Returns none if `stop` was set:
/// then the journal is there, with which the same call goes on; so is it behind an error.
///
/// # Errors
/// Files that exist already; options that contradict each other, the tokenizer or the files; a journal of other
/// options or sources; a file that cannot be read, a broken line, a full disk.
pub fn preprocess(
    config: &PreprocessConfig,
    tokenizer: &Tokenizer,
    stop: &AtomicBool,
    observe: &mut dyn FnMut(PreprocessProgress),
) -> Result<Option<PreprocessReport>> {
    let token_type = config.format.token_type(tokenizer.vocab_size())?;
    let end_of_document = checked(config, tokenizer)?;
    let names = config.outputs();
    let (sources, empty_files) = input::find(&config.inputs)?;
    let sources: Arc<[Source]> = sources.into();
    let settings = fingerprint::settings(config, tokenizer, &sources);
    let journal_path = journal::path(config);
    let before = Journal::read(&journal_path, &settings)?;
    match &before {
        None => refuse_to_overwrite(config)?,
        Some(journal) => journal.check(&journal_path, names.len(), sources.len())?,
    }
    let mut outputs = Vec::new();
    for (number, key) in names.iter().enumerate() {
        let state = before.as_ref().map(|journal| &journal.outputs[number]);
        outputs.push(TokenOutput::open(config, key, token_type, end_of_document, state)?);
    }
    let mut journal = match before {
        Some(journal) => journal,
        None => {
            let synced = outputs.iter_mut().map(TokenOutput::sync).collect::<Result<Vec<_>>>()?;
            let position = Position::default();
            Journal { settings, position, read: 0, skipped: 0, outputs: synced }
        }
    };
    journal.write(&journal_path)?;
    let cut = CutRule::for_tokenizer(tokenizer)?;
    let in_lines = config.sequence_level == SequenceLevel::Sentence;
    let reader_cut = if in_lines { CutRule::Lines } else { cut };
    let limits = (reader_cut, config::max_pages(tokenizer.vocab_size()));
    let keys = config.json_keys.clone();
    let reader = Reader::new(sources.clone(), keys.clone(), limits, journal.position);
    let encoder = Encoder {
        cut: Cutter::new(cut, tokenizer),
        keys,
        sequence_level: config.sequence_level,
        skip_broken_lines: config.skip_broken_lines,
    };
    let mut pipeline = Pipeline::start(reader, encoder, config.workers);
    let resumed_bytes = journal.read;
    let total_bytes = sources.iter().map(|source| source.bytes).sum();
    let mut written = Instant::now();
    let mut failure = None;
    let mut is_within_batch = false;
    loop {
        let finished = match pipeline.next(stop) {
            Ok(Some(finished)) => finished,
            Ok(None) => break,
            Err(error) => {
                failure = Some(error);
                break;
            }
        };
        if !is_within_batch && finished.end.is_none() {
            // From here on the outputs are ahead of the position, until the batch ends.
            journal.outputs = outputs.iter().map(TokenOutput::state).collect();
        }
        is_within_batch = finished.end.is_none();
        for (output, tokens) in outputs.iter_mut().zip(&finished.columns) {
            output.write(tokens)?;
        }
        let Some(end) = finished.end else { continue };
        journal.position = end.next;
        journal.read = end.read;
        journal.skipped += end.skipped;
        observe(PreprocessProgress {
            bytes: end.read,
            total_bytes,
            resumed_bytes,
            documents: outputs[0].counts().documents,
            tokens: outputs.iter().map(|output| output.counts().tokens).sum(),
        });
        if written.elapsed() >= config.journal_interval {
            journal.outputs = outputs.iter_mut().map(TokenOutput::sync).collect::<Result<_>>()?;
            journal.write(&journal_path)?;
            written = Instant::now();
        }
    }
    if journal.position == Position::default()
        && let Some(error) = failure.take()
    {
        // Nothing to resume: most likely an option or a file that does not fit.
        outputs.into_iter().for_each(TokenOutput::remove_parts);
        let _ = std::fs::remove_file(&journal_path);
        return Err(error);
    }
    let synced = outputs.iter_mut().map(TokenOutput::sync).collect::<Result<_>>()?;
    if !is_within_batch {
        journal.outputs = synced;
    }
    journal.write(&journal_path)?;
    if let Some(error) = failure {
        return Err(error);
    }
    if stop.load(Relaxed) {
        return Ok(None);
    }
    let mut report =
        PreprocessReport { outputs: Vec::new(), skipped: journal.skipped, empty_files };
    for (key, output) in names.iter().zip(&mut outputs) {
        let files = output.finish()?;
        let counts: &OutputCounts = output.counts();
        let made_of = (&journal, &sources);
        let made = PreprocessFingerprint::new(made_of, key, counts, token_type, &files, stop)?;
        let Some(made) = made else { return Ok(None) };
        journal::replace(&fingerprint::path(output.prefix()), |file| {
            serde_json::to_writer_pretty(&mut *file, &made)?;
            file.write_all(b"\n")
        })?;
        report.outputs.push((output.prefix().to_path_buf(), counts.documents, counts.tokens));
    }
    let removed = std::fs::remove_file(&journal_path);
    removed.map_err(|error| {
        Error::io(AREA, format!("cannot remove '{}': {error}", journal_path.display()))
    })?;
    outputs.into_iter().for_each(TokenOutput::remove_parts);
    Ok(Some(report))
}

/// The token at the end of documents, if one is asked for.
///
/// # Errors
/// Options that contradict each other or the tokenizer.
fn checked(config: &PreprocessConfig, tokenizer: &Tokenizer) -> Result<Option<u32>> {
    let refuse = |message: String| Err(Error::config(AREA, message));
    if config.workers == 0 {
        return refuse("--workers: must be positive".to_string());
    }
    if config.json_keys.is_empty() {
        return refuse("--json-keys: name at least one".to_string());
    }
    if config.shard_tokens == 0 || config.shard_tokens > i32::MAX as u64 {
        return refuse(format!(
            "--shard-size: {} tokens, but llm.c's header takes 1 to {}",
            config.shard_tokens,
            i32::MAX
        ));
    }
    let mut seen = HashSet::new();
    if let Some(key) = config.json_keys.iter().find(|key| !seen.insert(*key)) {
        return refuse(format!("--json-keys: '{key}' is named twice"));
    }
    if let Some(key) = config.json_keys.iter().find(|key| key.is_empty() || key.contains('/')) {
        return refuse(format!("--json-keys: '{key}' cannot be part of a file's name"));
    }
    if config.sequence_level == SequenceLevel::PromptAndCompletion {
        if let keys @ ([] | [_] | [_, _, _, ..]) = &config.json_keys[..] {
            let count = keys.len();
            return refuse(format!(
                "--prompt-completion: takes two keys, of the prompt and of the completion, but --json-keys names {count}"
            ));
        }
        if config.format != TokenFormat::Megatron {
            let format = config.format.name();
            return refuse(format!(
                "--format: {format} cannot tell prompts from completions: leave it out with --prompt-completion"
            ));
        }
    }
    let folder = match config.output_prefix.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => std::path::Path::new("."),
    };
    if !folder.is_dir() {
        return refuse(format!("--output-prefix: there is no folder '{}'", folder.display()));
    }
    match (config.append_eod, tokenizer.end_of_text()) {
        (true, None) => refuse(format!(
            "--append-eod: the tokenizer {} has no end-of-text token",
            tokenizer.name()
        )),
        (true, token) => Ok(token),
        (false, _) => Ok(None),
    }
}

fn refuse_to_overwrite(config: &PreprocessConfig) -> Result<()> {
    for key in config.outputs() {
        let prefix = output::prefix(config, &key);
        if let Some(file) = output::existing(&prefix, config.format) {
            let message = format!(
                "--output-prefix: '{}' exists: give another prefix, or delete it",
                file.display()
            );
            return Err(Error::config(AREA, message));
        }
    }
    Ok(())
}
