//! `ferrotron eval` of a BERT: its losses over masked pairs of segments of the validation part, or its accuracy in RACE.

use ferrotron::models::bert::Bert;
use ferrotron::models::data::tasks::{NUM_CHOICES, Race};
use ferrotron::models::data::{BlendedDataset, FiniteSamples, HeldOutPairs};
use ferrotron::models::finite::first_not_finite;
use ferrotron::tensor::At;
use ferrotron::{Error, Result};
use serde_json::{Map, json};
use std::path::{Path, PathBuf};

use super::args::EvalArgs;
use super::with_progress::evaluate_with_progress;
use crate::cli::args::data::DataSource;
use crate::cli::closing_report::bert_line;
use crate::cli::definition::Definition;
use crate::cli::job::{ModelRank, all_ready};
use crate::cli::loaded::{Loaded, check_vocab_size};
use crate::cli::options::remembered;
use crate::cli::tasks::Task;
use crate::cli::validation_sets::quoted;
use crate::cli::{corpus, output};

/// Measures the losses over the validation part, or the accuracy in a task with the path of its data.
pub fn eval(
    args: &EvalArgs,
    path: &Path,
    task: Option<&(Task, PathBuf)>,
    definition: &Definition,
    place: &ModelRank,
) -> Result<()> {
    let prepared = prepare(args, path, task, definition, place);
    let (loaded, samples) = all_ready(place, prepared)?;
    let (Loaded { model, scope, .. }, mesh) = (&loaded, &place.mesh);
    let found = evaluate_with_progress(&loaded, &*samples, args.micro_batch_size, place)?;
    if !found.loss.is_finite() {
        let context = match mesh.world().size() {
            1 => first_not_finite(model)?
                .unwrap_or_else(|| format!("all weights are finite: {} overflows", scope.dtype())),
            // Each rank has a part of the weights.
            _ => "evaluate with one rank to find the weight".to_string(),
        };
        return Err(Error::value("eval", format!("the loss is {}: {context}", found.loss)));
    }
    let losses: Map<_, _> =
        found.losses.iter().map(|(name, mean)| (name.to_string(), json!(mean))).collect();
    let line = match (task, args.json) {
        (None, true) => {
            json!({ "loss": found.loss, "losses": losses, "tokens": found.tokens }).to_string()
        }
        (None, false) => bert_line(&found),
        (Some((task, _)), true) => {
            let numbers =
                json!({ "acc": losses["accuracy"], "loss": found.loss, "examples": found.tokens });
            json!({ "results": { task.name(): numbers } }).to_string()
        }
        (Some((task, _)), false) => format!("{}: {}", task.name(), bert_line(&found)),
    };
    if mesh.rank() == 0 {
        output::line(&line);
    }
    Ok(())
}

/// Loads the model and opens the data.
fn prepare(
    args: &EvalArgs,
    path: &Path,
    task: Option<&(Task, PathBuf)>,
    definition: &Definition,
    place: &ModelRank,
) -> Result<(Loaded<Bert>, Box<dyn FiniteSamples>)> {
    let loaded = Loaded::<Bert>::open_on(path, &args.device, args.ema, place)?;
    let Loaded { config, tokenizer, checkpoint, .. } = &loaded;
    let tokenizer = tokenizer.as_ref().ok_or_else(|| {
        let message = "has no tokenizer: put its tokenizer.json or vocab.txt there";
        Error::config("--load", format!("'{}' {message}", path.display()))
    })?;
    let special = tokenizer.special_tokens()?;
    check_vocab_size(config.vocab_size, special.vocab_size)?;
    let seq_length = args.sequence_length(config.max_position_embeddings)?;
    let name = path.display();
    match (task, config.num_choices) {
        (Some((task, data)), Some(NUM_CHOICES)) => {
            let race = Race::open(std::slice::from_ref(data), tokenizer, seq_length);
            let race = race.at(&format!("--task-data {}", task.name()))?;
            return Ok((loaded, Box::new(race)));
        }
        (Some((task, _)), _) => {
            let message = format!(
                "'{name}' has no head for {NUM_CHOICES} choices: fine-tune it by train --task {} \
                 --pretrained-checkpoint {name}",
                task.name()
            );
            return Err(Error::config("--tasks", message));
        }
        (None, Some(_)) => {
            let message = format!(
                "is missing: '{name}' chooses among answers: give --tasks race --task-data race=PATH"
            );
            return Err(Error::config("--tasks", message));
        }
        (None, None) => {}
    }
    let saved = checkpoint.as_ref().map(|found| remembered::of_checkpoint(found, definition));
    let (saved, _) = saved.transpose()?.unwrap_or_default();
    let is_run = checkpoint.as_ref().is_some_and(|found| !found.run().is_null());
    args.refuse_part("a bert is evaluated on all that was held out")?;
    let (source, origin) = args.data_config(&saved, is_run)?;
    let files = match source {
        DataSource::Files(files) => files,
        DataSource::Sets(sets) => {
            let open = || {
                sets.check_tokenizer(tokenizer)?;
                BlendedDataset::open_sentences(&sets, tokenizer.vocab_size())
            };
            let held_out = open().at(origin)?.validation.ok_or_else(|| {
                let message =
                    "the run's data sets hold nothing out for validation: name data by --data";
                Error::config("--data", message)
            })?;
            let (pairs, left_out) =
                HeldOutPairs::of_blend(&held_out, special, seq_length).at(origin)?;
            if pairs.is_some() && !left_out.is_empty() {
                output::note(&format!(
                    "warning: no document of {} has two sentences: the loss goes without",
                    quoted(&left_out)
                ));
            }
            let pairs = pairs.ok_or_else(|| {
                let message =
                    "no document that the run's data sets hold out for validation has two sentences: name data by --data";
                Error::config("--data", message)
            })?;
            return Ok((loaded, Box::new(pairs)));
        }
    };
    let (train, validation) = corpus::open_documents(&files, tokenizer, output::note).at(origin)?;
    let whole = args.valid_fraction == Some(1.0);
    let documents = if whole { Some(train) } else { validation };
    let documents = documents.ok_or_else(|| {
        let message =
            "leaves no sentence of this data to evaluate: give a larger share, or 1 for all";
        Error::config("--valid-fraction", message)
    })?;
    let pairs = HeldOutPairs::new(documents, special, seq_length)?;
    Ok((loaded, Box::new(pairs)))
}
