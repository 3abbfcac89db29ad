//! A training run: steps, evaluations, checkpoints and metrics, in one loop.
//!
//! The folder of a run holds `metrics.jsonl` (one object per step), `loss.svg`, and the checkpoints
//! `iter_NNNNNNN` with `latest` naming the newest. Whoever wants to watch gives an [`Observer`].

mod metrics;

use ferrotron_parallel::output_file::unwritable;
use ferrotron_parallel::trace::Trace;
use ferrotron_tensor::{Error, Result};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use crate::checkpoint;
use crate::data::{Dataset, Sampler, Validation};
use crate::evaluate::{Evaluation, evaluate};
use crate::plot::plot;
use crate::tokenizer::Tokenizer;
use crate::trainer::{StepReport, Trainer};

use metrics::MetricsLog;
pub use metrics::{Metrics, check_metrics};

/// How long a run is and what it leaves behind.
#[derive(Debug, Clone)]
pub struct RunConfig {
    /// Folder of the run.
    pub folder: PathBuf,
    /// After which steps something is done.
    pub intervals: Intervals,
    /// Tokens per sequence.
    pub seq_length: usize,
    /// Checkpoints to keep.
    pub save_retain: usize,
    /// Validation batches of an evaluation before the last.
    pub eval_iters: u64,
    /// Where metrics go.
    pub metrics: PathBuf,
    /// What to trace, if anything.
    pub trace: Option<TraceConfig>,
    /// What the checkpoint says of how the run was started.
    pub options: serde_json::Value,
}

/// After which steps of a run something is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Intervals {
    /// Number of the last step.
    pub train_iters: u64,
    /// Steps between checkpoints; 0 for none before the last.
    pub save_interval: u64,
    /// Steps between evaluations; 0 for none before the last.
    pub eval_interval: u64,
    /// Stop when the step number is a multiple of this.
    pub exit_interval: Option<u64>,
    /// Steps from one time that a GPU is waited for to the next, to see what its steps found; 0 for none before it has to
    /// be. The first step of a process is seen at once, and of a CPU every step.
    pub log_interval: u64,
}

impl Intervals {
    /// Errors, with what to choose instead, if a checkpoint or an evaluation would be due while replicas that
    /// are synchronized every `synchronize_every` steps differ.
    ///
    /// ```
    /// use ferrotron_models::run::Intervals;
    /// let intervals = Intervals {
    ///     train_iters: 800,
    ///     save_interval: 100,
    ///     eval_interval: 0,
    ///     exit_interval: None,
    ///     log_interval: 100,
    /// };
    /// assert!(intervals.check(4).is_ok());
    /// assert!(intervals.check(8).unwrap_err().to_string().ends_with("take 96 or 104"));
    /// ```
    pub fn check(&self, synchronize_every: usize) -> Result<()> {
        let every = synchronize_every.max(1) as u64;
        let numbers = [
            ("train-iters", self.train_iters),
            ("save-interval", self.save_interval),
            ("eval-interval", self.eval_interval),
            ("exit-interval", self.exit_interval.unwrap_or(0)),
        ];
        let Some((name, steps)) = numbers.into_iter().find(|(_, n)| !n.is_multiple_of(every))
        else {
            return Ok(());
        };
        let (below, above) = (steps / every * every, steps.next_multiple_of(every));
        let below = if below > 0 { format!("{below} or ") } else { String::new() };
        let message = format!(
            "{name} {steps} is not a multiple of local-sgd-steps {every}, and in between the replicas' weights \
             differ: take {below}{above}"
        );
        Err(Error::config("train", message))
    }
}

/// Which steps of a run are traced, and where to.
#[derive(Debug, Clone)]
pub struct TraceConfig {
    /// The file, written by the first rank when the last of the steps is done or the run ends.
    pub path: PathBuf,
    /// Numbers of the steps.
    pub steps: RangeInclusive<u64>,
}

/// Someone who watches a run.
pub trait Observer {
    /// After every step, as soon as it was given to the device.
    fn advanced(&mut self, _step: u64) {}
    /// After every step, when its numbers are known: several may come at once.
    fn step(&mut self, metrics: &Metrics);
    /// After every evaluation.
    fn evaluated(&mut self, step: u64, evaluation: &Evaluation);
    /// After every checkpoint.
    fn saved(&mut self, folder: &Path);
}

/// Why a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// All steps were taken.
    Finished,
    /// `exit_interval` was reached.
    ExitInterval,
    /// It was asked to stop.
    Stopped,
}

/// What a run leaves behind.
#[derive(Debug)]
pub struct Outcome {
    /// Why it ended.
    pub ended: Ended,
    /// The last evaluation, if there is validation data.
    pub evaluation: Option<Evaluation>,
    /// The last checkpoint.
    pub checkpoint: PathBuf,
}

/// Trains until the last step, or until `stop` is set on any rank: the step is finished and saved first. All
/// ranks of the trainer's mesh call this; the first one writes metrics and is watched.
///
/// Where replicas take steps of their own, it stops at the next step after which they are the same; errors as
/// [`Intervals::check`].
pub fn run(
    trainer: &mut Trainer,
    dataset: &Dataset,
    tokenizer: &Tokenizer,
    config: &RunConfig,
    stop: &AtomicBool,
    observer: &mut dyn Observer,
) -> Result<Outcome> {
    config.intervals.check(trainer.config().parallel.data_parallel.synchronize_every)?;
    let Intervals { train_iters, save_interval, eval_interval, exit_interval, log_interval } =
        config.intervals;
    let sampler = Sampler::new(dataset.train.clone(), config.seq_length, trainer.config().seed)?;
    let micro = trainer.config().batch_size.micro();
    let validation =
        dataset.validation.clone().map(|source| Validation::new(source, config.seq_length, micro));
    let validation = validation.transpose()?;
    std::fs::create_dir_all(&config.folder)
        .map_err(|error| unwritable("train", &config.folder, &error))?;
    let first = trainer.mesh().rank() == 0;
    let mut log = match first {
        true => Some(MetricsLog::open(&config.metrics, trainer.progress().step)?),
        false => None,
    };
    let mut tracing = Tracing::start(config.trace.as_ref(), trainer)?;
    let (mut evaluation, mut saved, mut steps) = (None, None, 0_u64);
    let mut take_steps = || -> Result<Ended> {
        let ended = loop {
            let done = trainer.progress().step;
            if done >= train_iters {
                break Ended::Finished;
            }
            // What is left behind is a checkpoint, for which replicas must have the same weights.
            let stopped = on_any_rank(trainer, stop.load(Relaxed))?;
            if stopped && trainer.steps_to_synchronization() == 0 {
                break Ended::Stopped;
            }
            if steps > 0 && exit_interval.is_some_and(|every| done.is_multiple_of(every)) {
                break Ended::ExitInterval;
            }
            tracing.step(trainer, &sampler)?;
            steps += 1;
            let step = trainer.progress().step;
            if first {
                observer.advanced(step);
            }
            let last = step == train_iters;
            let due = |every: u64| step.is_multiple_of(every) && !last;
            let evaluates = last || due(eval_interval);
            let reads = !trainer.scope().device().is_gpu() || due(log_interval) || steps == 1;
            if !(reads || evaluates || due(save_interval)) {
                continue;
            }
            let mut metrics = measure(trainer, config, &sampler)?;
            let mut newest = metrics.pop();
            tell(&mut log, &metrics, observer)?;
            if let Some(validation) = validation.as_ref().filter(|_| evaluates) {
                let limit = (!last).then_some(config.eval_iters);
                trainer.release_graph();
                let found = evaluate(trainer.parts(), trainer.mesh(), validation, limit)?;
                if let Some(metrics) = &mut newest {
                    metrics.validation_loss = Some(found.loss);
                }
                if first {
                    observer.evaluated(step, &found);
                }
                evaluation = last.then_some(found);
            }
            tell(&mut log, newest.as_slice(), observer)?;
            if due(save_interval) {
                let folder = save(trainer, tokenizer, config)?;
                if first {
                    observer.saved(&folder);
                }
                saved = Some((step, folder));
            }
        };
        tell(&mut log, &measure(trainer, config, &sampler)?, observer)?;
        Ok(ended)
    };
    let ended = take_steps();
    if ended.is_err() {
        // The steps before one that was lost are known.
        let known = trainer.known_reports();
        tell(&mut log, &metrics(trainer, config, &known), observer)?;
    }
    let ended = ended?;
    trainer.release_graph();
    tracing.finish()?;
    let checkpoint = match saved {
        Some((step, folder)) if step == trainer.progress().step => folder,
        _ => {
            let folder = save(trainer, tokenizer, config)?;
            if first {
                observer.saved(&folder);
            }
            folder
        }
    };
    if let Some(log) = &log {
        plot(&log.curve, &config.folder.join("loss.svg"))?;
    }
    Ok(Outcome { ended, evaluation, checkpoint })
}

/// The trace of a run's steps, if one is wanted and not written yet.
struct Tracing(Option<(RangeInclusive<u64>, Trace)>);

impl Tracing {
    fn start(config: Option<&TraceConfig>, trainer: &Trainer) -> Result<Tracing> {
        let begin = |TraceConfig { path, steps }: &TraceConfig| {
            let trace = Trace::start(path, trainer.mesh(), trainer.scope().device())?;
            Ok((steps.clone(), trace))
        };
        Ok(Tracing(config.map(begin).transpose()?))
    }

    /// The trainer's next step. One that is traced is waited for.
    fn step(&mut self, trainer: &mut Trainer, sampler: &Sampler) -> Result<()> {
        let number = trainer.progress().step + 1;
        match &self.0 {
            Some((steps, trace)) if steps.contains(&number) => trace.record(|| {
                trainer.advance(sampler)?;
                trainer.scope().device().synchronize()
            }),
            _ => trainer.advance(sampler),
        }?;
        match &self.0 {
            Some((steps, _)) if number >= *steps.end() => self.finish(),
            _ => Ok(()),
        }
    }

    fn finish(&mut self) -> Result<()> {
        self.0.take().map_or(Ok(()), |(_, trace)| trace.finish())
    }
}

/// Whether `here` is true on any rank.
fn on_any_rank(trainer: &Trainer, here: bool) -> Result<bool> {
    let found = trainer.mesh().world().sum(trainer.host(), f64::from(u8::from(here)))?;
    Ok(found > 0.0)
}

fn save(trainer: &Trainer, tokenizer: &Tokenizer, config: &RunConfig) -> Result<PathBuf> {
    let step = trainer.progress().step;
    let damaged = !trainer.buffers().weights_are_finite()?;
    if on_any_rank(trainer, damaged)? {
        let culprit = trainer.buffers().first_non_finite()?;
        let culprit = culprit.unwrap_or_else(|| "a weight of another rank".into());
        let message = format!("step {step}: not saved; first offender: {culprit}");
        return Err(Error::value("train", message));
    }
    let run = config.options.clone();
    let folder = trainer.save(&config.folder, Some(tokenizer), run)?;
    if trainer.mesh().rank() == 0 {
        checkpoint::retain(&config.folder, config.save_retain)?;
    }
    Ok(folder)
}

/// Writes and shows what is new, on the rank that does.
fn tell(
    log: &mut Option<MetricsLog>,
    metrics: &[Metrics],
    observer: &mut dyn Observer,
) -> Result<()> {
    let Some(log) = log else { return Ok(()) };
    metrics.iter().try_for_each(|metrics| {
        log.write(metrics)?;
        observer.step(metrics);
        Ok(())
    })
}

/// What is known of the steps since the last time.
fn measure(trainer: &mut Trainer, config: &RunConfig, sampler: &Sampler) -> Result<Vec<Metrics>> {
    let reports = trainer.reports(sampler)?;
    Ok(metrics(trainer, config, &reports))
}

fn metrics(trainer: &Trainer, config: &RunConfig, reports: &[StepReport]) -> Vec<Metrics> {
    reports.iter().map(|report| Metrics::of(trainer, config.seq_length, report)).collect()
}
