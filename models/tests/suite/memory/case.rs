//! A run with its estimate, and the bytes that the pools of its ranks count.

use ferrotron_autograd::{ActivationCompressionConfig, ZeroEncoding};
use ferrotron_models::batch_size::{BatchSize, BatchSizeConfig};
use ferrotron_models::checkpoint::PendingSave;
use ferrotron_models::data::{Batch, Samples, TokenBatch};
use ferrotron_models::gpt::{Gpt, GptConfig, Recompute, SavedActivations};
use ferrotron_models::memory::{DocumentResets, MemoryEstimator, PlannedDevice, RankMemory};
use ferrotron_models::trainer::{ParallelConfig, SaveMode, Trainer, TrainerConfig};
use ferrotron_nn::schedule::LrSchedule;
use ferrotron_nn::{OptimizerConfig, ParamPatterns, Scope, Sharding};
use ferrotron_parallel::collective::{WorldConfig, run_threads};
use ferrotron_parallel::data_parallel::{AsyncUpdates, DataParallelConfig};
use ferrotron_parallel::mesh::{Mesh, ParallelDims};
use ferrotron_parallel::pipeline::ScheduleKind;
use ferrotron_parallel::tensor_parallel::SequenceParallel;
use ferrotron_tensor::{DType, Device, MemoryKind, Result};

pub const SEQ_LENGTH: usize = 32;
pub const VOCAB: usize = 97;

struct Numbers;

impl Samples for Numbers {
    fn batch(&self, first_sample: u64, micro_batch: usize) -> Result<Batch> {
        let first = first_sample as usize * SEQ_LENGTH;
        let tokens = first..first + micro_batch * SEQ_LENGTH;
        TokenBatch {
            inputs: tokens.clone().map(|i| (i * i % VOCAB) as u32).collect(),
            targets: tokens.map(|i| ((i + 1) * (i + 1) % VOCAB) as i64).collect(),
            first_sample,
            micro_batch,
            seq_length: SEQ_LENGTH,
        }
        .try_into()
    }

    fn seq_length(&self) -> usize {
        SEQ_LENGTH
    }
}

/// The differences between the runs.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    pub dtype: DType,
    pub recompute: Recompute,
    pub sharding: Sharding,
    /// Tensor, context, data, pipeline.
    pub sizes: [usize; 4],
    pub sequence: SequenceParallel,
    pub schedule: ScheduleKind,
    pub drain_interval: usize,
    pub micro: usize,
    pub microbatches: usize,
    pub saved_activations: SavedActivations,
    pub optimizer_states: MemoryKind,
    pub optimizer: OptimizerConfig,
    pub frozen: &'static [&'static str],
    pub keep_in_fp32: &'static [&'static str],
    pub ema_decay: Option<f64>,
    pub max_staleness: usize,
    pub saves: SaveMode,
}

pub const PLAIN: Case = Case {
    dtype: DType::F32,
    recompute: Recompute::None,
    sharding: Sharding::None,
    sizes: [1; 4],
    sequence: SequenceParallel::Off,
    schedule: ScheduleKind::OneFOneB,
    drain_interval: 11,
    micro: 2,
    microbatches: 4,
    saved_activations: SavedActivations {
        offloaded_layers: 0,
        packing: ActivationCompressionConfig { dtype: None, zeros: ZeroEncoding::Kept },
    },
    optimizer_states: MemoryKind::Device,
    optimizer: OptimizerConfig::ADAMW,
    frozen: &[],
    keep_in_fp32: &[],
    ema_decay: None,
    max_staleness: 0,
    saves: SaveMode::Blocking,
};

impl Case {
    pub fn plan(&self, model: &GptConfig) -> Result<MemoryEstimator<Gpt>> {
        let [tensor, context, data, pipeline] = self.sizes;
        let batch_size = BatchSize::new(BatchSizeConfig {
            micro_batch_size: self.micro,
            data_parallel_size: data,
            global_batch_size: Some(self.micro * data * self.microbatches),
            ..BatchSizeConfig::default()
        })?;
        Ok(MemoryEstimator::<Gpt> {
            model: model.clone(),
            layout: ParallelDims::new(
                tensor * context * data * pipeline,
                tensor,
                context,
                pipeline,
            )?,
            sequence_parallel: self.sequence,
            trainer: TrainerConfig {
                optimizer: self.optimizer,
                frozen: ParamPatterns::new(self.frozen.iter().copied())?,
                keep_in_fp32: ParamPatterns::new(self.keep_in_fp32.iter().copied())?,
                ema_decay: self.ema_decay,
                parallel: ParallelConfig {
                    pipeline_schedule: self.schedule,
                    drain_interval: self.drain_interval,
                    chunks: if self.schedule == ScheduleKind::Interleaved { 2 } else { 1 },
                    data_parallel: DataParallelConfig {
                        sharding: self.sharding,
                        bucket_numel: Some(10_000),
                        async_updates: Some(AsyncUpdates {
                            max_staleness: self.max_staleness,
                            ..AsyncUpdates::default()
                        }),
                        ..DataParallelConfig::default()
                    },
                    recompute: self.recompute,
                    saved_activations: self.saved_activations,
                    optimizer_states: self.optimizer_states,
                },
                saves: self.saves,
                clip_grad: if self.schedule.flushes() { 1.0 } else { 0.0 },
                ..TrainerConfig::new(1, LrSchedule::constant(1e-3)?, batch_size)
            },
            dtype: self.dtype,
            seq_length: SEQ_LENGTH,
            documents: DocumentResets::default(),
            device: PlannedDevice::Cpu { threads: 1 },
        })
    }
}

/// The counts of all ranks' pools over two steps, the second of them during a save if the plan is asynchronous.
fn measured(plan: &MemoryEstimator<Gpt>) -> Result<Vec<RankMemory>> {
    let updates = plan.trainer.parallel.data_parallel.stale_updates();
    let folder = tempfile::tempdir().unwrap();
    let ranks = run_threads(plan.layout.world(), &WorldConfig::default(), |world| {
        let mesh = Mesh::new(&world, plan.layout, plan.sequence_parallel)?;
        let device = Device::cpu(1)?;
        let scope = Scope::new(&device, plan.dtype, 1);
        let mut trainer =
            Trainer::<Gpt>::on_mesh(&scope, &mesh, &plan.model, plan.trainer.clone())?;
        trainer.step(&Numbers)?;
        let save = || trainer.save_async(folder.path(), None, serde_json::Value::Null);
        let pending = (plan.trainer.saves == SaveMode::Async).then(save).transpose()?;
        trainer.step(&Numbers)?;
        // As many steps under way as may be, and an update in each.
        let steps = 3 * updates.map_or(0, |updates| updates.max_staleness);
        (0..steps).try_for_each(|_| trainer.step_async(&Numbers))?;
        trainer.drain_updates(&Numbers)?;
        pending.map(PendingSave::wait).transpose()?;
        drop(trainer);
        Ok(RankMemory::from_device(&device))
    });
    ranks.into_iter().collect()
}

fn bytes(memory: &RankMemory) -> [(&'static str, usize); 10] {
    [
        ("weights", memory.weights_bytes),
        ("gradients", memory.gradients_bytes),
        ("optimizer", memory.optimizer_bytes),
        ("activations", memory.activations_bytes),
        ("logits", memory.logits_bytes),
        ("buffers", memory.buffers_bytes),
        ("snapshot", memory.snapshot_bytes),
        ("workspace", memory.workspace_bytes),
        ("total", memory.total_bytes),
        ("host", memory.host_bytes),
    ]
}

/// Lists where the estimate differs from the measurement; they must be equal to the byte.
fn differences(case: &Case, model: &GptConfig) -> Vec<String> {
    let plan = case.plan(model).unwrap();
    let measured = measured(&plan).unwrap_or_else(|error| panic!("{case:?}: {error}"));
    let mut found = Vec::new();
    for (rank, measured) in measured.iter().enumerate() {
        let number = plan.rank(rank).unwrap_or_else(|error| panic!("{case:?}: {error}"));
        for ((name, got), (_, want)) in bytes(&number).into_iter().zip(bytes(measured)) {
            if got != want {
                found.push(format!("{case:?}, rank {rank}: {name} {got}, measured {want}"));
            }
        }
    }
    found
}

pub fn check(cases: &[Case], model: &GptConfig) {
    let found: Vec<String> = cases.iter().flat_map(|case| differences(case, model)).collect();
    assert!(found.is_empty(), "{} in {} cases:\n{}", found.len(), cases.len(), found.join("\n"));
}

pub fn model() -> GptConfig {
    GptConfig::gpt2(VOCAB, 4, 32, 4, SEQ_LENGTH)
}
