//! `ferrotron tokenize`: token files from JSON lines, Parquet and text, and their verification.

use clap::{Args, ValueEnum};
use ferrotron::models::data::preprocess::{
    PreprocessConfig, SequenceLevel, TokenFormat, Verified, preprocess, verify,
};
use ferrotron::models::tokenizer::TokenizerChoice;
use ferrotron::parallel::launch::{INTERRUPTED, stop_signals};
use ferrotron::{Error, Result};
use signal_hook::flag;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::cli::progress::ByteProgress;
use crate::cli::{bytes, output};

/// The layout of the files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// .bin and .idx of Megatron-LM
    Megatron,
    /// One .bin of 16-bit tokens
    Nanogpt,
    /// Shards _000000.bin of llm.c
    Llmc,
}

#[derive(Debug, Args)]
pub struct TokenizeArgs {
    /// Files, and folders that are searched, with all below them: .jsonl, .ndjson, .json, .parquet and .txt, also with .gz
    /// and .zst
    #[arg(long, value_name = "PATH", num_args = 1..)]
    input: Vec<PathBuf>,
    /// The files are called PREFIX_KEY_document; with --split-sentences PREFIX_KEY_sentence, and with --prompt-completion
    /// PREFIX_KEY_KEY
    #[arg(long, value_name = "PREFIX")]
    output_prefix: Option<PathBuf>,
    /// Fields of JSON lines and columns of Parquet; each gets files of its own [default: text; with --prompt-completion:
    /// prompt completion]
    #[arg(long, value_name = "KEY", num_args = 1..)]
    json_keys: Vec<String>,
    /// Tokenizer: gpt2, byte, or the path of a Hugging Face tokenizer.json or of BERT's vocab.txt
    #[arg(long, value_name = "TOKENIZER", default_value = "gpt2")]
    tokenizer: String,
    /// Layout of the files
    #[arg(long, value_enum, default_value = "megatron")]
    format: Format,
    /// Tokens of a shard of --format llmc
    #[arg(long, value_name = "N", default_value_t = 100_000_000)]
    shard_size: u64,
    /// End each document that is not empty with the end-of-text token
    #[arg(long)]
    append_eod: bool,
    /// Make each sentence a sequence, as BERT needs it; in plain text blank lines then separate documents
    #[arg(long)]
    split_sentences: bool,
    /// Make fine-tuning samples of the strings under two keys, for `train --packing`: --append-eod ends their completions
    #[arg(long, conflicts_with = "split_sentences")]
    prompt_completion: bool,
    /// Count lines of JSON and rows that are broken or lack a key, and go on
    #[arg(long)]
    skip_broken_lines: bool,
    /// Threads that tokenize [default: the processor's cores]
    #[arg(long, value_name = "N")]
    workers: Option<usize>,
    /// Compare the files of PREFIX with their fingerprint, and each field of an index, and write nothing
    #[arg(long, value_name = "PREFIX", conflicts_with_all = ["input", "output_prefix"])]
    verify: Option<PathBuf>,
}

impl TokenizeArgs {
    fn sequence_level(&self) -> SequenceLevel {
        match (self.prompt_completion, self.split_sentences) {
            (true, _) => SequenceLevel::PromptAndCompletion,
            (_, true) => SequenceLevel::Sentence,
            _ => SequenceLevel::Document,
        }
    }

    fn json_keys(&self) -> Vec<String> {
        let default: &[&str] =
            if self.prompt_completion { &["prompt", "completion"] } else { &["text"] };
        match self.json_keys.is_empty() {
            true => default.iter().map(|key| key.to_string()).collect(),
            false => self.json_keys.clone(),
        }
    }
}

/// Lets blocks of memory from 1 MiB on go back to the system when they are freed. Otherwise glibc keeps those of up to
/// 32 MiB for the thread that had them, and each worker that has had a long document would keep its memory.
fn return_large_blocks() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: it sets a parameter of the allocator, which may be done at any time; the only thread is this one.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 1 << 20);
    }
}

/// Gives back to the system what the allocator keeps of memory that was freed: a vocabulary was read from a file of many
/// small strings.
fn return_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: it touches no memory that is in use, and may be called at any time.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Writes token files, or verifies them. The exit code is that of an interrupted program if a signal came.
pub fn tokenize(args: &TokenizeArgs) -> Result<ExitCode> {
    return_large_blocks();
    let stop = stop_flag()?;
    if let Some(prefix) = &args.verify {
        let Some(Verified { documents, tokens, bytes, has_fingerprint }) = verify(prefix, &stop)?
        else {
            return Ok(ExitCode::from(INTERRUPTED));
        };
        let compared = match has_fingerprint {
            true => format!("{} as in the fingerprint", bytes::display(bytes)),
            false => "no fingerprint to compare them with".to_string(),
        };
        output::line(&format!(
            "{}: {documents} documents, {tokens} tokens, {compared}",
            prefix.display()
        ));
        return Ok(ExitCode::SUCCESS);
    }
    if args.input.is_empty() {
        let message = "--input: name the files or folders to be read, and with --output-prefix those to be written, or \
                       give --verify PREFIX";
        return Err(Error::config("tokenize", message));
    }
    let Some(output_prefix) = args.output_prefix.clone() else {
        return Err(Error::config("tokenize", "--output-prefix: name the files to be written"));
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let config = PreprocessConfig {
        json_keys: args.json_keys(),
        format: match args.format {
            Format::Megatron => TokenFormat::Megatron,
            Format::Nanogpt => TokenFormat::NanoGpt,
            Format::Llmc => TokenFormat::LlmC,
        },
        append_eod: args.append_eod,
        sequence_level: args.sequence_level(),
        skip_broken_lines: args.skip_broken_lines,
        workers: args.workers.unwrap_or(cores),
        shard_tokens: args.shard_size,
        ..PreprocessConfig::new(args.input.clone(), output_prefix)
    };
    let warning = match args.prompt_completion {
        true => "a model learns from these files nowhere to end: --append-eod ends completions",
        false => {
            "these files say nowhere where a document ends: --append-eod puts the end-of-text token there"
        }
    };
    if (args.prompt_completion || config.format != TokenFormat::Megatron) && !config.append_eod {
        output::note(&format!("warning: {warning}"));
    }
    let tokenizer = args.tokenizer.parse::<TokenizerChoice>()?.build(|| {
        Err(Error::config(
            "tokenize",
            "--tokenizer: char is built of a training text: take byte, gpt2 or a tokenizer.json, as that of a checkpoint",
        ))
    })?;
    return_freed_memory();
    let mut progress = ByteProgress::new();
    let report = preprocess(&config, &tokenizer, &stop, &mut |now| {
        let found = format!("{} documents  {} tokens", now.documents, now.tokens);
        progress.show(now.bytes, now.total_bytes, now.resumed_bytes, &found);
    });
    progress.finish();
    let Some(report) = report? else {
        output::note("ferrotron: interrupted; the same command goes on from here");
        return Ok(ExitCode::from(INTERRUPTED));
    };
    if !report.empty_files.is_empty() {
        let names: Vec<String> =
            report.empty_files.iter().map(|file| format!("'{}'", file.display())).collect();
        output::note(&format!("warning: left out, for they are empty: {}", names.join(", ")));
    }
    if report.skipped > 0 {
        output::note(&format!("warning: skipped {} broken lines", report.skipped));
    }
    for (prefix, documents, tokens) in &report.outputs {
        output::line(&format!("{}: {documents} documents, {tokens} tokens", prefix.display()));
    }
    Ok(ExitCode::SUCCESS)
}

/// A flag that each signal that asks to stop sets. A second one ends the process at once: the journal is whole at any
/// time.
fn stop_flag() -> Result<Arc<AtomicBool>> {
    let unhandled = |error: std::io::Error| Error::io("signals", error.to_string());
    let stop = Arc::new(AtomicBool::new(false));
    for signal in stop_signals() {
        let second = flag::register_conditional_shutdown(signal, INTERRUPTED.into(), stop.clone());
        second.map_err(unhandled)?;
        flag::register(signal, stop.clone()).map_err(unhandled)?;
    }
    Ok(stop)
}
