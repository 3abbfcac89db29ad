//! Configuration of a trainer.

use ferrotron_autograd::ZeroEncoding;
use ferrotron_nn::schedule::LrSchedule as LearningRate;
use ferrotron_nn::{
    LossScale, LossScaler, Optimizer, OptimizerConfig, ParamPatterns, Rounding, WeightUpdate,
};
use ferrotron_parallel::collective::Group;
use ferrotron_parallel::data_parallel::DataParallelConfig;
use ferrotron_parallel::pipeline::ScheduleKind;
use ferrotron_tensor::{Device, Error, MemoryKind, Result};

use crate::io::checkpoint::TrainState;
use crate::model::gpt::{Recompute, SavedActivations};
use crate::training::batch_size::BatchSize;
use crate::training::trainer::bad_step::{BadStepConfig, OnBadStep};

/// Configuration of a trainer, besides model and data.
#[derive(Debug, Clone)]
pub struct TrainerConfig {
    /// Seed of initial weights, dropout and sample order.
    pub seed: u64,
    /// The optimizer with its hyperparameters.
    pub optimizer: OptimizerConfig,
    /// The parameters that are not trained, by global name. They have no gradient and no optimizer state, and ranks do not
    /// communicate about them; each rank holds its whole shard of them, also with ZeRO stage 3. Checkpoints have them.
    pub frozen: ParamPatterns,
    /// The parameters that stay in f32 in a model of 16 bits, by global name. Their gradients and states are in f32 too,
    /// and they have no master weights: see [`ParamOptions::dtype`](ferrotron_nn::ParamOptions::dtype).
    pub keep_in_fp32: ParamPatterns,
    /// Decay of an exponential moving average of the weights, if one is kept: see
    /// [`UpdateConfig`](ferrotron_nn::UpdateConfig).
    pub ema_decay: Option<f64>,
    /// Learning rate by update or by sample.
    pub schedule: LearningRate,
    /// The unit in which `schedule` counts.
    pub schedule_unit: ScheduleUnit,
    /// Maximum global gradient norm; 0 disables clipping.
    pub clip_grad: f64,
    /// Samples per step and per micro-batch.
    pub batch_size: BatchSize,
    /// Parallelism besides the sizes of the mesh.
    pub parallel: ParallelConfig,
    /// Training of 16-bit weights.
    pub precision: PrecisionConfig,
    /// The reaction to a loss or gradient norm that is not finite, and to spikes of the loss.
    pub bad_steps: BadStepConfig,
    /// Execution of steps on a GPU.
    pub execution: ExecutionMode,
    /// Whether checkpoints are written while training goes on.
    pub saves: SaveMode,
}

/// Whether training waits for a checkpoint that is being written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SaveMode {
    /// Waits until the checkpoint is published.
    #[default]
    Blocking,
    /// Waits for a copy of weights and optimizer state, from which a thread writes. The trainer allocates the memory of
    /// the copy when it is made.
    Async,
}

/// The unit in which a learning-rate schedule counts. Steps that are skipped do not count in either.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ScheduleUnit {
    /// Optimizer updates.
    #[default]
    Steps,
    /// Samples of optimizer updates, as with Megatron-LM's `--train-samples`.
    Samples,
}

/// Number of eager steps before a capture. They compile kernels and plan products, and their reports show whether the
/// step succeeds.
pub(super) const EAGER_STEPS: usize = 2;

/// Execution of steps on a GPU. It does not change a bit of the results.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ExecutionMode {
    /// Enqueue operations one by one.
    #[default]
    Eager,
    /// Capture equal steps once as a CUDA graph and replay it, which saves the host's time per operation. See
    /// [`Trainer::step`](super::Trainer::step).
    CudaGraph,
}

impl ExecutionMode {
    /// Number of steps before steps run at full speed.
    pub(crate) const fn first_steps(self) -> usize {
        match self {
            ExecutionMode::Eager => 0,
            ExecutionMode::CudaGraph => EAGER_STEPS + 1, // plus the captured step
        }
    }

    /// The reason why CUDA graphs are rejected on a CPU.
    pub const NEEDS_GPU: &str = "captures what a GPU is given: add --device cuda";

    /// The reason why CUDA graphs are rejected between ranks without NCCL.
    pub const NEEDS_NCCL: &str = "captures what NCCL sends between ranks, not what goes through memory of the hosts: give each \
                                  rank a GPU of its own by --device cuda, and leave out --transport";

    /// Errors if steps cannot be captured on this device, or what ranks send one another is not.
    pub(super) fn check(self, device: &Device, world: &Group) -> Result<()> {
        if self == ExecutionMode::Eager || device.is_fake() {
            return Ok(());
        }
        if !device.is_gpu() {
            return Err(Error::config("enable-cuda-graph", ExecutionMode::NEEDS_GPU));
        }
        if world.is_capturable() {
            return Ok(());
        }
        Err(Error::config("enable-cuda-graph", ExecutionMode::NEEDS_NCCL))
    }
}

impl TrainerConfig {
    /// AdamW with the hyperparameters and the clipping at 1 of GPT-3, and defaults otherwise.
    ///
    /// ```
    /// use ferrotron_models::batch_size::{BatchSize, BatchSizeConfig};
    /// use ferrotron_models::trainer::TrainerConfig;
    /// use ferrotron_nn::schedule::LrSchedule;
    /// let batch_size = BatchSizeConfig { micro_batch_size: 12, ..BatchSizeConfig::default() };
    /// let config = TrainerConfig::new(1234, LrSchedule::constant(1e-3)?, BatchSize::new(batch_size)?);
    /// let unclipped = TrainerConfig { clip_grad: 0.0, ..config };
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn new(seed: u64, schedule: LearningRate, batch_size: BatchSize) -> TrainerConfig {
        TrainerConfig {
            seed,
            optimizer: OptimizerConfig::ADAMW,
            frozen: ParamPatterns::default(),
            keep_in_fp32: ParamPatterns::default(),
            ema_decay: None,
            schedule,
            schedule_unit: ScheduleUnit::Steps,
            clip_grad: 1.0,
            batch_size,
            parallel: ParallelConfig::default(),
            precision: PrecisionConfig::default(),
            bad_steps: BadStepConfig::default(),
            execution: ExecutionMode::Eager,
            saves: SaveMode::Blocking,
        }
    }

    /// Errors, in one line, if the steps of so many pipeline stages cannot be captured as configured.
    ///
    /// | rejected | reason |
    /// |---|---|
    /// | more than one pipeline stage | messages between stages are not captured |
    /// | replicas that take steps of their own; bad steps that are skipped, spikes of the loss | the host reads the results of every step |
    /// | offloaded activations or optimizer states | the host controls their copies during a step |
    /// | sparse saved activations | the host reads their size during a step |
    /// | an update rule that is no kernel | the host reads the numbers of every step |
    pub fn check_execution(&self, stages: usize) -> Result<()> {
        let ParallelConfig { data_parallel, saved_activations, optimizer_states, .. } =
            self.parallel;
        let offloads =
            saved_activations.offloaded_layers > 0 || optimizer_states == MemoryKind::Host;
        let sparse = saved_activations.packing.zeros == ZeroEncoding::Bitmap;
        let why = match self.execution {
            ExecutionMode::Eager => return Ok(()),
            ExecutionMode::CudaGraph if stages > 1 => format!(
                "does not go with a pipeline of {stages} stages, whose messages are not captured: use other parallelism"
            ),
            ExecutionMode::CudaGraph
                if self.bad_steps.needs_host() || data_parallel.synchronize_every > 1 =>
            {
                "does not go with --on-bad-step skip or rewind, --loss-spike-factor or --local-sgd-steps, for which the \
                 host looks at every step"
                    .to_string()
            }
            ExecutionMode::CudaGraph if offloads => {
                "does not go with offloading, which the host directs while a step runs".to_string()
            }
            ExecutionMode::CudaGraph if sparse => {
                "does not go with sparse saved activations, whose size the host learns while a step runs".to_string()
            }
            ExecutionMode::CudaGraph if !self.optimizer.rule().is_fused() => {
                waits_for_numbers(self.optimizer.rule().name())
            }
            ExecutionMode::CudaGraph => return Ok(()),
        };
        Err(Error::config("enable-cuda-graph", why))
    }

    /// The reason why asynchronous updates are rejected on a GPU.
    pub(super) const ASYNC_NEEDS_CPU: &str =
        "does not go with a GPU, whose host does not know when a sum is complete: use --device cpu";

    /// Errors, in one line, if updates that ranks do not wait for do not go with the rest of the configuration.
    pub fn check_async(&self) -> Result<()> {
        let refuse = |why: &str| {
            let message = format!("does not go with {why}");
            Err(Error::config("--async-data-parallel", message))
        };
        if self.parallel.data_parallel.stale_updates().is_none() {
            return Ok(());
        }
        if self.precision.loss_scaler(&self.parallel)?.skips() {
            return refuse(
                "a dynamic loss scale, which is known behind the step before: give a constant --loss-scale, use --bf16, or \
                 --async-data-parallel=false",
            );
        }
        if self.bad_steps.on_bad_step != OnBadStep::Stop {
            return refuse(
                "--on-bad-step skip or rewind: later steps are under way when a bad one is found; use --on-bad-step stop, or \
                 --async-data-parallel=false",
            );
        }
        Ok(())
    }

    /// The learning rate of the step behind `progress` and so many updates.
    pub(super) fn lr(&self, progress: &TrainState, updates: u64) -> f64 {
        let position = match self.schedule_unit {
            ScheduleUnit::Steps => progress.steps_before + updates + 1,
            ScheduleUnit::Samples => {
                let TrainState { consumed_samples, skipped_samples, .. } = *progress;
                let batch = self.batch_size.global_batch_size(consumed_samples);
                consumed_samples - skipped_samples + batch as u64
            }
        };
        self.schedule.lr(position)
    }

    /// Errors, in one line, for a spike factor that is none, and if replicas that take steps of their own would skip some.
    pub fn check_bad_steps(&self) -> Result<()> {
        self.bad_steps.check(self.parallel.data_parallel.synchronize_every)
    }

    /// Errors as [`TrainerConfig::check_execution`] for a rule that only some parameters have.
    pub(super) fn check_rule(&self, optimizer: &Optimizer) -> Result<()> {
        match (self.execution, optimizer.unfused_rule()) {
            (ExecutionMode::CudaGraph, Some(rule)) => {
                Err(Error::config("enable-cuda-graph", waits_for_numbers(rule)))
            }
            _ => Ok(()),
        }
    }
}

/// The reason why the steps of an update rule cannot be captured.
fn waits_for_numbers(rule: &str) -> String {
    format!(
        "does not go with the optimizer '{rule}', for which the host reads the numbers of every step"
    )
}

/// Training of 16-bit weights: Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740.
/// [`DataParallelConfig`] has the dtype in which their gradients are summed.
#[derive(Debug, Clone, Copy)]
pub struct PrecisionConfig {
    /// The copy of the weights that is updated.
    pub weight_update: WeightUpdate,
    /// The rounding of updated weights.
    pub rounding: Rounding,
    /// Factor of the loss before backward.
    pub loss_scale: LossScale,
}

impl Default for PrecisionConfig {
    /// Master weights, rounding to nearest, and no loss scale.
    fn default() -> PrecisionConfig {
        PrecisionConfig {
            weight_update: WeightUpdate::default(),
            rounding: Rounding::default(),
            loss_scale: LossScale::NONE,
        }
    }
}

/// Parallelism besides the sizes of the mesh, and the placement of activations and state. The loss is unchanged,
/// except by local SGD, pipelines without a flush and 16-bit saved activations.
#[derive(Debug, Clone, Copy)]
pub struct ParallelConfig {
    /// The pipeline schedule.
    pub pipeline_schedule: ScheduleKind,
    /// Steps between those after which a pipeline without a flush is drained: their numbers are its multiples. Only then can
    /// the model be saved and evaluated.
    pub drain_interval: usize,
    /// Model chunks per pipeline stage.
    pub chunks: usize,
    /// Gradient reductions and sharding.
    pub data_parallel: DataParallelConfig,
    /// Activation recomputation.
    pub recompute: Recompute,
    /// Storage of saved activations.
    pub saved_activations: SavedActivations,
    /// Memory kind of the optimizer's moments and master weights.
    pub optimizer_states: MemoryKind,
}

impl Default for ParallelConfig {
    /// 1F1B with one chunk; nothing sharded, recomputed, compressed or offloaded. Without a flush, 50 steps between drains.
    fn default() -> ParallelConfig {
        ParallelConfig {
            pipeline_schedule: ScheduleKind::OneFOneB,
            drain_interval: 50,
            chunks: 1,
            data_parallel: DataParallelConfig::default(),
            recompute: Recompute::None,
            saved_activations: SavedActivations::default(),
            optimizer_states: MemoryKind::Device,
        }
    }
}

impl ParallelConfig {
    /// Steps between those after which all ranks hold one state of the model, to be saved and evaluated: 1, unless
    /// replicas take steps of their own or the pipeline is not flushed.
    pub fn state_interval(&self) -> u64 {
        match self.pipeline_schedule.flushes() {
            true => self.data_parallel.synchronization_interval() as u64,
            false => self.drain_interval as u64,
        }
    }

    /// The option that decides on [`ParallelConfig::state_interval`], and the reason why nothing is saved in between.
    pub fn state_interval_reason(&self) -> (&'static str, &'static str) {
        match (self.pipeline_schedule.flushes(), self.data_parallel.stale_updates()) {
            (false, _) => ("pipeline-drain-interval", "the pipeline has micro-batches in flight"),
            (true, Some(_)) => ("drain-interval", "some updates are outstanding"),
            (true, None) => ("local-sgd-steps", "the replicas' weights differ"),
        }
    }
}

impl PrecisionConfig {
    /// The initial loss scaler.
    ///
    /// Errors if the scale is out of range, or if it is dynamic and replicas take independent steps.
    pub fn loss_scaler(&self, parallel: &ParallelConfig) -> Result<LossScaler> {
        let scaler = LossScaler::new(self.loss_scale)?;
        match parallel.data_parallel.synchronize_every {
            every if every > 1 && scaler.skips() => Err(Error::config(
                "loss-scale",
                format!(
                    "a dynamic scale does not go with replicas that take {every} steps of their own: each would skip \
                     others; give a constant one"
                ),
            )),
            _ => Ok(scaler),
        }
    }
}
