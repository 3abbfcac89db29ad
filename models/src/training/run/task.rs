//! A task on which a run evaluates its model: anything but the loss over samples.

use ferrotron_tensor::Result;

use crate::training::evaluate::LocalModel;
use crate::training::model::Model;
use crate::training::stop::StopFlag;

/// A task on which a model is evaluated during a run.
pub trait EvaluationTask<M: Model> {
    /// The name of the task.
    fn name(&self) -> &str;

    /// A CRC-32 of the data that is evaluated, which all ranks must have alike; 0 for a task without data.
    fn data_crc32(&self) -> u32;

    /// Evaluates the model; `None` if a rank was asked to stop. All ranks call this, and get the same numbers.
    ///
    /// # Errors
    /// Numbers that are not finite, as errors of kind [`Value`](ferrotron_tensor::ErrorKind::Value) that name the task and
    /// are the same on all ranks: the run warns and goes on. As the model and the communication do, which ends the run.
    fn evaluate(&self, model: &LocalModel<M>, stop: &StopFlag) -> Result<Option<TaskResult>>;
}

/// The result of a task.
#[derive(Debug, Clone, PartialEq)]
pub struct TaskResult {
    /// Its numbers by name; none of a task that is a text.
    pub numbers: Vec<(&'static str, f64)>,
    /// The numbers in words.
    pub text: String,
}
