//! Memory estimates, from a training step on a fake device.
//!
//! A [fake device](Device::fake) counts allocations without touching memory. On it, with [fake groups](Mesh::fake)
//! instead of other ranks, the trainer places its parameters and takes one step: schedule, graphs, reductions,
//! update. There are no separate formulas that could diverge from the code: the estimates are what the counters of
//! the run will show.

use ferrotron_cuda::gpu::Gpu;
use ferrotron_cuda::nvrtc::Architecture;
use ferrotron_nn::{Axis, AxisSet, Scope, Sharding};
use ferrotron_parallel::mesh::{Mesh, ParallelDims};
use ferrotron_parallel::pipeline::ScheduleKind;
use ferrotron_parallel::tensor_parallel::SequenceParallel;
use ferrotron_tensor::{Category, DType, Device, Error, MemoryKind, Result};
use serde::Serialize;

use crate::io::data::{Batch, BatchArray, Samples, TokenBatch};
use crate::training::batch_size::{BatchSize, BatchSizeConfig};
use crate::training::trainer::{Model, ModelChunk, Trainer, TrainerConfig};

/// A run whose memory is estimated.
///
/// ```
/// use ferrotron_models::batch_size::{BatchSize, BatchSizeConfig};
/// use ferrotron_models::gpt::{Gpt, GptConfig};
/// use ferrotron_models::memory::{DocumentResets, MemoryEstimator, PlannedDevice};
/// use ferrotron_models::trainer::TrainerConfig;
/// use ferrotron_nn::schedule::LrSchedule;
/// use ferrotron_parallel::mesh::ParallelDims;
/// use ferrotron_parallel::tensor_parallel::SequenceParallel;
/// use ferrotron_tensor::DType;
///
/// let model = GptConfig::gpt2(50257, 12, 768, 12, 1024);
/// let parameters = model.num_parameters();
/// let batch_size = BatchSizeConfig { micro_batch_size: 4, ..BatchSizeConfig::default() };
/// let plan = MemoryEstimator::<Gpt> {
///     model,
///     layout: ParallelDims::single(),
///     sequence_parallel: SequenceParallel::Off,
///     trainer: TrainerConfig::new(1, LrSchedule::constant(1e-3)?, BatchSize::new(batch_size)?),
///     dtype: DType::BF16,
///     seq_length: 1024,
///     documents: DocumentResets::default(),
///     device: PlannedDevice::Cpu { threads: 2 },
/// };
/// let memory = plan.stages()?[0].memory;
/// assert_eq!(memory.weights_bytes as u64, 2 * parameters);
/// assert_eq!(memory.gradients_bytes as u64, 4 * parameters);
/// assert_eq!(memory.optimizer_bytes as u64, 12 * parameters);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct MemoryEstimator<M: Model> {
    /// The model.
    pub model: M::Config,
    /// Sizes of the axes.
    pub layout: ParallelDims,
    /// Whether activations are sharded along the sequence.
    pub sequence_parallel: SequenceParallel,
    /// The training configuration.
    pub trainer: TrainerConfig,
    /// Dtype of weights and activations.
    pub dtype: DType,
    /// Tokens per sequence.
    pub seq_length: usize,
    /// The attention and positions that stop at the ends of documents.
    pub documents: DocumentResets,
    /// The device of each rank.
    pub device: PlannedDevice,
}

/// The attention and positions that stop at the ends of the documents in a sample: both with packed samples, else as
/// [`DocumentConfig`](crate::data::DocumentConfig) says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DocumentResets {
    /// Tokens attend to those of their own document alone. On a GPU, each query has the range of its keys.
    pub attention: bool,
    /// Positions count from 0 in each document: a batch has them as an array.
    pub positions: bool,
}

/// The kind of device of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlannedDevice {
    /// A CPU.
    Cpu {
        /// Threads per rank: some kernels allocate workspace per thread.
        threads: usize,
    },
    /// A GPU per rank.
    Gpu(Architecture),
}

impl PlannedDevice {
    /// The corresponding fake device.
    fn fake(&self) -> Result<Device> {
        match *self {
            PlannedDevice::Cpu { threads } => Device::fake(threads),
            PlannedDevice::Gpu(architecture) => Device::fake_cuda(architecture),
        }
    }
}

/// Peak bytes of a rank's memory, in total and per category; the peaks may be at different times.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct RankMemory {
    /// Parameters.
    pub weights_bytes: usize,
    /// Gradients of parameters.
    pub gradients_bytes: usize,
    /// Moments and master weights.
    pub optimizer_bytes: usize,
    /// Activations saved for backward, without logits.
    pub activations_bytes: usize,
    /// Logits of the head.
    pub logits_bytes: usize,
    /// Sharded weights and gradients while they are gathered.
    pub buffers_bytes: usize,
    /// The copy of weights and optimizer state from which checkpoints are written in the background.
    pub snapshot_bytes: usize,
    /// Unsaved values, temporaries of operations, and the tables that layers share.
    pub workspace_bytes: usize,
    /// All device memory.
    pub total_bytes: usize,
    /// Host memory, in addition.
    pub host_bytes: usize,
}

impl RankMemory {
    /// The peaks of a device's counters; a GPU's memory outside of its pool counts as workspace.
    pub fn from_device(device: &Device) -> RankMemory {
        let (stats, own) = (device.memory(), device.gpu().map_or(0, Gpu::own_bytes));
        RankMemory {
            weights_bytes: stats.peak_bytes(Category::Weights),
            gradients_bytes: stats.peak_bytes(Category::Gradients),
            optimizer_bytes: stats.peak_bytes(Category::Optimizer),
            activations_bytes: stats.peak_bytes(Category::Saved),
            logits_bytes: stats.peak_bytes(Category::Logits),
            buffers_bytes: stats.peak_bytes(Category::Communication),
            snapshot_bytes: stats.peak_bytes(Category::Snapshot),
            workspace_bytes: stats.peak_bytes(Category::Workspace)
                + stats.peak_bytes(Category::Tables)
                + own,
            total_bytes: stats.peak + own,
            host_bytes: device.memory_of(MemoryKind::Host).peak,
        }
    }
}

/// The peak memory of the ranks of a pipeline stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct StageMemory {
    /// Index of the stage.
    pub stage: usize,
    /// Number of blocks of the stage, in all of its chunks.
    pub layers: usize,
    /// Number of ranks of the stage.
    pub ranks: usize,
    /// The rank with the highest peak.
    #[serde(skip)]
    pub rank: usize,
    /// The peak memory of that rank.
    #[serde(flatten)]
    pub memory: RankMemory,
}

impl<M: Model> MemoryEstimator<M> {
    /// Estimates the memory of each pipeline stage.
    ///
    /// Errors as [`Trainer::on_mesh`], if a micro-batch has more than 2^24 tokens, and if the system has too little
    /// address space.
    pub fn stages(&self) -> Result<Vec<StageMemory>> {
        (0..self.layout.size(Axis::Pipeline)).map(|stage| self.stage(stage)).collect()
    }

    /// Estimates the memory of one pipeline stage.
    ///
    /// Errors as [`MemoryEstimator::stages`].
    pub fn stage(&self, stage: usize) -> Result<StageMemory> {
        self.stage_after(stage, 1)
    }

    /// Like [`MemoryEstimator::stage`], after `steps_taken` dry steps. The second one waits for the calls that the first has
    /// left under way.
    pub fn stage_after(&self, stage: usize, steps_taken: usize) -> Result<StageMemory> {
        let ranks = self.layout.world() / self.layout.size(Axis::Pipeline);
        let parts = self.chunks(stage)?;
        let layers = parts.iter().map(|part| part.blocks.len()).sum();
        // Of parameters that the tensor axis does not cut evenly the last rank has most, and of buckets that the ranks
        // along the others share the first.
        let rank = self.fullest(stage * ranks + self.layout.size(Axis::Tensor) - 1)?;
        let memory = self.rank_after(rank, steps_taken)?;
        Ok(StageMemory { stage, layers, ranks, rank, memory })
    }

    fn chunks(&self, stage: usize) -> Result<Vec<ModelChunk>> {
        let (blocks, stages) = (M::num_blocks(&self.model), self.layout.size(Axis::Pipeline));
        ModelChunk::chunks(blocks, stage, stages, self.trainer.parallel.chunks)
    }

    /// The rank with the most optimizer state among those that shard it with `rank`: `rank` itself, unless whole
    /// parameters are the units.
    fn fullest(&self, rank: usize) -> Result<usize> {
        let TrainerConfig { optimizer, parallel, .. } = &self.trainer;
        if !optimizer.updates_whole_tensors() || parallel.data_parallel.sharding == Sharding::None {
            return Ok(rank);
        }
        let trainer = self.fake_trainer(rank, self.trainer.clone())?;
        let sharing = self.layout.ranks(rank, AxisSet::from([Axis::Context, Axis::Data]));
        let mut owned = vec![0; sharing.len()];
        for group in trainer.buffers().groups() {
            for (param, &owner) in group.params.iter().zip(&group.owners) {
                owned[owner] += param.leaf().numel();
            }
        }
        let most = (0..owned.len()).max_by_key(|&owner| owned[owner]);
        Ok(most.map_or(rank, |owner| sharing[owner]))
    }

    fn fake_trainer(&self, rank: usize, config: TrainerConfig) -> Result<Trainer<M>> {
        let mesh = Mesh::fake(self.layout, rank, self.sequence_parallel)?;
        let scope = Scope::new(&self.device.fake()?, self.dtype, config.seed);
        Trainer::on_mesh(&scope, &mesh, &self.model, config)
    }

    /// Estimates the memory of one rank.
    ///
    /// Errors as [`MemoryEstimator::stages`].
    pub fn rank(&self, rank: usize) -> Result<RankMemory> {
        self.rank_after(rank, 1)
    }

    fn rank_after(&self, rank: usize, steps_taken: usize) -> Result<RankMemory> {
        let tokens = self.trainer.batch_size.micro_batch_size().checked_mul(self.seq_length);
        if tokens.is_none_or(|tokens| tokens > MOST_TOKENS) {
            let (micro, length) = (self.trainer.batch_size.micro_batch_size(), self.seq_length);
            let message = format!(
                "{micro} sequences of {length} tokens in a micro-batch are more than {MOST_TOKENS} tokens: use a \
                 smaller --micro-batch-size"
            );
            return Err(Error::config("memory", message));
        }
        let micro = self.trainer.batch_size.micro_batch_size();
        let all = self.trainer.batch_size.microbatches(u64::MAX) * self.steps_at_once();
        let (taken, steps) = self.dry_step(self.layout.coordinate(rank, Axis::Pipeline));
        let data_parallel_size = self.layout.size(Axis::Data);
        let batch_size = BatchSize::new(BatchSizeConfig {
            micro_batch_size: micro,
            data_parallel_size,
            global_batch_size: Some(micro * data_parallel_size * taken),
            rampup: None,
        })?;
        let mut trainer = TrainerConfig { batch_size, ..self.trainer.clone() };
        trainer.parallel.drain_interval = steps;
        let mut trainer = self.fake_trainer(rank, trainer)?;
        let (seq_length, documents) = (self.seq_length, self.documents);
        let samples = ExampleSamples::<M> { config: &self.model, seq_length, documents };
        for _ in 0..steps_taken {
            trainer.step(&samples)?;
        }
        let mut found = RankMemory::from_device(trainer.scope().device());
        // The arrays of all micro-batches are in memory throughout a step.
        let bytes = samples.bytes(micro, self.layout.size(Axis::Context), self.device)?;
        let left_out = (all - taken * steps) * bytes;
        found.workspace_bytes += left_out;
        found.total_bytes += left_out;
        Ok(found)
    }

    /// The steps that the trainer takes at once: those until a pipeline without a flush is drained.
    pub fn steps_at_once(&self) -> usize {
        let parallel = &self.trainer.parallel;
        if parallel.pipeline_schedule.flushes() { 1 } else { parallel.drain_interval }
    }

    /// The numbers of micro-batches of a step and of steps with which the memory of a stage is estimated, at most those of
    /// the run. They reach its peak: they suffice for one round of the schedule's steady state, in which the maximum number
    /// is in flight, and without a flush for an update meanwhile.
    pub fn dry_step(&self, stage: usize) -> (usize, usize) {
        let stages = self.layout.size(Axis::Pipeline);
        // For the largest step, if batch sizes ramp up.
        let all = self.trainer.batch_size.microbatches(u64::MAX);
        let (microbatches, steps) = match self.trainer.parallel.pipeline_schedule {
            ScheduleKind::Naive | ScheduleKind::OneFOneB => (stages - stage + 2, 1),
            ScheduleKind::ZbH1 => (stages + 2, 1),
            // Groups have as many micro-batches as there are stages. Gradients have memory from the first group on.
            ScheduleKind::Interleaved => (3 * stages, 1),
            ScheduleKind::GPipe => (all, 1),
            ScheduleKind::PipeDream | ScheduleKind::PipeDreamVerticalSync => (1, stages + 2),
            // At least two steps of p - 1 micro-batches in flight.
            ScheduleKind::PipeDream2Bw => (stages + 2, 3),
        };
        (all.min(microbatches), steps.min(self.steps_at_once()))
    }
}

/// Maximum tokens of a micro-batch: token ids are allocated even on a fake device.
const MOST_TOKENS: usize = 1 << 24;

/// Example samples of a model.
struct ExampleSamples<'a, M: Model> {
    config: &'a M::Config,
    seq_length: usize,
    documents: DocumentResets,
}

impl<M: Model> ExampleSamples<'_, M> {
    /// The bytes of a micro-batch on a rank that shares the positions with `context` - 1 others.
    fn bytes(&self, micro_batch: usize, context: usize, device: PlannedDevice) -> Result<usize> {
        let batch = self.batch(0, micro_batch)?;
        let bytes = |array: &BatchArray| {
            array.values.bytes() / if array.has_positions { context } else { 1 }
        };
        let arrays: usize = batch.arrays().iter().map(bytes).sum();
        // On a GPU, each query's first and last key. Where ranks share positions, each pass makes its own.
        let key_ranges = match device {
            PlannedDevice::Gpu(_) if batch.restricts_attention() && context == 1 => {
                8 * batch.rows() * self.seq_length
            }
            _ => 0,
        };
        Ok(arrays + key_ranges)
    }
}

impl<M: Model> Samples for ExampleSamples<'_, M> {
    fn batch(&self, first_sample: u64, micro_batch: usize) -> Result<Batch> {
        let length = self.seq_length;
        let mut batch = M::example_batch(self.config, micro_batch, length)?;
        batch.first_sample = first_sample;
        if self.documents.positions {
            let positions = (0..micro_batch).flat_map(|_| 0..length as u32).collect();
            batch =
                batch.with_positions(TokenBatch::POSITIONS, positions, &[micro_batch, length])?;
        }
        match self.documents.attention {
            true => batch.with_documents(vec![vec![0, length]; micro_batch]),
            false => Ok(batch),
        }
    }

    fn seq_length(&self) -> usize {
        self.seq_length
    }
}
