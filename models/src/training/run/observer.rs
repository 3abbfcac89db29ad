//! The trait of whatever shows, records or counts what a run does.

use std::path::Path;

use crate::training::evaluate::Evaluation;
use crate::training::run::metrics::Metrics;
use crate::training::run::task::TaskResult;

/// Watches a run.
pub trait Observer {
    /// Called after every step, as soon as it was given to the device.
    fn advanced(&mut self, _step: u64) {}
    /// Called after every step, when its numbers are known: several may come at once.
    fn step(&mut self, metrics: &Metrics);
    /// Called after every evaluation of a validation set, which has a name if the run has several.
    fn evaluated(&mut self, step: u64, set: Option<&str>, evaluation: &Evaluation);
    /// Called after every evaluation of a task.
    fn evaluated_task(&mut self, _step: u64, _task: &str, _result: &TaskResult) {}
    /// Called after every checkpoint.
    fn saved(&mut self, folder: &Path);
    /// Called when something failed that does not end the run. Any rank may call it.
    fn warning(&mut self, message: &str);
}
