//! A training run: steps, evaluations, checkpoints and metrics, in one loop.
//!
//! The folder of a run holds `metrics.jsonl` (one object per step), `loss.svg`, and the checkpoints
//! `iter_NNNNNNN` with `latest` naming the newest. An [`Observer`] watches the run.
//!
//! After a step the checkpoint is written first: at once or, with
//! [`SaveMode::Async`](crate::training::trainer::SaveMode::Async), by a thread during the next steps. Between two steps
//! the ranks agree that all have written; then the first one publishes it. An evaluation, which may take long, follows
//! and ends when the run is asked to stop. Reports (metrics, traces, pictures) cannot end the run: a file that cannot be
//! written is an [`Observer::warning`].

mod config;
mod evaluations;
mod logged_step;
mod metrics;
mod observer;
mod reporting;
mod rewind;
mod saving;
mod stop_requests;
mod stragglers;
mod task;
mod tensorboard;
#[cfg(test)]
mod tests;
mod tracing;

use ferrotron_tensor::{ErrorKind, Result};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::io::checkpoint;
#[cfg(doc)]
use crate::io::data::Samples;
use crate::training::run_lock::RunLock;
use crate::training::stop::StopFlag;
use crate::training::trainer::{Model, StepReport, Trainer};

pub use config::{Intervals, RunConfig, RunData, TokenSamples, TraceConfig, ValidationSet};
pub use evaluations::SetEvaluation;
use evaluations::{Due, Results, evaluate};
pub use logged_step::{LoggedStep, read_metrics};
use metrics::MetricsLog;
pub use metrics::{Metrics, check_metrics};
pub use observer::Observer;
use saving::{Saving, is_async};
pub use stragglers::{SlowestRank, Stragglers};
pub use task::{EvaluationTask, TaskResult};
pub use tensorboard::{TensorboardConfig, TensorboardLog};
use tracing::Tracing;

/// The name in a checkpoint of what [`Samples::order_state`] gives, for [`Samples::resume_order`].
pub const ORDER_STATE: &str = "order";

/// A wait for a checkpoint is told from here on.
const NOTICEABLE: Duration = Duration::from_millis(100);

/// The reason for which a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// All steps were taken.
    Finished,
    /// `exit_interval` was reached.
    ExitInterval,
    /// The deadline has passed.
    Deadline,
    /// The run was asked to stop.
    Stopped,
}

/// The result of a run.
#[derive(Debug)]
pub struct RunResult {
    /// The reason for its end.
    pub stop_reason: StopReason,
    /// The evaluations of validation sets after the last step, as far as the run was not asked to stop before they were
    /// done.
    pub evaluations: Vec<SetEvaluation>,
    /// The last checkpoint.
    pub checkpoint: PathBuf,
}

/// Trains until the last step, or until `stop` is set on any rank: the step is finished and saved first. All
/// ranks of the trainer's mesh call this; the first one writes metrics and is watched.
///
/// A run whose replicas differ stops at the next step after which they are the same.
///
/// # Errors
/// Before the first step as [`Intervals::check`], [`check_metrics`] and
/// [`Trace::start`](ferrotron_parallel::trace::Trace::start). Later if a step is lost ([`Trainer::step`]), a checkpoint
/// cannot be saved, or the communication fails.
pub fn run<M: Model>(
    trainer: &mut Trainer<M>,
    data: &RunData<M>,
    config: &RunConfig,
    stop: &StopFlag,
    observer: &mut dyn Observer,
) -> Result<RunResult> {
    config.intervals.check(&trainer.config().parallel)?;
    let first = trainer.mesh().rank() == 0;
    let _lock = match first {
        true => Some(claim(&config.folder, trainer.progress().step, observer)?),
        false => None,
    };
    let open = || MetricsLog::open(&config.metrics, trainer.progress().step);
    let log = first.then(open).transpose()?;
    let tracing = Tracing::start(config.trace.as_ref(), trainer)?;
    let (evaluations, unlogged) = (Vec::new(), false);
    let saving = Saving::new(config, data.tokenizer, (first, trainer.progress().step));
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
        evaluations,
        saving,
        rewind_to,
        told_stragglers: [None; 2],
    };
    let ended = run.take_steps();
    if let Err(error) = &ended {
        // The steps before one that was lost are known.
        let known = run.trainer.completed_reports();
        run.tell(&run.metrics(&known));
        // All ranks have lost the step together, and can still finish the checkpoint before it.
        let together = error.kind() == ErrorKind::Value && error.op() == "train";
        if (together || run.trainer.mesh().world().size() == 1)
            && let Err(unsaved) = run.finish_saving()
        {
            run.observer.warning(&unsaved.to_string());
        }
    }
    let ended = ended?;
    run.trainer.release_graph();
    let checkpoint = run.save_last()?;
    run.finish_trace()?;
    run.draw();
    Ok(RunResult { stop_reason: ended, evaluations: run.evaluations, checkpoint })
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
    data: &'a RunData<'a, M>,
    config: &'a RunConfig,
    stop: &'a StopFlag,
    observer: &'a mut dyn Observer,
    /// Whether this rank writes and is watched.
    first: bool,
    log: Option<MetricsLog>,
    /// Whether the run has warned that lines of metrics are lost.
    unlogged: bool,
    tracing: Tracing,
    /// The evaluations of validation sets after the last step.
    evaluations: Vec<SetEvaluation>,
    saving: Saving<'a>,
    /// The checkpoint to which training is rewound behind a bad step, perhaps while it is being written.
    rewind_to: Option<PathBuf>,
    /// The ranks that were last named for computing and for waiting for samples longer than others.
    told_stragglers: [Option<usize>; 2],
}

impl<M: Model> Run<'_, M> {
    fn take_steps(&mut self) -> Result<StopReason> {
        let Intervals { train_iters, save_interval, exit_interval, log_interval, .. } =
            self.config.intervals;
        let mut steps = 0_u64;
        let ended = loop {
            let done = self.trainer.progress().step;
            if done >= train_iters {
                break StopReason::Finished;
            }
            // What is left behind is a checkpoint, for which replicas must have the same weights.
            let may_stop = self.trainer.steps_to_synchronization() == 0;
            let asks = may_stop || !self.trainer.is_async(); // waits for all ranks
            let exits = steps > 0 && exit_interval.is_some_and(|every| done.is_multiple_of(every));
            let (asked, begun) = match exits {
                true => (self.agree()?, None),
                false => {
                    let (asked, begun) = self.begin_step(asks)?;
                    (asked, Some(begun))
                }
            };
            if asked.stop && may_stop {
                break StopReason::Stopped;
            }
            if asked.late && may_stop && steps > 0 {
                break StopReason::Deadline;
            }
            let Some(begun) = begun else { break StopReason::ExitInterval };
            self.tracing.step(self.trainer, begun, self.data.train)?;
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
            let evaluates = Due::after(step, &self.config.intervals, self.data);
            let reads = !self.trainer.scope().device().is_gpu() || due(log_interval) || steps == 1;
            let stragglers = match self.config.straggler_interval {
                Some(every) if due(every) => Some(self.measure_stragglers()?),
                _ => None,
            };
            if !(reads || evaluates.any() || saves) && stragglers.is_none() {
                continue;
            }
            let mut metrics = self.measure()?;
            let newest = metrics.pop().map(|newest| Metrics { stragglers, ..newest });
            self.tell(&metrics);
            if evaluates.any() {
                self.trainer.release_graph(); // before anything else takes memory beside it
            }
            if saves && let Some(newest) = &newest {
                // A kill behind the save must not take the line of a step that is saved.
                self.log(newest);
            }
            let saved = match saves {
                // Behind the last step there is none that a writer could run beside.
                true if last || !is_async(self.trainer) => self.save_last().map(drop),
                true => self.begin_saving(),
                false => Ok(()),
            };
            if saved.is_ok() && due(save_interval) {
                self.rewind_to = Some(self.config.folder.join(checkpoint::folder_name(step)));
            }
            let found = match &saved {
                Ok(_) if evaluates.any() => self.evaluate(evaluates),
                _ => Ok(Results::default()),
            };
            // The step's line has the evaluations that follow it, and is there whatever fails.
            if let Some(newest) = newest {
                self.tell(&[match &found {
                    Ok(results) => results.add_to(newest),
                    Err(_) => newest,
                }]);
            }
            saved?;
            let found = found?;
            if last {
                self.evaluations = found.sets;
            }
        };
        let rest = self.measure()?;
        self.tell(&rest);
        Ok(ended)
    }

    /// Evaluates what is due; less if the run is asked to stop.
    fn evaluate(&mut self, due: Due) -> Result<Results> {
        let Run { trainer, data, config, stop, observer, first, .. } = self;
        let observer = first.then_some(&mut **observer as &mut dyn Observer);
        evaluate(due, trainer, data, &config.intervals, stop, observer)
    }

    /// Returns the checkpoint of the step that was taken last: waits for it if it is being written, and makes it if there
    /// is none.
    fn save_last(&mut self) -> Result<PathBuf> {
        self.finish_saving()?;
        if let Some(folder) = self.saving.folder(self.trainer.progress().step) {
            return Ok(folder);
        }
        self.record_order();
        let folder = self.saving.save(self.trainer)?;
        self.tell_saved(Some(folder.clone()));
        Ok(folder)
    }

    /// Notes the place in the order of the samples, for the next checkpoint.
    fn record_order(&mut self) {
        let consumed = self.trainer.progress().consumed_samples;
        if let Some(state) = self.data.train.order_state(consumed) {
            let mut progress = self.trainer.progress().clone();
            progress.extra.insert(ORDER_STATE.to_string(), state.into());
            self.trainer.set_progress(progress);
        }
    }

    /// Begins to write the checkpoint of the step that was taken last, after the one before it.
    fn begin_saving(&mut self) -> Result<()> {
        self.record_order();
        let Some(waited) = self.saving.begin(self.trainer)? else { return Ok(()) };
        self.tell_saved(Some(waited.folder));
        // Ranks agree between two steps that all have written: a save in every step finds the one before it unpublished.
        if self.first && waited.duration > NOTICEABLE {
            self.observer.warning(&format!(
                "step {}: waited {:.1} s for the checkpoint of step {}: writing one takes longer than the steps between two, \
                 choose a larger --save-interval",
                self.trainer.progress().step,
                waited.duration.as_secs_f64(),
                waited.step,
            ));
        }
        Ok(())
    }

    /// Waits for the checkpoint that is being written, if there is one.
    fn finish_saving(&mut self) -> Result<()> {
        let published = self.saving.finish()?;
        self.tell_saved(published);
        Ok(())
    }

    fn tell_saved(&mut self, published: Option<PathBuf>) {
        if let Some(folder) = published.filter(|_| self.first) {
            self.observer.saved(&folder);
        }
        self.saving.new_damage().for_each(|line| self.observer.warning(line));
    }

    /// Finds the slowest ranks since the last call, and warns of those for which others wait.
    fn measure_stragglers(&mut self) -> Result<Stragglers> {
        let found = Stragglers::measure(self.trainer)?;
        if self.first {
            let lines = found.warnings(self.trainer.progress().step, &mut self.told_stragglers);
            lines.iter().for_each(|line| self.observer.warning(line));
        }
        Ok(found)
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
}
