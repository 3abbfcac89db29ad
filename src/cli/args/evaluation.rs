//! The options of evaluations during a run, beside their interval.

use clap::Args;
use ferrotron::{Error, Result};
use std::path::PathBuf;

use crate::cli::args::run::RunArgs;
use crate::cli::options::Options;
use crate::cli::tasks::{Task, with_data};

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Evaluation")]
pub struct EvaluationArgs {
    /// Evaluate each set of --valid-data-path, --data-path or --valid-data by itself, and report each loss by the set's name
    #[arg(long)]
    pub multiple_validation_sets: bool,
    /// Evaluate whole validation sets; --eval-iters is about the test part alone then
    #[arg(long)]
    pub full_validation: bool,
    /// Samples of a batch, which --eval-iters counts [default: the global batch size]
    #[arg(long, value_name = "N")]
    pub eval_global_batch_size: Option<usize>,
    /// Tasks on which a GPT is evaluated every --eval-tasks-interval steps, on the data of --task-data
    #[arg(long, value_name = "TASK", value_enum, value_delimiter = ',', num_args = 1..)]
    pub eval_tasks: Vec<Task>,
    /// Data of each task as TASK=PATH, as of eval
    #[arg(long, value_name = "TASK=PATH", num_args = 1.., requires = "eval_tasks")]
    task_data: Vec<String>,
    /// Steps between evaluations of tasks; one follows the last step [default: --eval-interval]
    #[arg(long, value_name = "N")]
    pub eval_tasks_interval: Option<u64>,
    /// Tokens between the windows of the task wikitext; of each window but the first the last ones so many are scored
    #[arg(long, value_name = "N", default_value_t = 32)]
    pub overlapping_eval: usize,
}

impl EvaluationArgs {
    /// Batches of an evaluation of the validation part; `None` for all of it.
    pub fn validation_iters(&self, run: &RunArgs) -> Option<u64> {
        run.eval_iters.0.filter(|_| !self.full_validation)
    }

    /// The tasks, each with the path of its data.
    ///
    /// # Errors
    /// A task of a BERT, without data, or with data named twice; data of no task.
    pub fn tasks(&self) -> Result<Vec<(Task, PathBuf)>> {
        if self.eval_tasks.contains(&Task::Race) {
            let message = "race is a task of a BERT, which --task race trains: --valid-data measures its accuracy";
            return Err(Error::config("--eval-tasks", message));
        }
        with_data("--eval-tasks", &self.eval_tasks, &self.task_data)
    }

    /// Errors for an option that was given for this run, and that its intervals leave without effect. One that a checkpoint
    /// remembers may be without effect.
    pub fn check_used(&self, options: &Options, run: &RunArgs, samples: bool) -> Result<()> {
        let refuse = |option, message: &str| Err(Error::config(option, message));
        let (interval, of_tasks) = (run.eval_interval, self.eval_tasks_interval);
        if of_tasks.or(interval) == Some(0) {
            let zero = if of_tasks.is_some() { "--eval-tasks-interval" } else { "--eval-interval" };
            let message = format!(
                "has no effect with {zero} 0: leave it out, or give --eval-tasks-interval a number of steps"
            );
            for option in ["--eval-tasks", "--log-samples-to-tensorboard"] {
                if options.is_given(option.trim_start_matches('-')) {
                    return refuse(option, &message);
                }
            }
        }
        if options.is_given("eval-tasks-interval") && self.eval_tasks.is_empty() && !samples {
            let message = "has no effect without --eval-tasks or --log-samples-to-tensorboard: leave it out, or give one \
                           of them";
            return refuse("--eval-tasks-interval", message);
        }
        let evaluates = interval != Some(0) && self.validation_iters(run) != Some(0);
        if options.is_given("multiple-validation-sets") && !evaluates {
            let message = "has no effect with --eval-interval 0 or --eval-iters 0: leave it out, or give larger numbers";
            return refuse("--multiple-validation-sets", message);
        }
        Ok(())
    }

    /// Errors for numbers that mean nothing.
    pub fn validate(&self) -> Result<()> {
        if self.eval_global_batch_size == Some(0) {
            return Err(Error::config("--eval-global-batch-size", "must be positive, got 0"));
        }
        self.tasks().map(drop)
    }
}
