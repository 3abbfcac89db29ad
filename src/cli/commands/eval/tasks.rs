//! `ferrotron eval --tasks`: scores the texts of tasks and prints their numbers.

use ferrotron::models::data::tasks::WikiTextConfig;
use ferrotron::models::evaluate::LocalModel;
use ferrotron::models::gpt::Gpt;
use ferrotron::models::run::{EvaluationTask, TaskResult};
use ferrotron::models::stop::StopFlag;
use ferrotron::{Error, Result};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

use super::args::EvalArgs;
use crate::cli::job::{ModelRank, all_ready_with};
use crate::cli::loaded::{Loaded, check_vocab_size};
use crate::cli::output;
use crate::cli::progress::CountProgress;
use crate::cli::tasks::{GptTask, Task, task_facts};

/// Evaluates the tasks.
pub fn eval(
    args: &EvalArgs,
    path: &Path,
    tasks: &[(Task, PathBuf)],
    place: &ModelRank,
) -> Result<()> {
    let (loaded, tasks) =
        all_ready_with(place, prepare(args, path, tasks, place), |(_, tasks)| {
            task_facts(tasks.iter().map(|task| task as &dyn EvaluationTask<Gpt>))
        })?;
    let Loaded { model, config, scope, .. } = &loaded;
    let (parts, mesh) = (std::slice::from_ref(model), &place.mesh);
    let model = LocalModel { parts, config, scope, mesh };
    let first = mesh.rank() == 0;
    let mut results = Map::new();
    for task in tasks {
        let mut progress = CountProgress::new(task.name(), task.num_requests as u64);
        // A signal ends the process: there is nothing to save.
        let found = task.scores(&model, &StopFlag::default(), |done| {
            if first {
                progress.show(done as u64);
            }
        });
        progress.finish();
        let found = found?.expect("an evaluation that is not asked to stop has a result");
        if first && !args.json {
            output::line(&format!("{}: {}", task.name(), found.text));
        }
        results.insert(task.name().to_string(), json_of(&found));
    }
    if first && args.json {
        output::line(&json!({ "results": results }).to_string());
    }
    Ok(())
}

/// The numbers of a task; counts are whole ones.
fn json_of(result: &TaskResult) -> Value {
    let number = |&(name, value): &(&str, f64)| match name {
        "tokens" | "words" | "examples" => (name.to_string(), json!(value as u64)),
        _ => (name.to_string(), json!(value)),
    };
    Value::Object(result.numbers.iter().map(number).collect())
}

/// Loads the model, and tokenizes the data of the tasks.
fn prepare(
    args: &EvalArgs,
    path: &Path,
    tasks: &[(Task, PathBuf)],
    place: &ModelRank,
) -> Result<(Loaded<Gpt>, Vec<GptTask>)> {
    let loaded = Loaded::<Gpt>::open_on(path, &args.device, args.ema, place)?;
    let tokenizer = loaded.tokenizer.as_ref().ok_or_else(|| {
        let message = "has no tokenizer, which tasks need: put its tokenizer.json there";
        Error::config("--load", format!("'{}' {message}", path.display()))
    })?;
    check_vocab_size(loaded.config.vocab_size, tokenizer.vocab_size())?;
    let seq_length = args.sequence_length(loaded.config.max_position_embeddings)?;
    let windows =
        WikiTextConfig { seq_length, overlapping_eval: args.overlapping_eval.min(seq_length) };
    let micro = args.micro_batch_size;
    let prepare = |task| GptTask::new(task, tokenizer, windows, &loaded.config, micro);
    let prepared = tasks.iter().map(prepare).collect::<Result<Vec<_>>>()?;
    Ok((loaded, prepared))
}
