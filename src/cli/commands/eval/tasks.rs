//! `ferrotron eval --tasks`: scores the texts of tasks and prints their numbers.

use ferrotron::models::data::preprocess::read_documents;
use ferrotron::models::data::tasks::{
    Lambada, LambadaForm, ScoreRequest, TokenScore, WikiText, WikiTextConfig,
};
use ferrotron::models::evaluate::LocalModel;
use ferrotron::models::gpt::Gpt;
use ferrotron::models::score::{ScoreConfig, score};
use ferrotron::models::tokenizer::Tokenizer;
use ferrotron::tensor::At;
use ferrotron::{Error, Result};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

use super::args::{EvalArgs, Task};
use crate::cli::job::{ModelRank, all_ready};
use crate::cli::loaded::{Loaded, check_vocab_size};
use crate::cli::output;
use crate::cli::progress::CountProgress;

/// The key of texts in JSON lines and Parquet.
const TEXT: &str = "text";

/// A task with its requests, made of its data.
enum Prepared {
    WikiText(WikiText),
    Lambada(Lambada),
}

/// Tasks with their requests.
type Tasks = Vec<(Task, Prepared)>;

impl Prepared {
    fn new(
        task: Task,
        path: &Path,
        tokenizer: &Tokenizer,
        windows: WikiTextConfig,
    ) -> Result<Prepared> {
        let mut documents = read_documents(&[path.to_path_buf()], TEXT)?;
        let lambada = |form, documents: &[String]| {
            Lambada::new(documents, tokenizer, form, windows.seq_length).map(Prepared::Lambada)
        };
        // A text file is one document.
        if let (Task::Lambada | Task::LambadaOpenAi, [text]) = (task, &documents[..]) {
            let lines = text.lines().filter(|line| !line.trim().is_empty());
            documents = lines.map(String::from).collect();
        }
        match task {
            Task::Wikitext => {
                WikiText::new(&joined_lines(&documents), tokenizer, windows).map(Prepared::WikiText)
            }
            Task::Lambada => lambada(LambadaForm::Strict, &documents),
            Task::LambadaOpenAi => lambada(LambadaForm::OpenAi, &documents),
            Task::Race => Err(Error::config("--tasks", "race is a task of a BERT")),
        }
    }

    fn requests(&self) -> Vec<ScoreRequest> {
        match self {
            Prepared::WikiText(task) => task.requests(),
            Prepared::Lambada(task) => task.requests().to_vec(),
        }
    }

    /// The numbers as JSON, and as a line.
    fn result(&self, scores: &[Vec<TokenScore>]) -> (Value, String) {
        match self {
            Prepared::WikiText(task) => {
                let found = task.result(scores.iter().flatten().map(|token| token.log_prob).sum());
                let line = format!(
                    "adjusted perplexity {:.4} (perplexity {:.4}, loss {:.4} over {} tokens of {} words)",
                    found.adjusted_ppl, found.ppl, found.loss, found.tokens, found.words
                );
                let json = json!({
                    "loss": found.loss,
                    "ppl": found.ppl,
                    "adjusted_ppl": found.adjusted_ppl,
                    "token_ratio": found.token_ratio,
                    "tokens": found.tokens,
                    "words": found.words,
                });
                (json, line)
            }
            Prepared::Lambada(_) => {
                let found = Lambada::result(scores);
                let line = format!(
                    "accuracy {:.4}, perplexity {:.4} over {} passages",
                    found.accuracy, found.perplexity, found.examples
                );
                let json = json!({
                    "acc": found.accuracy,
                    "perplexity": found.perplexity,
                    "examples": found.examples,
                });
                (json, line)
            }
        }
    }
}

/// The lines of a file whose rows are its lines, with or without the line break.
fn joined_lines(rows: &[String]) -> String {
    let line = |row: &String| match row.ends_with('\n') || rows.len() == 1 {
        true => row.clone(),
        false => format!("{row}\n"),
    };
    rows.iter().map(line).collect()
}

/// Evaluates the tasks.
pub fn eval(
    args: &EvalArgs,
    path: &Path,
    tasks: &[(Task, PathBuf)],
    place: &ModelRank,
) -> Result<()> {
    let (loaded, tasks) = all_ready(place, prepare(args, path, tasks, place))?;
    let Loaded { model, config, scope, .. } = &loaded;
    let (parts, mesh) = (std::slice::from_ref(model), &place.mesh);
    let model = LocalModel { parts, config, scope, mesh };
    let how = ScoreConfig { micro_batch_size: args.micro_batch_size, top: 1 };
    let first = mesh.rank() == 0;
    let mut results = Map::new();
    for (task, prepared) in tasks {
        let requests = prepared.requests();
        let mut progress = CountProgress::new(task.name(), requests.len() as u64);
        let scores = score(&model, &requests, how, |done| {
            if first {
                progress.show(done as u64);
            }
        });
        progress.finish();
        let (numbers, line) = prepared.result(&scores.at(task.name())?);
        results.insert(task.name().to_string(), numbers);
        if first && !args.json {
            output::line(&format!("{}: {line}", task.name()));
        }
    }
    if first && args.json {
        output::line(&json!({ "results": results }).to_string());
    }
    Ok(())
}

/// Loads the model, and tokenizes the data of the tasks.
fn prepare(
    args: &EvalArgs,
    path: &Path,
    tasks: &[(Task, PathBuf)],
    place: &ModelRank,
) -> Result<(Loaded<Gpt>, Tasks)> {
    let loaded = Loaded::<Gpt>::open_on(path, &args.device, args.ema, place)?;
    let tokenizer = loaded.tokenizer.as_ref().ok_or_else(|| {
        let message = "has no tokenizer, which tasks need: put its tokenizer.json there";
        Error::config("--load", format!("'{}' {message}", path.display()))
    })?;
    check_vocab_size(loaded.config.vocab_size, tokenizer.vocab_size())?;
    let seq_length = args.sequence_length(loaded.config.max_position_embeddings)?;
    let windows =
        WikiTextConfig { seq_length, overlapping_eval: args.overlapping_eval.min(seq_length) };
    let prepare = |(task, path): &(Task, PathBuf)| {
        let prepared = Prepared::new(*task, path, tokenizer, windows);
        Ok((*task, prepared.at(&format!("--task-data {}", task.name()))?))
    };
    let prepared = tasks.iter().map(prepare).collect::<Result<Vec<_>>>()?;
    Ok((loaded, prepared))
}
