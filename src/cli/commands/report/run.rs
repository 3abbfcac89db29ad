//! A run as the page shows it: curves and totals of its metrics, options of its newest checkpoint.

use clap::FromArgMatches;
use ferrotron::models::checkpoint::Checkpoint;
use ferrotron::models::run::{LoggedStep, read_metrics};
use ferrotron::parallel::agreement::Facts;
use ferrotron::parallel::pipeline::PipelineConfig;
use ferrotron::{Error, Result};
use serde_json::Value;
use std::collections::{BTreeMap, VecDeque};
use std::path::Path;

use super::schedule;
use super::series::Series;
use crate::cli::args::train::TrainArgs;
use crate::cli::configuration;
use crate::cli::definition::Definition;
use crate::cli::options::remembered;

/// Evaluations in the table of a run, the last ones.
const EVALUATIONS: usize = 12;

/// Numbers of tasks that say how large their data is.
const SIZES: [&str; 4] = ["examples", "token_ratio", "tokens", "words"];

/// One run.
pub struct ReportedRun {
    /// The path, as it was typed.
    pub name: String,
    pub curves: Curves,
    pub totals: Totals,
    /// The options by name; none without a checkpoint.
    pub options: Option<Facts>,
    /// The pipeline, if there is one.
    pub pipeline: Option<PipelineConfig>,
    /// The reason why options are not known.
    pub note: Option<String>,
}

/// The curves of a run over its steps.
#[derive(Default)]
pub struct Curves {
    pub loss: Series,
    pub validation_loss: Series,
    pub learning_rate: Series,
    pub grad_norm: Series,
    pub tokens_per_second: Series,
    pub memory: Series,
    pub loss_scale: Series,
    /// The loss over tokens in place of steps.
    pub loss_by_tokens: Series,
    /// The losses of validation sets and the numbers of tasks, by name.
    pub named: BTreeMap<String, Series>,
}

/// Numbers of a whole run.
#[derive(Default)]
pub struct Totals {
    pub steps: u64,
    pub last_step: u64,
    pub skipped: u64,
    pub tokens: u64,
    /// Tokens of the steps with a duration, and their seconds.
    timed_tokens: u64,
    pub seconds: f64,
    data_seconds: f64,
    operations: f64,
    pub peak_bytes: Option<u64>,
    pub host_peak_bytes: Option<u64>,
    /// The step of the least validation loss, and this.
    pub best: Option<(u64, f64)>,
    /// The last evaluations.
    pub evaluations: VecDeque<(u64, f64)>,
    /// The last losses of validation sets and numbers of tasks, by name.
    pub named: VecDeque<(u64, BTreeMap<String, f64>)>,
    /// The tokens of the first step.
    pub tokens_per_step: u64,
}

impl Totals {
    /// Tokens per second over the whole run.
    pub fn tokens_per_second(&self) -> Option<f64> {
        (self.seconds > 0.0).then(|| self.timed_tokens as f64 / self.seconds)
    }

    /// 10^12 floating-point operations per second over the whole run.
    pub fn tflops(&self) -> Option<f64> {
        (self.seconds > 0.0 && self.operations > 0.0).then(|| self.operations / self.seconds)
    }

    /// The share of the time in which the first rank waited for samples.
    pub fn data_share(&self) -> Option<f64> {
        (self.seconds > 0.0).then(|| self.data_seconds / self.seconds)
    }
}

impl ReportedRun {
    /// Reads the folder of a run, or a file of metrics.
    pub fn read(path: &Path, definition: &Definition) -> Result<ReportedRun> {
        let metrics = if path.is_dir() { path.join("metrics.jsonl") } else { path.to_path_buf() };
        if !metrics.exists() {
            let message = format!(
                "there is no {}: name the folder of a run, or the file of its --metrics",
                metrics.display()
            );
            return Err(Error::config("report", message));
        }
        let (mut curves, mut totals) = (Curves::default(), Totals::default());
        read_metrics(&metrics, |step| add(&mut curves, &mut totals, &step))?;
        if totals.steps == 0 {
            let message = format!("{} has no steps yet", metrics.display());
            return Err(Error::config("report", message));
        }
        let folder = if path.is_dir() { path } else { metrics.parent().unwrap_or(Path::new(".")) };
        let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
        let (options, pipeline, note) = match options(folder, definition) {
            Ok((options, pipeline)) => (Some(options), pipeline, None),
            Err(error) => (None, None, Some(error.to_string())),
        };
        let name = path.display().to_string();
        Ok(ReportedRun { name, curves, totals, options, pipeline, note })
    }
}

fn add(curves: &mut Curves, totals: &mut Totals, line: &LoggedStep) {
    let step = line.step;
    totals.steps += 1;
    totals.last_step = step;
    totals.skipped += u64::from(line.skipped);
    totals.tokens = totals.tokens.saturating_add(line.tokens);
    if totals.steps == 1 {
        totals.tokens_per_step = line.tokens;
    }
    if let Some(milliseconds) = line.step_ms {
        let seconds = milliseconds / 1e3;
        totals.seconds += seconds;
        totals.timed_tokens = totals.timed_tokens.saturating_add(line.tokens);
        totals.data_seconds += line.data_wait_ms.unwrap_or(0.0) / 1e3;
        totals.operations += line.tflops.unwrap_or(0.0) * seconds;
    }
    totals.peak_bytes = totals.peak_bytes.max(line.mem_peak_bytes);
    totals.host_peak_bytes = totals.host_peak_bytes.max(line.host_peak_bytes);
    let bytes = line.mem_peak_bytes.map(|bytes| bytes as f64);
    for (series, value) in [
        (&mut curves.loss, line.loss),
        (&mut curves.validation_loss, line.validation_loss),
        (&mut curves.learning_rate, Some(line.lr)),
        (&mut curves.grad_norm, line.grad_norm),
        (&mut curves.tokens_per_second, line.tokens_per_s),
        (&mut curves.memory, bytes),
        (&mut curves.loss_scale, line.loss_scale),
    ] {
        if let Some(value) = value {
            series.push(step, value);
        }
    }
    if let Some(loss) = line.loss {
        curves.loss_by_tokens.push(totals.tokens, loss);
    }
    let named = named(line);
    for (name, &value) in &named {
        curves.named.entry(name.clone()).or_default().push(step, value);
    }
    if !named.is_empty() {
        totals.named.push_back((step, named));
        if totals.named.len() > EVALUATIONS {
            totals.named.pop_front();
        }
    }
    if let Some(loss) = line.validation_loss {
        if totals.best.is_none_or(|(_, best)| loss < best) {
            totals.best = Some((step, loss));
        }
        totals.evaluations.push_back((step, loss));
        if totals.evaluations.len() > EVALUATIONS {
            totals.evaluations.pop_front();
        }
    }
}

/// The losses of validation sets and the numbers of tasks in a line. What is the same in each evaluation is left out.
fn named(line: &LoggedStep) -> BTreeMap<String, f64> {
    let losses = line.validation_losses.iter();
    let losses = losses.filter_map(|(set, loss)| Some((format!("loss of {set}"), (*loss)?)));
    let numbers = line.tasks.iter().flat_map(|(task, numbers)| {
        let changing = numbers.iter().filter(|(name, _)| !SIZES.contains(&name.as_str()));
        changing.filter_map(move |(name, value)| Some((format!("{task} {name}"), (*value)?)))
    });
    losses.chain(numbers).collect()
}

/// The options of the newest checkpoint in `folder` with their defaults, those of the model, and the pipeline.
fn options(folder: &Path, definition: &Definition) -> Result<(Facts, Option<PipelineConfig>)> {
    let checkpoint = Checkpoint::peek(folder)?;
    let (saved, _) = remembered::of_checkpoint(&checkpoint, definition)?;
    let refuse = |why: String| Error::config("report", format!("{checkpoint}: {why}"));
    let matches = definition.words_of("train", saved.words().into_iter()).map_err(refuse)?;
    let args = TrainArgs::from_arg_matches(&matches).map_err(|error| refuse(error.to_string()))?;
    let mut facts = configuration::facts(&matches, definition);
    if let Value::Object(config) = &checkpoint.model().config {
        for (name, value) in config {
            let text = value.as_str().map_or_else(|| value.to_string(), str::to_string);
            facts.insert(format!("model: {name}"), text);
        }
    }
    facts.insert("model: architecture".to_string(), checkpoint.model().architecture.clone());
    Ok((facts, schedule::pipeline(&args)))
}

/// Numbers the runs that were named more than once.
pub fn number_equal_names(runs: &mut [ReportedRun]) {
    for index in 1..runs.len() {
        let (before, run) = runs.split_at_mut(index);
        let name = run[0].name.clone();
        let same = before.iter().filter(|other| other.name == name).count();
        if same > 0 {
            run[0].name = format!("{name} ({})", same + 1);
        }
    }
}
