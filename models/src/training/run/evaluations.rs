//! The evaluations of a run behind a step: its validation sets one after another, and its tasks.

use ferrotron_tensor::{ErrorKind, Result};

use crate::training::evaluate::Evaluation;
use crate::training::run::config::{Intervals, RunData, ValidationSet};
use crate::training::run::metrics::Metrics;
use crate::training::run::observer::Observer;
use crate::training::run::task::TaskResult;
use crate::training::stop::StopFlag;
use crate::training::trainer::{Model, Trainer};

/// The evaluation of a validation set.
#[derive(Debug, Clone, PartialEq)]
pub struct SetEvaluation {
    /// The name of the set, if the run has several.
    pub set: Option<String>,
    /// Its result.
    pub evaluation: Evaluation,
}

/// The evaluations that are due behind a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Due {
    pub sets: bool,
    pub tasks: bool,
}

impl Due {
    /// The evaluations that are due behind `step` of a run on `data`.
    pub fn after<M: Model>(step: u64, intervals: &Intervals, data: &RunData<M>) -> Due {
        let due =
            |every: u64| every > 0 && (step == intervals.train_iters || step.is_multiple_of(every));
        Due {
            sets: !data.validation.is_empty() && due(intervals.eval_interval),
            tasks: !data.tasks.is_empty() && due(intervals.eval_tasks_interval),
        }
    }

    pub fn any(self) -> bool {
        self.sets || self.tasks
    }
}

/// The results behind a step, as far as there was no request to stop.
#[derive(Debug, Default)]
pub(super) struct Results {
    pub sets: Vec<SetEvaluation>,
    pub tasks: Vec<(String, TaskResult)>,
    /// The mean loss over the tokens of all sets, once all are evaluated.
    validation_loss: Option<f64>,
}

impl Results {
    /// Adds the results to the step's metrics.
    pub fn add_to(&self, metrics: Metrics) -> Metrics {
        let loss = |found: &SetEvaluation| Some((found.set.clone()?, found.evaluation.loss));
        let has_numbers = |(_, result): &&(String, TaskResult)| !result.numbers.is_empty();
        let numbers = |(name, result): &(String, TaskResult)| {
            (name.clone(), result.numbers.iter().copied().collect())
        };
        Metrics {
            validation_loss: self.validation_loss,
            validation_losses: self.sets.iter().filter_map(loss).collect(),
            tasks: self.tasks.iter().filter(has_numbers).map(numbers).collect(),
            ..metrics
        }
    }
}

/// The mean loss over the tokens of all `sets`.
fn mean_loss(sets: &[SetEvaluation]) -> Option<f64> {
    if let [only] = sets {
        return Some(only.evaluation.loss);
    }
    let tokens: f64 = sets.iter().map(|found| found.evaluation.tokens as f64).sum();
    let sum = |found: &SetEvaluation| found.evaluation.loss * found.evaluation.tokens as f64;
    (tokens > 0.0).then(|| sets.iter().map(sum).sum::<f64>() / tokens)
}

/// Evaluates what is due behind the step that was taken last; less if the run is asked to stop. The `observer` of the first
/// rank is told each result.
pub(super) fn evaluate<M: Model>(
    due: Due,
    trainer: &Trainer<M>,
    data: &RunData<M>,
    intervals: &Intervals,
    stop: &StopFlag,
    mut observer: Option<&mut dyn Observer>,
) -> Result<Results> {
    let step = trainer.progress().step;
    let mut results = Results::default();
    for &ValidationSet { name, samples } in data.validation.iter().filter(|_| due.sets) {
        // Those of a step between two intervals, the last one, follow those of the interval before it.
        let number = step.saturating_sub(1) / intervals.eval_interval.max(1);
        let own = samples.of_evaluation(number);
        let samples = own.as_deref().unwrap_or(samples);
        let Some(evaluation) = trainer.evaluate(samples, stop)? else { return Ok(results) };
        if let Some(observer) = &mut observer {
            observer.evaluated(step, name, &evaluation);
        }
        results.sets.push(SetEvaluation { set: name.map(str::to_string), evaluation });
    }
    results.validation_loss = mean_loss(&results.sets);
    for task in data.tasks.iter().filter(|_| due.tasks) {
        match task.evaluate(&trainer.local_model(), stop) {
            Ok(None) => return Ok(results),
            Ok(Some(found)) => {
                if let Some(observer) = &mut observer {
                    observer.evaluated_task(step, task.name(), &found);
                }
                results.tasks.push((task.name().to_string(), found));
            }
            // All ranks have the same numbers, and later ones may be good.
            Err(error) if error.kind() == ErrorKind::Value => {
                if let Some(observer) = &mut observer {
                    observer.warning(&format!("step {step}: {error}"));
                }
            }
            Err(error) => return Err(error),
        }
    }
    Ok(results)
}
