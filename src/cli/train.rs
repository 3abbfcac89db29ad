//! `ferrotron train`.

use ferrotron::models::checkpoint::Checkpoint;
use ferrotron::models::data::Dataset;
use ferrotron::models::entropy::bigram_entropy;
use ferrotron::models::run::{Ended, RunConfig, run};
use ferrotron::models::tokenizer::Tokenizer;
use ferrotron::models::trainer::Trainer;
use ferrotron::nn::Scope;
use ferrotron::{Error, Result};
use serde_json::{Value, json};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::corpus;
use super::generate::sample;
use super::progress::Progress;
use super::train_args::TrainArgs;

/// Exit code of a run that was interrupted, as shells report SIGINT.
const INTERRUPTED: u8 = 130;

/// Puts the options with which a run was started in front of those that continue it.
///
/// Returns the arguments and, for `train`, the options that a checkpoint remembers.
pub fn with_saved_options(arguments: Vec<OsString>) -> Result<(Vec<OsString>, Value)> {
    let is_train = arguments.get(1).is_some_and(|command| command == "train");
    let texts: Vec<String> =
        arguments.iter().skip(2).map(|a| a.to_string_lossy().into_owned()).collect();
    if !is_train {
        return Ok((arguments, Value::Null));
    }
    let at = |flag: &str| texts.iter().position(|text| text == flag).and_then(|i| texts.get(i + 1));
    let inline = texts.iter().find_map(|text| text.strip_prefix("--load="));
    let loaded = at("--load").map(String::as_str).or(inline);
    let saved: Vec<String> = match loaded {
        None => Vec::new(),
        Some(path) => Checkpoint::open(Path::new(path))?
            .run()
            .as_array()
            .map(|values| {
                values.iter().filter_map(|value| value.as_str().map(String::from)).collect()
            })
            .unwrap_or_default(),
    };
    let mut all: Vec<String> = saved;
    all.extend(texts);
    let mut expanded: Vec<OsString> = arguments.into_iter().take(2).collect();
    expanded.extend(all.iter().map(OsString::from));
    Ok((expanded, json!(without(&all, &["--load", "--save", "--metrics", "--exit-interval"]))))
}

/// The options without those named and their values.
fn without(options: &[String], names: &[&str]) -> Vec<String> {
    let mut kept = Vec::new();
    let mut skip = false;
    for option in options {
        let name = option.split('=').next().unwrap_or_default();
        if names.contains(&name) {
            skip = !option.contains('=');
        } else if skip && !option.starts_with("--") {
            skip = false;
        } else {
            skip = false;
            kept.push(option.clone());
        }
    }
    kept
}

/// Trains, reports and leaves a run folder behind.
pub fn train(args: &TrainArgs, options: Value) -> Result<ExitCode> {
    let device = args.device.open()?;
    let resumed = args.run.load.as_deref().map(Checkpoint::open).transpose()?;
    let (dataset, tokenizer) = open_data(args, resumed.as_ref())?;
    let config = args.optimization.config()?;
    let model = args.model.config(tokenizer.vocab_size())?;
    let scope = Scope::new(&device, args.device.dtype()?, args.optimization.seed);

    let mut trainer = Trainer::new(&scope, &model, config)?;
    if let Some(checkpoint) = &resumed {
        checkpoint.check_config(&model)?;
        let params: Vec<_> = trainer.buffers().params().cloned().collect();
        checkpoint.load_params(&params)?;
        checkpoint.load_optimizer(trainer.optimizer_mut(), &params)?;
        trainer.set_progress(checkpoint.progress().clone());
    }
    let folder = run_folder(args, resumed.as_ref())?;
    let run_config = RunConfig {
        metrics: args.run.metrics.clone().unwrap_or_else(|| folder.join("metrics.jsonl")),
        folder,
        train_iters: args.optimization.train_iters,
        seq_length: args.model.seq_length()?,
        save_interval: args.run.save_interval,
        save_retain: args.run.save_retain,
        eval_interval: args.run.eval_interval,
        eval_iters: args.run.eval_iters,
        exit_interval: args.run.exit_interval,
        options,
    };
    let bigram = dataset
        .validation
        .as_ref()
        .map(|source| source.to_vec().map(|tokens| bigram_entropy(&tokens)));
    let bigram = bigram.transpose()?;
    eprintln!(
        "{:.2} M parameters, {} training tokens, {} tokenizer of {}, {} threads, {}",
        model.num_parameters() as f64 / 1e6,
        dataset.train.len(),
        tokenizer.name(),
        tokenizer.vocab_size(),
        device.threads(),
        run_config.folder.display()
    );

    let stop = Arc::new(AtomicBool::new(false));
    let asked = stop.clone();
    // A second Ctrl-C does not wait for the step to end.
    let handler = move || {
        if asked.swap(true, Relaxed) {
            std::process::exit(i32::from(INTERRUPTED));
        }
    };
    ctrlc::set_handler(handler).map_err(|error| Error::io("signals", error.to_string()))?;
    let mut progress =
        Progress::new(trainer.progress().step, run_config.train_iters, args.run.log_interval);
    let outcome = run(&mut trainer, &dataset, &tokenizer, &run_config, &stop, &mut progress);
    progress.finish();
    let outcome = outcome?;

    if let (Some(evaluation), Some(bigram)) = (&outcome.evaluation, bigram) {
        println!("validation loss {:.4} (bigrams of the same text: {bigram:.4})", evaluation.loss);
    }
    if outcome.ended == Ended::Finished && args.run.sample_length > 0 {
        println!("sample: {}", sample(trainer.gpt(), &scope, &tokenizer, args.run.sample_length)?);
    }
    println!("run folder: {}", run_config.folder.display());
    println!(
        "continue a text: ferrotron generate --load {} --prompt TEXT",
        outcome.checkpoint.display()
    );
    Ok(if outcome.ended == Ended::Stopped {
        ExitCode::from(INTERRUPTED)
    } else {
        ExitCode::SUCCESS
    })
}

fn open_data(args: &TrainArgs, resumed: Option<&Checkpoint>) -> Result<(Dataset, Tokenizer)> {
    let config = args.data.config();
    let embedded = args.data.data.is_empty();
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

/// The folder of the run: as asked for, that of the checkpoint, or the next free number.
fn run_folder(args: &TrainArgs, resumed: Option<&Checkpoint>) -> Result<PathBuf> {
    if let Some(folder) = &args.run.save {
        return Ok(folder.clone());
    }
    if let Some(folder) = resumed.and_then(|checkpoint| checkpoint.folder().parent()) {
        return Ok(folder.to_path_buf());
    }
    let next = newest_run().map_or(1, |(number, _)| number + 1);
    Ok(Path::new("runs").join(format!("{next:04}")))
}

/// The run folder `runs/NNNN` with the largest number.
pub fn newest_run() -> Option<(u64, PathBuf)> {
    let numbered = std::fs::read_dir("runs").ok()?.filter_map(|entry| {
        let path = entry.ok()?.path();
        Some((path.file_name()?.to_str()?.parse::<u64>().ok()?, path))
    });
    numbered.max()
}
