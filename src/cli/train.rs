//! `ferrotron train`.

use ferrotron::models::checkpoint::Checkpoint;
use ferrotron::models::data::Dataset;
use ferrotron::models::entropy::bigram_entropy;
use ferrotron::models::run::{Ended, Outcome, RunConfig, run};
use ferrotron::models::tokenizer::Tokenizer;
use ferrotron::models::trainer::Trainer;
use ferrotron::nn::Scope;
use ferrotron::{Error, Result};
use serde_json::json;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::corpus;
use super::generate::sample;
use super::options::{overridden, values, without};
use super::output;
use super::progress::Progress;
use super::train_args::TrainArgs;

/// Exit code of a run that was interrupted, as shells report SIGINT.
const INTERRUPTED: u8 = 130;

/// Options that belong to one process of a run and are not remembered.
const PASSING: &[&str] = &["--load", "--save", "--metrics", "--exit-interval"];

/// Validation sets beyond this many tokens are not searched for their bigrams, which takes memory and
/// time of its own.
const BIGRAM_TOKENS: u64 = 10_000_000;

/// Puts the options with which a run was started in front of those that continue it; returns them all
/// and those that the next checkpoint remembers.
pub fn with_saved_options(typed: &[OsString]) -> Result<(Vec<OsString>, Vec<String>)> {
    let saved = match values(typed, "--load").as_deref() {
        Some([path]) => {
            if values(typed, "--tokenizer").is_some() {
                return Err(Error::config(
                    "--tokenizer",
                    "a run keeps the tokenizer that it was started with",
                ));
            }
            saved_options(&Checkpoint::open(Path::new(path))?)
        }
        _ => Vec::new(),
    };
    let options = overridden(&saved, typed);
    let remembered = without(&options, PASSING);
    let remembered = remembered.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    Ok((options, remembered))
}

/// The options with which a checkpoint's run was started.
pub fn saved_options(checkpoint: &Checkpoint) -> Vec<OsString> {
    let words = checkpoint.run().as_array().map(Vec::as_slice).unwrap_or_default();
    words.iter().filter_map(|word| word.as_str().map(OsString::from)).collect()
}

/// Trains, reports and leaves a run folder behind.
pub fn train(args: &TrainArgs, remembered: Vec<String>) -> Result<ExitCode> {
    args.run.validate()?;
    let device = args.device.open()?;
    let resumed = args.run.load.as_deref().map(Checkpoint::open).transpose()?;
    let (dataset, tokenizer) = open_data(args, resumed.as_ref())?;
    let model = args.model.config(tokenizer.vocab_size())?;
    let scope = Scope::new(&device, args.device.dtype()?, args.optimization.seed);
    let mut trainer = Trainer::new(&scope, &model, args.optimization.config()?)?;
    if let Some(checkpoint) = &resumed {
        trainer.load(checkpoint)?;
    }
    same_data(&mut trainer, dataset.train.len())?;

    let config = run_config(args, resumed.as_ref(), remembered)?;
    eprintln!(
        "{:.2} M parameters, {} training tokens, {} tokenizer of {}, {} threads, {}",
        model.num_parameters() as f64 / 1e6,
        dataset.train.len(),
        tokenizer.name(),
        tokenizer.vocab_size(),
        device.threads(),
        config.folder.display()
    );
    let mut progress =
        Progress::new(trainer.progress().step, config.train_iters, args.run.log_interval);
    let stop = stop_on_interrupt()?;
    let outcome = run(&mut trainer, &dataset, &tokenizer, &config, &stop, &mut progress);
    progress.finish();
    report(args, &trainer, &dataset, &tokenizer, &outcome?)
}

/// Prints what came out.
fn report(
    args: &TrainArgs,
    trainer: &Trainer,
    dataset: &Dataset,
    tokenizer: &Tokenizer,
    outcome: &Outcome,
) -> Result<ExitCode> {
    if let (Some(evaluation), Some(source)) = (&outcome.evaluation, &dataset.validation) {
        let mut line = format!("validation loss {:.4}", evaluation.loss);
        if source.len() <= BIGRAM_TOKENS {
            line +=
                &format!(" (bigrams of the same text: {:.4})", bigram_entropy(&source.to_vec()?));
        }
        output::line(&line);
    }
    if outcome.ended == Ended::Finished && args.run.sample_length > 0 {
        let text = sample(&trainer.parts()[0], tokenizer, args.run.sample_length)?;
        output::line(&format!("sample: {text}"));
    }
    let checkpoint = outcome.checkpoint.display();
    output::line(&format!("continue a text: ferrotron generate --load {checkpoint} --prompt TEXT"));
    Ok(if outcome.ended == Ended::Stopped {
        ExitCode::from(INTERRUPTED)
    } else {
        ExitCode::SUCCESS
    })
}

/// A flag that Ctrl-C sets; a second Ctrl-C does not wait for the step to end.
fn stop_on_interrupt() -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let asked = stop.clone();
    let handler = move || {
        if asked.swap(true, Relaxed) {
            std::process::exit(i32::from(INTERRUPTED));
        }
    };
    ctrlc::set_handler(handler).map_err(|error| Error::io("signals", error.to_string()))?;
    Ok(stop)
}

fn open_data(args: &TrainArgs, resumed: Option<&Checkpoint>) -> Result<(Dataset, Tokenizer)> {
    let config = args.data.config();
    let embedded = args.data.data.is_empty();
    if embedded && !args.data.valid_data.is_empty() {
        return Err(Error::config(
            "--valid-data",
            "needs --data: the built-in corpus brings its own validation part",
        ));
    }
    let tokenizer = match resumed.and_then(Checkpoint::tokenizer) {
        Some(tokenizer) => tokenizer.clone(),
        None => args
            .data
            .tokenizer()?
            .build(|| if embedded { Ok(corpus::text()) } else { config.text() })?,
    };
    let dataset = if embedded {
        Dataset::from_text(&corpus::text(), &tokenizer, args.data.split)?
    } else {
        Dataset::open(&config, &tokenizer)?
    };
    Ok((dataset, tokenizer))
}

/// The order of samples is a function of the number of tokens: a run goes on with the data that it was
/// started with, or not at all.
fn same_data(trainer: &mut Trainer, tokens: u64) -> Result<()> {
    const KEY: &str = "training_tokens";
    let mut progress = trainer.progress().clone();
    match progress.extra.get(KEY).and_then(serde_json::Value::as_u64) {
        Some(before) if before != tokens => Err(Error::config(
            "--data",
            format!(
                "holds {tokens} training tokens, the run was started with {before}: give the same data and --split"
            ),
        )),
        _ => {
            progress.extra.insert(KEY.into(), json!(tokens));
            trainer.set_progress(progress);
            Ok(())
        }
    }
}

fn run_config(
    args: &TrainArgs,
    resumed: Option<&Checkpoint>,
    remembered: Vec<String>,
) -> Result<RunConfig> {
    let seq_length = args.model.seq_length()?;
    let folder = run_folder(args, resumed)?;
    Ok(RunConfig {
        metrics: args.run.metrics.clone().unwrap_or_else(|| folder.join("metrics.jsonl")),
        folder,
        train_iters: args.optimization.train_iters,
        seq_length,
        save_interval: args.run.save_interval,
        save_retain: args.run.save_retain,
        eval_interval: args.run.eval_interval,
        eval_iters: args.run.eval_iters,
        exit_interval: args.run.exit_interval,
        options: json!(remembered),
    })
}

/// The folder of the run: as asked for, that of the checkpoint, or the next free number.
fn run_folder(args: &TrainArgs, resumed: Option<&Checkpoint>) -> Result<PathBuf> {
    let loaded = resumed.and_then(|checkpoint| checkpoint.folder().parent());
    match (&args.run.save, loaded) {
        (Some(folder), _) if loaded == Some(folder) => Ok(folder.clone()),
        (Some(folder), _) if folder.join("latest").exists() => Err(Error::config(
            "--save",
            format!(
                "{0} holds a run: go on with --load {0}, or choose another folder",
                folder.display()
            ),
        )),
        (Some(folder), _) => Ok(folder.clone()),
        (None, Some(folder)) => Ok(folder.to_path_buf()),
        (None, None) => new_run(),
    }
}

/// Makes the next free `runs/NNNN`; two programs that start at once get different ones.
fn new_run() -> Result<PathBuf> {
    let fail = |error: std::io::Error| {
        Error::io("train", format!("cannot make a folder in runs/: {error}"))
    };
    std::fs::create_dir_all("runs").map_err(fail)?;
    loop {
        let number = newest_run().map_or(1, |(number, _)| number + 1);
        let folder = Path::new("runs").join(format!("{number:04}"));
        match std::fs::create_dir(&folder) {
            Ok(()) => return Ok(folder),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(fail(error)),
        }
    }
}

/// The run folder `runs/NNNN` with the largest number.
pub fn newest_run() -> Option<(u64, PathBuf)> {
    let numbered = std::fs::read_dir("runs").ok()?.filter_map(|entry| {
        let path = entry.ok()?.path();
        Some((path.file_name()?.to_str()?.parse::<u64>().ok()?, path))
    });
    numbered.max()
}
