//! The options of `train`, with Megatron's names and defaults where it has them.

use clap::Args;
use ferrotron::models::batch_size::{BatchSize, BatchSizeConfig, Rampup};
use ferrotron::models::checkpoint::TrainState;
use ferrotron::models::run::Intervals;
use ferrotron::models::trainer::{
    BadStepConfig, ExecutionMode, OnBadStep, ParallelConfig, PrecisionConfig, SaveMode,
    ScheduleUnit, TrainerConfig,
};
use ferrotron::nn::ParamPatterns;
use ferrotron::{Device, Error, Result};

use crate::cli::args::data::DataArgs;
use crate::cli::args::device::{DeviceArgs, ExecutionArgs};
use crate::cli::args::evaluation::EvaluationArgs;
use crate::cli::args::learning_rate::LearningRateArgs;
use crate::cli::args::model::ModelArgs;
use crate::cli::args::offload::OffloadArgs;
use crate::cli::args::optimizer::OptimizerArgs;
use crate::cli::args::parallel::ParallelArgs;
use crate::cli::args::precision::PrecisionArgs;
use crate::cli::args::run::RunArgs;
use crate::cli::args::tensorboard::TensorboardArgs;
use crate::cli::options::spellings::SpellingArgs;

/// The option that begins a run within its order.
const CONSUMED: &str = "--consumed-train-samples";

#[derive(Debug, Clone, Args)]
pub struct TrainArgs {
    #[command(flatten)]
    pub data: DataArgs,
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub optimization: OptimizationArgs,
    #[command(flatten)]
    pub run: RunArgs,
    #[command(flatten)]
    pub evaluation: EvaluationArgs,
    #[command(flatten)]
    pub tensorboard: TensorboardArgs,
    #[command(flatten)]
    pub precision: PrecisionArgs,
    #[command(flatten)]
    pub parallel: ParallelArgs,
    #[command(flatten)]
    pub offload: OffloadArgs,
    #[command(flatten)]
    pub device: DeviceArgs,
    #[command(flatten)]
    pub execution: ExecutionArgs,
    #[command(flatten)]
    spellings: SpellingArgs,
}

impl TrainArgs {
    /// The device of rank `local_rank` of `ranks` on this machine.
    pub fn open_device(&self, ranks: usize, local_rank: usize) -> Result<Device> {
        let algorithms = self.execution.algorithms(&self.device)?;
        self.device.open_shared(ranks, local_rank, self.offload.folder(&self.run), algorithms)
    }

    /// Returns after which steps something is done, in a run that has come to `progress`.
    ///
    /// Errors as [`Intervals::check`].
    pub fn intervals(&self, trainer: &TrainerConfig, progress: &TrainState) -> Result<Intervals> {
        let parallel = &trainer.parallel;
        let every = parallel.state_interval().max(1);
        let train_iters = match self.optimization.train_samples {
            None => self.optimization.train_iters(parallel),
            Some(samples) => {
                let left = trainer.batch_size.steps_within(progress.consumed_samples, samples);
                (progress.step + left) / every * every
            }
        };
        let eval_interval = steps(self.run.eval_interval, 250, parallel);
        let intervals = Intervals {
            train_iters,
            save_interval: steps(self.run.save_interval, 500, parallel),
            eval_interval,
            eval_tasks_interval: self.evaluation.eval_tasks_interval.unwrap_or(eval_interval),
            exit_interval: self.run.exit_interval,
            log_interval: self.run.log_interval,
        };
        intervals.check(parallel)?;
        Ok(intervals)
    }
}

/// The number of steps that was typed, or a default after which all ranks hold one state of the model.
fn steps(typed: Option<u64>, default: u64, parallel: &ParallelConfig) -> u64 {
    typed.unwrap_or(default.next_multiple_of(parallel.state_interval().max(1)))
}

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Optimization")]
pub struct OptimizationArgs {
    /// Samples that go through the model at once, on each data-parallel rank
    #[arg(long, value_name = "N", default_value_t = 12)]
    pub micro_batch_size: usize,
    /// Samples per step, of all ranks [default: the micro-batch size x data-parallel ranks]
    #[arg(long, value_name = "N")]
    pub global_batch_size: Option<usize>,
    /// Grow the global batch from START by INCREMENT over SAMPLES samples
    #[arg(long, num_args = 3, value_names = ["START", "INCREMENT", "SAMPLES"])]
    pub rampup_batch_size: Option<Vec<u64>>,
    /// Steps to train [default: 1200]
    #[arg(long, value_name = "N", conflicts_with = "train_samples")]
    train_iters: Option<u64>,
    /// Samples to train on instead, as many whole steps as fit; the learning rate counts samples then
    #[arg(long, value_name = "N")]
    train_samples: Option<u64>,
    /// Begin a new run behind the first N samples of its order, at the step and learning rate of a run that has consumed
    /// them
    #[arg(long, value_name = "N")]
    consumed_train_samples: Option<u64>,
    /// Seed of weights, dropout and order of the data
    #[arg(long, value_name = "N", default_value_t = 1234)]
    pub seed: u64,
    #[command(flatten)]
    pub learning_rate: LearningRateArgs,
    /// Weight decay of matrices and embeddings
    #[arg(long, value_name = "X", default_value_t = 0.1)]
    pub weight_decay: f64,
    /// Largest global gradient norm; 0 switches clipping off
    #[arg(long, value_name = "X", default_value_t = 1.0)]
    pub clip_grad: f64,
    /// Reaction to a step whose loss or gradient norm is not finite, or whose loss is a spike: stop; skip it; or rewind to
    /// the last checkpoint and go on with the samples behind it
    #[arg(long, value_name = "REACTION", default_value = "stop")]
    pub on_bad_step: String,
    /// A step is bad, too, if its loss is over X times the running mean of the loss; 0 looks for no spikes
    #[arg(long, value_name = "X", default_value_t = 0.0)]
    pub loss_spike_factor: f64,
    #[command(flatten)]
    pub optimizer: OptimizerArgs,
    /// Parameters or modules that are not trained, by name: * stands for any text, and ! takes out again, as in '*,!norm_f'
    #[arg(long, value_name = "PATTERN", num_args = 1.., value_delimiter = ',')]
    pub freeze_parameters: Vec<String>,
}

impl OptimizationArgs {
    /// The trainer's configuration, with `data_parallel_size` ranks that see different samples.
    pub fn config(
        &self,
        data_parallel_size: usize,
        parallel: ParallelConfig,
        precision: PrecisionConfig,
    ) -> Result<TrainerConfig> {
        if self.train_iters == Some(0) {
            return Err(Error::config("--train-iters", "must be positive, got 0"));
        }
        if self.clip_grad.is_nan() || self.clip_grad < 0.0 {
            return Err(Error::config(
                "--clip-grad",
                format!("must be at least 0, got {}", self.clip_grad),
            ));
        }
        let relative = self.optimizer.ignores_lr();
        if relative && self.learning_rate.is_given() {
            return Err(Error::config(
                "--lr",
                "relative steps of Adafactor have a size of their own: leave it out, or add --adafactor-step-size \
                 scheduled",
            ));
        }
        let rampup = self.rampup_batch_size.as_deref().map(|values| Rampup {
            start: values[0] as usize,
            increment: values[1] as usize,
            samples: values[2],
        });
        let batch_size = BatchSize::new(BatchSizeConfig {
            micro_batch_size: self.micro_batch_size,
            data_parallel_size,
            global_batch_size: self.global_batch_size,
            rampup,
        })?;
        let (schedule_unit, length) = match self.train_samples {
            None => (ScheduleUnit::Steps, self.train_iters(&parallel)),
            Some(samples) if batch_size.steps_within(0, samples) > 0 => {
                (ScheduleUnit::Samples, samples)
            }
            Some(samples) => {
                let batch = batch_size.global_batch_size(0);
                let message = format!("{samples} is less than one global batch of {batch}");
                return Err(Error::config("--train-samples", message));
            }
        };
        Ok(TrainerConfig {
            seed: self.seed,
            optimizer: self.optimizer.config(self.weight_decay),
            frozen: self.frozen()?,
            keep_in_fp32: ParamPatterns::default(),
            ema_decay: self.optimizer.ema_decay()?,
            schedule: self.learning_rate.schedule(
                schedule_unit,
                length,
                batch_size.full_batch_size(),
            )?,
            schedule_unit,
            clip_grad: self.clip_grad,
            batch_size,
            parallel,
            precision,
            bad_steps: BadStepConfig {
                on_bad_step: self.on_bad_step.parse::<OnBadStep>()?,
                loss_spike_factor: Some(self.loss_spike_factor).filter(|factor| *factor != 0.0),
            },
            execution: ExecutionMode::Eager,
            saves: SaveMode::Blocking,
        })
    }

    /// The progress with which a new run begins.
    ///
    /// # Errors
    /// Samples beyond the end of the run, or that end within a step whose number decides the learning rate.
    pub fn start(&self, trainer: &TrainerConfig) -> Result<TrainState> {
        let Some(consumed_samples) = self.consumed_train_samples else {
            return Ok(TrainState::default());
        };
        let sizes = &trainer.batch_size;
        let refuse = |message: String| Err(Error::config(CONSUMED, message));
        let steps = self.train_iters(&trainer.parallel);
        let step = sizes.steps_within(0, consumed_samples);
        let is_over = match self.train_samples {
            Some(samples) => sizes.steps_within(consumed_samples, samples) == 0,
            None => step >= steps,
        };
        if is_over {
            let (option, length) = match self.train_samples {
                Some(samples) => ("--train-samples", samples),
                None => ("--train-iters", steps),
            };
            return refuse(format!(
                "no step is left behind {consumed_samples} samples of a run of {option} {length}: the length is that of \
                 the whole run, with the samples consumed"
            ));
        }
        let ends_a_step =
            consumed_samples == 0 || sizes.steps_within(0, consumed_samples - 1) + 1 == step;
        if self.train_samples.is_none() && !ends_a_step {
            let full = sizes.full_batch_size() as u64;
            let nearby = match self.rampup_batch_size {
                None => {
                    let before = consumed_samples / full * full;
                    format!("give {before} or {}", before + full)
                }
                Some(_) => "give the samples at the end of a step".to_string(),
            };
            return refuse(format!(
                "{consumed_samples} samples end within step {}, and with --train-iters the learning rate counts steps: \
                 {nearby}, or the length by --train-samples",
                step + 1
            ));
        }
        let every = trainer.parallel.state_interval();
        // A pipeline's first steps end at the next multiple.
        if trainer.parallel.pipeline_schedule.flushes() && !step.is_multiple_of(every) {
            let (option, reason) = trainer.parallel.state_interval_reason();
            return refuse(format!(
                "the run would begin behind step {step}, but {reason} unless the step is a multiple of {every}: use a \
                 divisor of {step} as --{option}"
            ));
        }
        Ok(TrainState { step, consumed_samples, steps_before: step, ..TrainState::default() })
    }

    fn frozen(&self) -> Result<ParamPatterns> {
        ParamPatterns::new(&self.freeze_parameters)
            .map_err(|error| Error::config("--freeze-parameters", error.context()))
    }

    /// The samples of a whole run of `train_iters` steps, as Megatron-LM counts them.
    ///
    /// # Errors
    /// Steps whose batch grows: only samples are counted then.
    pub fn samples(&self, train_iters: u64, full_batch_size: usize) -> Result<u64> {
        match self.train_samples {
            Some(samples) => Ok(samples),
            None if self.rampup_batch_size.is_some() => Err(Error::config(
                "--rampup-batch-size",
                "with --data-order megatron needs --train-samples, on which that order depends",
            )),
            None => Ok(train_iters.saturating_mul(full_batch_size as u64)),
        }
    }

    fn train_iters(&self, parallel: &ParallelConfig) -> u64 {
        steps(self.train_iters, 1200, parallel)
    }
}
