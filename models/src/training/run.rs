//! A training run: steps, evaluations, checkpoints and metrics, in one loop.
//!
//! The folder of a run holds `metrics.jsonl` (one object per step), `loss.svg`, and the checkpoints
//! `iter_NNNNNNN` with `latest` naming the newest. An [`Observer`] watches the run.
//!
//! After a step the checkpoint is written first. An evaluation, which may take long, follows it and ends when the run
//! is asked to stop. Reports (metrics, traces, pictures) cannot end the run: a file that cannot be written is an
//! [`Observer::warning`].

mod config;
mod metrics;
mod rewind;
mod tracing;

use ferrotron_tensor::{Error, ErrorKind, Result};
use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::io::checkpoint;
use crate::io::tokenizer::Tokenizer;
use crate::training::evaluate::Evaluation;
#[cfg(not(feature = "plot"))]
use crate::training::loss_curve::LossCurve;
#[cfg(feature = "plot")]
use crate::training::plot::plot;
use crate::training::run_lock::RunLock;
use crate::training::stop::{StopFlag, set_on_any_rank};
use crate::training::trainer::{Model, StepReport, Trainer};

pub use config::{Intervals, RunConfig, RunData, TokenSamples, TraceConfig};
use metrics::MetricsLog;
pub use metrics::{Metrics, check_metrics};
use tracing::Tracing;

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
    /// Called when something failed that does not end the run. Any rank may call it.
    fn warning(&mut self, message: &str);
}

/// Why a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// All steps were taken.
    Finished,
    /// `exit_interval` was reached.
    ExitInterval,
    /// The deadline has passed.
    Deadline,
    /// It was asked to stop.
    Stopped,
}

/// The result of a run.
#[derive(Debug)]
pub struct RunResult {
    /// Why it ended.
    pub stop_reason: StopReason,
    /// The evaluation after the last step, if the run evaluates and was not asked to stop before it was done.
    pub evaluation: Option<Evaluation>,
    /// The last checkpoint.
    pub checkpoint: PathBuf,
}

/// Trains until the last step, or until `stop` is set on any rank: the step is finished and saved first. All
/// ranks of the trainer's mesh call this; the first one writes metrics and is watched.
///
/// Where replicas take steps of their own, it stops at the next step after which they are the same.
///
/// # Errors
/// Before the first step as [`Intervals::check`], [`check_metrics`] and
/// [`Trace::start`](ferrotron_parallel::trace::Trace::start). Later if a step is lost ([`Trainer::step`]), a checkpoint
/// cannot be saved, or the communication fails.
pub fn run<M: Model>(
    trainer: &mut Trainer<M>,
    data: &RunData,
    config: &RunConfig,
    stop: &StopFlag,
    observer: &mut dyn Observer,
) -> Result<RunResult> {
    config.intervals.check(trainer.config().parallel.data_parallel.synchronize_every)?;
    let first = trainer.mesh().rank() == 0;
    let _lock = match first {
        true => Some(claim(&config.folder, trainer.progress().step, observer)?),
        false => None,
    };
    let open = || MetricsLog::open(&config.metrics, trainer.progress().step);
    let log = first.then(open).transpose()?;
    let tracing = Tracing::start(config.trace.as_ref(), trainer)?;
    let (evaluation, saved, unlogged) = (None, None, false);
    let rewind_to = config.loaded.as_deref().map(|loaded| config.rewind_to(loaded));
    let mut run = Run {
        trainer,
        data,
        config,
        stop,
        observer,
        first,
        log,
        unlogged,
        tracing,
        evaluation,
        saved,
        rewind_to,
    };
    let ended = run.take_steps();
    if ended.is_err() {
        // The steps before one that was lost are known.
        let known = run.trainer.completed_reports();
        run.tell(&run.metrics(&known));
    }
    let ended = ended?;
    run.trainer.release_graph();
    let checkpoint = run.save()?;
    run.finish_trace()?;
    run.draw();
    Ok(RunResult { stop_reason: ended, evaluation: run.evaluation, checkpoint })
}

/// Locks `folder` for a run that has taken `done` steps, before anything there is written, and removes the remains of a
/// killed run.
fn claim(folder: &Path, done: u64, observer: &mut dyn Observer) -> Result<RunLock> {
    let lock = RunLock::acquire(folder)?;
    if let Some(warning) = lock.warning() {
        observer.warning(warning);
    }
    // A run that was stopped before its first step resumes from its checkpoint of step 0.
    if done == 0 && !folder.join("iter_0000000").exists() {
        RunLock::check_new(folder)?;
    }
    checkpoint::clean(folder)?;
    Ok(lock)
}

/// A run on its way.
struct Run<'a, M: Model> {
    trainer: &'a mut Trainer<M>,
    data: &'a RunData<'a>,
    config: &'a RunConfig,
    stop: &'a StopFlag,
    observer: &'a mut dyn Observer,
    /// Whether this rank writes and is watched.
    first: bool,
    log: Option<MetricsLog>,
    /// Whether the run has warned that lines of metrics are lost.
    unlogged: bool,
    tracing: Tracing,
    /// The evaluation after the last step.
    evaluation: Option<Evaluation>,
    /// The last step that was saved, and where.
    saved: Option<(u64, PathBuf)>,
    /// The checkpoint to which training is rewound behind a bad step.
    rewind_to: Option<PathBuf>,
}

impl<M: Model> Run<'_, M> {
    fn take_steps(&mut self) -> Result<StopReason> {
        let Intervals { train_iters, save_interval, eval_interval, exit_interval, log_interval } =
            self.config.intervals;
        let mut steps = 0_u64;
        let ended = loop {
            let done = self.trainer.progress().step;
            if done >= train_iters {
                break StopReason::Finished;
            }
            // What is left behind is a checkpoint, for which replicas must have the same weights.
            let may_stop = self.trainer.steps_to_synchronization() == 0;
            let [stopped, late] = self.has_to_end()?;
            if stopped && may_stop {
                break StopReason::Stopped;
            }
            if late && may_stop && steps > 0 {
                break StopReason::Deadline;
            }
            if steps > 0 && exit_interval.is_some_and(|every| done.is_multiple_of(every)) {
                break StopReason::ExitInterval;
            }
            self.tracing.step(self.trainer, self.data.train)?;
            steps += 1;
            if self.trainer.must_rewind() {
                self.rewind()?;
            }
            let step = self.trainer.progress().step;
            if self.first {
                self.observer.advanced(step);
            }
            if self.tracing.ends_with(step) {
                self.finish_trace()?;
            }
            let last = step == train_iters;
            let due = |every: u64| step.is_multiple_of(every);
            let saves = last || due(save_interval);
            let evaluates = self.data.validation.is_some() && (last || due(eval_interval));
            let reads = !self.trainer.scope().device().is_gpu() || due(log_interval) || steps == 1;
            if !(reads || evaluates || saves) {
                continue;
            }
            let mut metrics = self.measure()?;
            let newest = metrics.pop();
            self.tell(&metrics);
            if evaluates {
                self.trainer.release_graph(); // before anything else takes memory beside it
            }
            let saved = if saves { self.save() } else { Ok(PathBuf::new()) };
            if let Ok(folder) = saved.as_ref()
                && due(save_interval)
            {
                self.rewind_to = Some(folder.clone());
            }
            let found = match &saved {
                Ok(_) if evaluates => self.evaluate(step),
                _ => Ok(None),
            };
            // The step's line has the evaluation that follows it, and is there whatever fails.
            let validation_loss = found.as_ref().ok().and_then(|found| Some(found.as_ref()?.loss));
            if let Some(newest) = newest {
                self.tell(&[Metrics { validation_loss, ..newest }]);
            }
            saved?;
            self.evaluation = found?.filter(|_| last);
        };
        let rest = self.measure()?;
        self.tell(&rest);
        Ok(ended)
    }

    /// Whether a rank was asked to stop, and whether the deadline has passed on the first rank, whose clock decides for all:
    /// one call of all ranks.
    fn has_to_end(&self) -> Result<[bool; 2]> {
        let late = self.first && self.config.deadline.is_some_and(|at| Instant::now() >= at);
        let (world, host) = (self.trainer.mesh().world(), self.trainer.host());
        set_on_any_rank([self.stop.is_set(), late], world, host)?.wait()
    }

    /// Evaluates the model on the validation set; returns nothing if the run is asked to stop.
    fn evaluate(&mut self, step: u64) -> Result<Option<Evaluation>> {
        let Some(validation) = self.data.validation else { return Ok(None) };
        let found = self.trainer.evaluate(validation, self.stop)?;
        if let Some(found) = found.as_ref().filter(|_| self.first) {
            self.observer.evaluated(step, found);
        }
        Ok(found)
    }

    /// The checkpoint of the step that was taken last, which is made if there is none.
    fn save(&mut self) -> Result<PathBuf> {
        let step = self.trainer.progress().step;
        if let Some((saved, folder)) = &self.saved
            && *saved == step
        {
            return Ok(folder.clone());
        }
        let folder = save(self.trainer, self.data.tokenizer, self.config)?;
        if self.first {
            self.observer.saved(&folder);
        }
        self.saved = Some((step, folder.clone()));
        Ok(folder)
    }

    /// Collects the metrics of the steps since the last call.
    fn measure(&mut self) -> Result<Vec<Metrics>> {
        let reports = self.trainer.drain_reports(self.data.train)?;
        Ok(self.metrics(&reports))
    }

    fn metrics(&self, reports: &[StepReport]) -> Vec<Metrics> {
        let of = |report| Metrics::from_report(self.trainer, self.config.seq_length, report);
        reports.iter().map(of).collect()
    }

    /// Writes and shows what is new, on the rank that does.
    fn tell(&mut self, metrics: &[Metrics]) {
        let Some(log) = &mut self.log else { return };
        for metrics in metrics {
            if let Err(error) = log.write(metrics)
                && !std::mem::replace(&mut self.unlogged, true)
            {
                let message =
                    format!("{error}; training goes on, and the lines of such steps are lost");
                self.observer.warning(&message);
            }
            self.observer.step(metrics);
        }
    }

    /// Writes the trace, if there is one and it is not written. Errors as the communication does.
    fn finish_trace(&mut self) -> Result<()> {
        match self.tracing.finish() {
            Err(error) if error.kind() == ErrorKind::Io => {
                self.observer.warning(&format!("{error}; the trace is not complete"));
                Ok(())
            }
            finished => finished,
        }
    }

    /// Draws the loss curve, on the rank that does.
    fn draw(&mut self) {
        let Some(log) = &self.log else { return };
        if let Err(error) = plot(&log.curve, &self.config.folder.join("loss.svg")) {
            self.observer.warning(&error.to_string());
        }
    }
}

/// Draws nothing, for want of the feature `plot`.
#[cfg(not(feature = "plot"))]
fn plot(_: &LossCurve, _: &Path) -> Result<()> {
    Ok(())
}

fn save<M: Model>(
    trainer: &Trainer<M>,
    tokenizer: Option<&Tokenizer>,
    config: &RunConfig,
) -> Result<PathBuf> {
    let step = trainer.progress().step;
    let damaged = !trainer.buffers().weights_are_finite()?;
    let damaged = f64::from(u8::from(damaged));
    if trainer.mesh().world().sum(trainer.host(), damaged)? > 0.0 {
        let culprit = trainer.buffers().first_non_finite()?;
        let culprit = culprit.unwrap_or_else(|| "a weight of another rank".into());
        let message = format!("step {step}: not saved; first offender: {culprit}");
        return Err(Error::value("train", message));
    }
    let run = config.options.clone();
    let folder = trainer.save(&config.folder, tokenizer, run)?;
    if trainer.mesh().rank() == 0 {
        config.retention.apply(&config.folder)?;
    }
    Ok(folder)
}
