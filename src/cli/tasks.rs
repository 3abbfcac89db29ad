//! The tasks of `eval` and of `train`: their names, their data, and the requests and results of those of a GPT.

use clap::ValueEnum;
use ferrotron::models::data::preprocess::read_documents;
use ferrotron::models::data::tasks::{
    Lambada, LambadaForm, ScoreRequest, TokenScore, WikiText, WikiTextConfig, requests_crc32,
};
use ferrotron::models::evaluate::LocalModel;
use ferrotron::models::gpt::{Gpt, GptConfig};
use ferrotron::models::run::{EvaluationTask, TaskResult};
use ferrotron::models::score::{ScoreConfig, check_requests, score};
use ferrotron::models::stop::StopFlag;
use ferrotron::models::tokenizer::Tokenizer;
use ferrotron::models::trainer::Model;
use ferrotron::parallel::agreement::Facts;
use ferrotron::tensor::At;
use ferrotron::{Error, Result};
use std::borrow::Cow;
use std::path::{Path, PathBuf};

/// The key of texts in JSON lines and Parquet.
const TEXT: &str = "text";

/// A task: of a language model, or race of a BERT that was fine-tuned for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Task {
    Wikitext,
    Lambada,
    #[value(name = "lambada_openai")]
    LambadaOpenAi,
    Race,
}

impl Task {
    /// Its name on the command line and in results.
    pub fn name(self) -> &'static str {
        match self {
            Task::Wikitext => "wikitext",
            Task::Lambada => "lambada",
            Task::LambadaOpenAi => "lambada_openai",
            Task::Race => "race",
        }
    }
}

/// The tasks that `option` names, each with the path that a word `TASK=PATH` of `--task-data` gives.
///
/// # Errors
/// A task that is named twice, without data, or with data named twice; data of no task.
pub fn with_data(
    option: &'static str,
    tasks: &[Task],
    words: &[String],
) -> Result<Vec<(Task, PathBuf)>> {
    let refuse = |option: &'static str, message: String| Err(Error::config(option, message));
    let mut data: Vec<(&str, &str)> = Vec::new();
    for word in words {
        let Some((name, path)) = word.split_once('=').filter(|(_, path)| !path.is_empty()) else {
            return refuse("--task-data", format!("'{word}' is no TASK=PATH, as lambada=FILE"));
        };
        if !tasks.iter().any(|task| task.name() == name) {
            return refuse("--task-data", format!("'{name}' is not one of {option}"));
        }
        if data.iter().any(|(known, _)| *known == name) {
            return refuse("--task-data", format!("'{name}' is there twice"));
        }
        data.push((name, path));
    }
    if let Some(task) = (0..tasks.len()).find(|&task| tasks[..task].contains(&tasks[task])) {
        return refuse(option, format!("'{}' is there twice", tasks[task].name()));
    }
    let with_data = |task: &Task| match data.iter().find(|(name, _)| *name == task.name()) {
        Some((_, path)) => Ok((*task, PathBuf::from(path))),
        None => {
            let message = format!("is missing: give {}=PATH", task.name());
            Err(Error::config("--task-data", message))
        }
    };
    tasks.iter().map(with_data).collect()
}

/// The texts of a task.
enum Texts {
    WikiText(WikiText),
    Lambada(Lambada),
}

impl Texts {
    /// The requests for scores; those of overlapping windows take several times the memory of their text.
    fn requests(&self) -> Cow<'_, [ScoreRequest]> {
        match self {
            Texts::WikiText(texts) => Cow::Owned(texts.requests()),
            Texts::Lambada(texts) => Cow::Borrowed(texts.requests()),
        }
    }
}

/// A task of a GPT with its texts, from which the requests are made whenever they are scored.
pub struct GptTask {
    task: Task,
    texts: Texts,
    pub num_requests: usize,
    crc32: u32,
    micro_batch_size: usize,
}

impl GptTask {
    /// Reads and tokenizes the data of a task, for a model of `config`.
    ///
    /// # Errors
    /// Data that cannot be read or has nothing to score; requests that the model does not take.
    pub fn new(
        (task, path): &(Task, PathBuf),
        tokenizer: &Tokenizer,
        windows: WikiTextConfig,
        config: &GptConfig,
        micro_batch_size: usize,
    ) -> Result<GptTask> {
        let task = *task;
        let read = || {
            let texts = texts(task, path, tokenizer, windows)?;
            let requests = texts.requests();
            check_requests(config, &requests)?;
            let (num_requests, crc32) = (requests.len(), requests_crc32(&requests));
            drop(requests);
            Ok(GptTask { task, texts, num_requests, crc32, micro_batch_size })
        };
        read().at(&format!("--task-data {}", task.name()))
    }

    /// Scores the requests; `None` if a rank was asked to stop. `done` is told how many are scored.
    ///
    /// # Errors
    /// Errors of [`score`]; a number that is not finite, such as a perplexity beyond the largest f64.
    pub fn scores(
        &self,
        model: &LocalModel<Gpt>,
        stop: &StopFlag,
        done: impl FnMut(usize),
    ) -> Result<Option<TaskResult>> {
        let config = ScoreConfig { micro_batch_size: self.micro_batch_size, top: 1 };
        let scores =
            score(model, &self.texts.requests(), config, stop, done).at(self.task.name())?;
        let Some(found) = scores.map(|scores| self.result(&scores)) else { return Ok(None) };
        match found.numbers.iter().find(|(_, value)| !value.is_finite()) {
            Some((name, value)) => {
                let message = format!("{name} is {value}: {}", found.text);
                Err(Error::value(self.task.name(), message))
            }
            None => Ok(Some(found)),
        }
    }

    fn result(&self, scores: &[Vec<TokenScore>]) -> TaskResult {
        match &self.texts {
            Texts::WikiText(texts) => {
                let found = texts.result(scores.iter().flatten().map(|token| token.log_prob).sum());
                TaskResult {
                    text: format!(
                        "adjusted perplexity {:.4} (perplexity {:.4}, loss {:.4} over {} tokens of {} words)",
                        found.adjusted_ppl, found.ppl, found.loss, found.tokens, found.words
                    ),
                    numbers: vec![
                        ("loss", found.loss),
                        ("ppl", found.ppl),
                        ("adjusted_ppl", found.adjusted_ppl),
                        ("token_ratio", found.token_ratio),
                        ("tokens", found.tokens as f64),
                        ("words", found.words as f64),
                    ],
                }
            }
            Texts::Lambada(_) => {
                let found = Lambada::result(scores);
                TaskResult {
                    text: format!(
                        "accuracy {:.4}, perplexity {:.4} over {} passages",
                        found.accuracy, found.perplexity, found.examples
                    ),
                    numbers: vec![
                        ("acc", found.accuracy),
                        ("perplexity", found.perplexity),
                        ("examples", found.examples as f64),
                    ],
                }
            }
        }
    }
}

impl EvaluationTask<Gpt> for GptTask {
    fn name(&self) -> &str {
        self.task.name()
    }

    fn data_crc32(&self) -> u32 {
        self.crc32
    }

    fn evaluate(&self, model: &LocalModel<Gpt>, stop: &StopFlag) -> Result<Option<TaskResult>> {
        self.scores(model, stop, |_| ())
    }
}

/// A fact about the data of each task, to be compared among ranks.
pub fn task_facts<'a, M: Model>(
    tasks: impl IntoIterator<Item = &'a (dyn EvaluationTask<M> + 'a)>,
) -> Facts {
    let fact = |task: &dyn EvaluationTask<M>| {
        (format!("the data of task {}", task.name()), format!("CRC-32 {:08x}", task.data_crc32()))
    };
    tasks.into_iter().map(fact).collect()
}

fn texts(task: Task, path: &Path, tokenizer: &Tokenizer, windows: WikiTextConfig) -> Result<Texts> {
    let mut documents = read_documents(&[path.to_path_buf()], TEXT)?;
    let lambada = |form, documents: &[String]| {
        Lambada::new(documents, tokenizer, form, windows.seq_length).map(Texts::Lambada)
    };
    // A text file is one document.
    if let (Task::Lambada | Task::LambadaOpenAi, [text]) = (task, &documents[..]) {
        let lines = text.lines().filter(|line| !line.trim().is_empty());
        documents = lines.map(String::from).collect();
    }
    match task {
        Task::Wikitext => {
            WikiText::new(&joined_lines(&documents), tokenizer, windows).map(Texts::WikiText)
        }
        Task::Lambada => lambada(LambadaForm::Strict, &documents),
        Task::LambadaOpenAi => lambada(LambadaForm::OpenAi, &documents),
        Task::Race => Err(Error::config("--tasks", "race is a task of a BERT")),
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
