//! The configuration of the loop over steps, from the options of `train`.

use ferrotron::Result;
use ferrotron::models::run::{Intervals, RunConfig};
use ferrotron::models::trainer::Trainer;
use std::path::PathBuf;

use super::architecture::TrainedModel;
use super::configuration::Configuration;
use super::run_folder;

/// The configuration of a run of `trainer` into `folder`, which has loaded the checkpoint `loaded`, if any.
///
/// Errors as the options that do not fit together.
pub fn run_config(
    configuration: &Configuration,
    trainer: &Trainer<impl TrainedModel>,
    intervals: Intervals,
    folder: PathBuf,
    loaded: Option<PathBuf>,
) -> Result<RunConfig> {
    let args = &configuration.args;
    Ok(RunConfig {
        metrics: run_folder::metrics(args, &folder),
        folder,
        loaded,
        intervals,
        seq_length: args.model.seq_length()?,
        retention: args.run.retention(),
        deadline: args.run.deadline(),
        eval_iters: args.evaluation.validation_iters(&args.run),
        trace: args.run.trace(trainer.progress().step),
        straggler_interval: args.run.straggler_interval(),
        options: configuration.remembered(trainer.config().batch_size.full_batch_size()),
    })
}
