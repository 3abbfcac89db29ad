//! What a trainer needs besides model and data.

use ferrotron_autograd::Zeros;
use ferrotron_nn::schedule::Schedule as LearningRate;
use ferrotron_nn::{LossScale, LossScaler, OptimizerConfig, Rounding, WeightUpdate};
use ferrotron_parallel::data_parallel::DataParallelConfig;
use ferrotron_parallel::pipeline::ScheduleKind;
use ferrotron_tensor::{Error, MemoryKind, Result};

use crate::batch_size::BatchSize;
use crate::gpt::{Recompute, SavedActivations};

/// What a trainer needs besides model and data.
#[derive(Debug, Clone)]
pub struct TrainerConfig {
    /// Seed of initial weights, dropout and sample order.
    pub seed: u64,
    /// Which optimizer, with its constants.
    pub optimizer: OptimizerConfig,
    /// Learning rate by step.
    pub schedule: LearningRate,
    /// Largest global gradient norm; 0 switches clipping off.
    pub clip_grad: f64,
    /// Samples per step and per micro-batch.
    pub batch_size: BatchSize,
    /// How the work is spread over the ranks of the mesh.
    pub parallel: ParallelConfig,
    /// How weights of 16 bits are trained.
    pub precision: PrecisionConfig,
    /// How a GPU is given a step.
    pub execution: Execution,
}

/// Steps that are taken as they are before one is captured. Kernels are compiled in them and products planned, and their
/// reports say whether the step works at all.
pub(super) const EAGER_STEPS: usize = 2;

/// How a GPU is given the work of a step. Nothing here changes a bit of what is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Execution {
    /// Operation by operation.
    #[default]
    Eager,
    /// As a whole: steps that are alike are captured once and replayed, which takes the host's time for the operations
    /// away. See [`Trainer::step`](super::Trainer::step).
    CudaGraph,
}

impl Execution {
    /// Steps that are taken before one is as fast as those after it.
    pub(crate) const fn first_steps(self) -> usize {
        match self {
            Execution::Eager => 0,
            Execution::CudaGraph => EAGER_STEPS + 1, // and the one that is captured
        }
    }

    /// Why a CPU is refused.
    pub const NEEDS_GPU: &str = "captures what a GPU is given: add --device cuda";
}

impl TrainerConfig {
    /// AdamW with the constants of GPT-3, which clips at 1 too, and all else by default.
    ///
    /// ```
    /// use ferrotron_models::batch_size::{BatchSize, BatchSizeConfig};
    /// use ferrotron_models::trainer::TrainerConfig;
    /// use ferrotron_nn::schedule::Schedule;
    /// let batch_size = BatchSizeConfig { micro_batch_size: 12, ..BatchSizeConfig::default() };
    /// let config = TrainerConfig::new(1234, Schedule::constant(1e-3)?, BatchSize::new(batch_size)?);
    /// let unclipped = TrainerConfig { clip_grad: 0.0, ..config };
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn new(seed: u64, schedule: LearningRate, batch_size: BatchSize) -> TrainerConfig {
        TrainerConfig {
            seed,
            optimizer: OptimizerConfig::ADAMW,
            schedule,
            clip_grad: 1.0,
            batch_size,
            parallel: ParallelConfig::default(),
            precision: PrecisionConfig::default(),
            execution: Execution::Eager,
        }
    }

    /// Errors, in one line, if steps of `ranks` ranks are to be captured and cannot be.
    ///
    /// | refused | since |
    /// |---|---|
    /// | more than one rank | what ranks send one another is not captured |
    /// | a dynamic loss scale | the host looks at the numbers of every step |
    /// | offloaded activations or optimizer states | the host directs their copies while a step runs |
    /// | sparse saved activations | the host learns their size while a step runs |
    pub fn check_execution(&self, ranks: usize) -> Result<()> {
        let ParallelConfig { saved_activations, optimizer_states, .. } = self.parallel;
        let offloads =
            saved_activations.offloaded_layers > 0 || optimizer_states == MemoryKind::Host;
        let sparse = saved_activations.packing.zeros == Zeros::Bitmap;
        let why = match (self.execution, self.precision.loss_scale) {
            (Execution::Eager, _) => return Ok(()),
            (Execution::CudaGraph, _) if ranks > 1 => {
                format!("is for one rank, got {ranks}: what ranks send one another is not captured")
            }
            (Execution::CudaGraph, LossScale::Dynamic { .. }) => {
                "does not go with a dynamic loss scale, for which the host looks at every step: use bf16, or give a \
                 constant one"
                    .to_string()
            }
            (Execution::CudaGraph, _) if offloads => {
                "does not go with offloading, which the host directs while a step runs".to_string()
            }
            (Execution::CudaGraph, _) if sparse => {
                "does not go with sparse saved activations, whose size the host learns while a step runs".to_string()
            }
            (Execution::CudaGraph, _) => return Ok(()),
        };
        Err(Error::config("enable-cuda-graph", why))
    }
}

/// How weights of 16 bits are trained: Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740. In
/// which type their gradients are summed is a matter of [`DataParallelConfig`].
#[derive(Debug, Clone, Copy)]
pub struct PrecisionConfig {
    /// Where they are updated.
    pub weight_update: WeightUpdate,
    /// How they are rounded.
    pub rounding: Rounding,
    /// What the loss is multiplied with before backward.
    pub loss_scale: LossScale,
}

impl Default for PrecisionConfig {
    /// Master weights, rounded to nearest, and no scale.
    fn default() -> PrecisionConfig {
        PrecisionConfig {
            weight_update: WeightUpdate::default(),
            rounding: Rounding::default(),
            loss_scale: LossScale::NONE,
        }
    }
}

/// How the work of a step is spread, besides the sizes of the mesh, and what waits where. Nothing here changes the
/// loss, but for local SGD and activations kept in 16 bits.
#[derive(Debug, Clone, Copy)]
pub struct ParallelConfig {
    /// Order of the pipeline's work.
    pub pipeline_schedule: ScheduleKind,
    /// Chunks of the model on each pipeline stage.
    pub chunks: usize,
    /// How gradients are reduced, and what of the optimizer's work is sharded.
    pub data_parallel: DataParallelConfig,
    /// What is computed again in backward.
    pub recompute: Recompute,
    /// What becomes of the activations that are kept for it.
    pub saved_activations: SavedActivations,
    /// In which of the device's memories the optimizer's moments and master weights live.
    pub optimizer_states: MemoryKind,
}

impl Default for ParallelConfig {
    /// 1F1B, one chunk, nothing sharded, recomputed, packed or offloaded.
    fn default() -> ParallelConfig {
        ParallelConfig {
            pipeline_schedule: ScheduleKind::OneFOneB,
            chunks: 1,
            data_parallel: DataParallelConfig::default(),
            recompute: Recompute::None,
            saved_activations: SavedActivations::default(),
            optimizer_states: MemoryKind::Device,
        }
    }
}

impl PrecisionConfig {
    /// The loss scale at its start.
    ///
    /// Errors if it is out of its range, or dynamic where every replica would have one of its own.
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
