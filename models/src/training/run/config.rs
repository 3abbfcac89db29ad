//! The configuration of a run: its length, its intervals and the places of its files.

use ferrotron_tensor::{Error, Result};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Instant;

use crate::io::checkpoint::Retention;
use crate::io::data::{Dataset, FiniteSamples, Sampler, Samples, Validation};
use crate::io::tokenizer::Tokenizer;
use crate::training::model::Model;
use crate::training::run::task::EvaluationTask;
use crate::training::trainer::ParallelConfig;

/// The length of a run and the files that it writes.
#[derive(Debug, Clone)]
pub struct RunConfig {
    /// Folder of the run.
    pub folder: PathBuf,
    /// The checkpoint that the trainer has loaded, if any: until the run has written one, it is rewound to this one behind
    /// bad steps.
    pub loaded: Option<PathBuf>,
    /// Steps after which something is done.
    pub intervals: Intervals,
    /// Tokens per sequence.
    pub seq_length: usize,
    /// The checkpoints that are kept.
    pub retention: Retention,
    /// The step during which this time passes on the first rank is the last of this process, if there is one.
    pub deadline: Option<Instant>,
    /// Global batches of the validation set that every evaluation covers, the last one too: its first samples. All of
    /// it if `None`; 0 for no evaluation at all.
    pub eval_iters: Option<u64>,
    /// Steps between the times at which the [slowest ranks](super::Stragglers) are found, if they are.
    pub straggler_interval: Option<u64>,
    /// The file of metrics.
    pub metrics: PathBuf,
    /// The trace to record, if any.
    pub trace: Option<TraceConfig>,
    /// The options of the run, which the checkpoint records.
    pub options: serde_json::Value,
}

/// Steps of a run after which something is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Intervals {
    /// Number of the last step.
    pub train_iters: u64,
    /// Steps between checkpoints; 0 for none before the last.
    pub save_interval: u64,
    /// Steps between evaluations; one follows the last step; 0 for none at all.
    pub eval_interval: u64,
    /// Steps between evaluations of tasks; one follows the last step; 0 for none at all.
    pub eval_tasks_interval: u64,
    /// Stop when the step number is a multiple of this.
    pub exit_interval: Option<u64>,
    /// Steps between the times at which the host waits for a GPU to read its steps' numbers; 0 for none before it must.
    /// The first step of a process is read at once, and on a CPU every step.
    pub log_interval: u64,
}

impl Intervals {
    /// Errors, with what to choose instead, if a checkpoint or an evaluation would be due between the steps of
    /// [`ParallelConfig::state_interval`]: while replicas differ, or while a pipeline is not drained.
    ///
    /// ```
    /// use ferrotron_models::run::Intervals;
    /// use ferrotron_models::trainer::ParallelConfig;
    /// use ferrotron_parallel::pipeline::ScheduleKind;
    /// let intervals = Intervals {
    ///     train_iters: 800,
    ///     save_interval: 100,
    ///     eval_interval: 0,
    ///     eval_tasks_interval: 0,
    ///     exit_interval: None,
    ///     log_interval: 100,
    /// };
    /// let every = |drain_interval| ParallelConfig {
    ///     pipeline_schedule: ScheduleKind::PipeDream,
    ///     drain_interval,
    ///     ..ParallelConfig::default()
    /// };
    /// assert!(intervals.check(&every(4)).is_ok());
    /// assert!(intervals.check(&every(8)).unwrap_err().to_string().ends_with("take 96 or 104"));
    /// ```
    pub fn check(&self, parallel: &ParallelConfig) -> Result<()> {
        let every = parallel.state_interval().max(1);
        let numbers = [
            ("train-iters", self.train_iters),
            ("save-interval", self.save_interval),
            ("eval-interval", self.eval_interval),
            ("eval-tasks-interval", self.eval_tasks_interval),
            ("exit-interval", self.exit_interval.unwrap_or(0)),
        ];
        let Some((name, steps)) = numbers.into_iter().find(|(_, n)| !n.is_multiple_of(every))
        else {
            return Ok(());
        };
        let (below, above) = (steps / every * every, steps.next_multiple_of(every));
        let below = if below > 0 { format!("{below} or ") } else { String::new() };
        let (option, reason) = parallel.state_interval_reason();
        let message = format!(
            "{name} {steps} is not a multiple of {option} {every}, and in between {reason}: take {below}{above}"
        );
        Err(Error::config("train", message))
    }
}

/// The traced steps of a run, and the file of the trace.
#[derive(Debug, Clone)]
pub struct TraceConfig {
    /// The file, written by the first rank when the last of the steps is done or the run ends.
    pub path: PathBuf,
    /// Numbers of the steps.
    pub steps: RangeInclusive<u64>,
}

/// The samples of a run, and its tasks.
pub struct RunData<'a, M: Model> {
    /// The training samples.
    pub train: &'a dyn Samples,
    /// The sets of evaluations, which are evaluated one after another.
    pub validation: Vec<ValidationSet<'a>>,
    /// The tasks that are evaluated every [`Intervals::eval_tasks_interval`] steps.
    pub tasks: Vec<&'a dyn EvaluationTask<M>>,
    /// The tokenizer of the data, for checkpoints.
    pub tokenizer: Option<&'a Tokenizer>,
}

/// A set of samples for evaluations.
#[derive(Clone, Copy)]
pub struct ValidationSet<'a> {
    /// Its name, if the run has several.
    pub name: Option<&'a str>,
    /// Its samples.
    pub samples: &'a dyn FiniteSamples,
}

/// The samples that a run takes of token data.
#[derive(Debug, Clone)]
pub struct TokenSamples {
    /// The training samples.
    pub train: Sampler,
    /// The samples of evaluations, if there are any.
    pub validation: Option<Validation>,
}

impl TokenSamples {
    /// The samples as [`run`](super::run) takes them.
    pub fn run_data<'a, M: Model>(&'a self, tokenizer: &'a Tokenizer) -> RunData<'a, M> {
        let set = |samples: &'a Validation| ValidationSet { name: None, samples };
        RunData {
            train: &self.train,
            validation: self.validation.iter().map(set).collect(),
            tasks: Vec::new(),
            tokenizer: Some(tokenizer),
        }
    }
}

impl RunConfig {
    /// The samples of `dataset`: of its validation part as many as evaluations cover, or none if they are not wanted.
    /// `seed` decides the order of training, and `batch` is the number of samples of a global batch.
    ///
    /// # Errors
    /// The errors of [`Sampler::new`] and [`Validation::new`].
    pub fn samples(&self, dataset: &Dataset, seed: u64, batch: usize) -> Result<TokenSamples> {
        let train = Sampler::new(dataset.train.clone(), self.seq_length, seed)?;
        let wanted = self.intervals.eval_interval > 0 && self.eval_iters != Some(0);
        let source = dataset.validation.clone().filter(|_| wanted);
        let all = source.map(|source| Validation::new(source, self.seq_length)).transpose()?;
        let validation = match (all, self.eval_iters) {
            (Some(all), Some(batches)) => Some(all.first(batches.saturating_mul(batch as u64))?),
            (all, _) => all,
        };
        Ok(TokenSamples { train, validation })
    }
}
