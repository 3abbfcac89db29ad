//! The memory number before the start: what it says is what the pools of the ranks then count.

use ferrotron_autograd::{ActivationCompressionConfig, ZeroEncoding};
use ferrotron_models::batch_size::{BatchSize, BatchSizeConfig};
use ferrotron_models::checkpoint::PendingSave;
use ferrotron_models::data::{Batch, Samples, TokenBatch};
use ferrotron_models::gpt::{Gpt, GptConfig, Recompute, SavedActivations};
use ferrotron_models::memory::{MemoryEstimator, PlannedDevice, RankMemory, StageMemory};
use ferrotron_models::trainer::{ParallelConfig, SaveMode, Trainer, TrainerConfig};
use ferrotron_nn::schedule::LrSchedule;
use ferrotron_nn::{AdafactorConfig, MuonConfig, OptimizerConfig, ParamPatterns, Scope, Sharding};
use ferrotron_parallel::collective::{WorldConfig, run_threads};
use ferrotron_parallel::data_parallel::DataParallelConfig;
use ferrotron_parallel::mesh::{Mesh, ParallelDims};
use ferrotron_parallel::pipeline::ScheduleKind;
use ferrotron_parallel::tensor_parallel::SequenceParallel;
use ferrotron_tensor::{DType, Device, MemoryKind, Result};

const SEQ_LENGTH: usize = 32;
const VOCAB: usize = 97;

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
struct Case {
    dtype: DType,
    recompute: Recompute,
    sharding: Sharding,
    /// Tensor, context, data, pipeline.
    sizes: [usize; 4],
    sequence: SequenceParallel,
    schedule: ScheduleKind,
    micro: usize,
    microbatches: usize,
    saved_activations: SavedActivations,
    optimizer_states: MemoryKind,
    optimizer: OptimizerConfig,
    frozen: &'static [&'static str],
    keep_in_fp32: &'static [&'static str],
    ema_decay: Option<f64>,
    saves: SaveMode,
}

const PLAIN: Case = Case {
    dtype: DType::F32,
    recompute: Recompute::None,
    sharding: Sharding::None,
    sizes: [1; 4],
    sequence: SequenceParallel::Off,
    schedule: ScheduleKind::OneFOneB,
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
    saves: SaveMode::Blocking,
};

impl Case {
    fn plan(&self, model: &GptConfig) -> Result<MemoryEstimator<Gpt>> {
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
                    chunks: if self.schedule == ScheduleKind::Interleaved { 2 } else { 1 },
                    data_parallel: DataParallelConfig {
                        sharding: self.sharding,
                        bucket_numel: Some(10_000),
                        ..DataParallelConfig::default()
                    },
                    recompute: self.recompute,
                    saved_activations: self.saved_activations,
                    optimizer_states: self.optimizer_states,
                },
                saves: self.saves,
                ..TrainerConfig::new(1, LrSchedule::constant(1e-3)?, batch_size)
            },
            dtype: self.dtype,
            seq_length: SEQ_LENGTH,
            device: PlannedDevice::Cpu { threads: 1 },
        })
    }
}

/// The counts of all ranks' pools over two steps, the second of them during a save if the plan is asynchronous.
fn measured(plan: &MemoryEstimator<Gpt>) -> Result<Vec<RankMemory>> {
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

fn check(cases: &[Case], model: &GptConfig) {
    let found: Vec<String> = cases.iter().flat_map(|case| differences(case, model)).collect();
    assert!(found.is_empty(), "{} in {} cases:\n{}", found.len(), cases.len(), found.join("\n"));
}

fn model() -> GptConfig {
    GptConfig::gpt2(VOCAB, 4, 32, 4, SEQ_LENGTH)
}

#[test]
fn the_number_before_the_start_is_what_the_pools_count() {
    let mut cases = Vec::new();
    for dtype in [DType::F32, DType::BF16] {
        for recompute in [Recompute::None, Recompute::SELECTIVE, Recompute::FULL] {
            for sharding in Sharding::ALL {
                let micro = 1 + cases.len() % 3;
                let sizes = [1, 1, 2, 1];
                cases.push(Case { dtype, recompute, sharding, micro, sizes, ..PLAIN });
            }
            for (at, schedule) in ScheduleKind::ALL.into_iter().enumerate() {
                let micro = 1 + cases.len() % 2;
                let (pipeline, data) = if at % 2 == 0 { (2, 2) } else { (4, 1) };
                let pipeline = if schedule == ScheduleKind::Interleaved { 2 } else { pipeline };
                let sharding = if data > 1 { Sharding::Optimizer } else { Sharding::None };
                let sizes = [1, 1, data, pipeline];
                cases.push(Case { dtype, recompute, sharding, schedule, micro, sizes, ..PLAIN });
            }
        }
    }
    assert!(cases.len() >= 30);
    check(&cases, &model());
}

#[test]
fn it_is_in_every_kind_of_layout() {
    let mut cases = Vec::new();
    for (sizes, sequence) in [
        ([2, 1, 1, 1], SequenceParallel::Off),
        ([2, 1, 1, 2], SequenceParallel::Off),
        ([2, 1, 1, 2], SequenceParallel::On),
        ([1, 2, 1, 1], SequenceParallel::Off),
        ([2, 2, 1, 1], SequenceParallel::On),
    ] {
        for recompute in [Recompute::None, Recompute::FULL] {
            cases.push(Case { sizes, sequence, recompute, ..PLAIN });
        }
    }
    check(&cases, &model());
    check(&cases, &GptConfig::llama(VOCAB, 4, 32, 4, 2, SEQ_LENGTH));
}

/// Frozen parameters have weights, but no gradients, moments or masters, on any rank.
#[test]
fn it_leaves_out_the_gradients_and_moments_of_frozen_parameters() {
    let model = model();
    let mut cases = Vec::new();
    for frozen in [&["wte", "blocks.0", "blocks.1"][..], &["*", "!blocks.3", "!*.bias"]] {
        for (sizes, sharding) in [
            ([1; 4], Sharding::None),
            ([1, 1, 2, 1], Sharding::Optimizer),
            ([1, 1, 2, 1], Sharding::Gradients),
            ([1, 1, 2, 1], Sharding::Weights),
            ([2, 1, 1, 2], Sharding::None),
        ] {
            for recompute in [Recompute::None, Recompute::FULL] {
                let dtype = if recompute == Recompute::None { DType::BF16 } else { DType::F32 };
                cases.push(Case { frozen, sizes, sharding, recompute, dtype, ..PLAIN });
            }
        }
    }
    check(&cases, &model);
    let of = |frozen| Case { frozen, dtype: DType::BF16, ..PLAIN }.plan(&model).unwrap().rank(0);
    let whole = of(&[]).unwrap();
    // A block of width h has 12 h^2 + 13 h parameters; per parameter 2, 4 and 4 + 4 + 4 bytes.
    let trained = 12 * 32 * 32 + 13 * 32;
    let found = of(&["*", "!blocks.3"]).unwrap();
    assert_eq!(found.weights_bytes, whole.weights_bytes);
    assert_eq!((found.gradients_bytes, found.optimizer_bytes), (4 * trained, 12 * trained));
}

/// The estimate leaves out data offloaded to host memory, and halves what is saved in 16 bits.
#[test]
fn it_knows_what_waits_elsewhere() {
    let (host, saved) = (MemoryKind::Host, SavedActivations::default());
    let narrow = ActivationCompressionConfig {
        dtype: Some(DType::BF16),
        ..ActivationCompressionConfig::default()
    };
    let offloaded = |offloaded_layers| SavedActivations { offloaded_layers, ..saved };
    let both = SavedActivations { packing: narrow, ..offloaded(3) };
    let narrow = SavedActivations { packing: narrow, ..saved };
    let mut cases = Vec::new();
    for recompute in [Recompute::None, Recompute::SELECTIVE, Recompute::FULL] {
        for (sizes, sharding) in [
            ([1; 4], Sharding::None),
            ([1, 1, 2, 1], Sharding::Weights),
            ([2, 1, 1, 1], Sharding::None),
        ] {
            let case = Case { recompute, sizes, sharding, ..PLAIN };
            cases.push(Case { optimizer_states: host, ..case });
            cases.push(Case { optimizer_states: host, dtype: DType::BF16, ..case });
            cases.push(Case { saved_activations: narrow, ..case });
            cases.push(Case { saved_activations: both, ..case });
            // All but two layers, and those that are needed again at once.
            for layers in 2..=4 {
                cases.push(Case { saved_activations: offloaded(layers), ..case });
            }
        }
        for layers in 1..=2 {
            let sizes = [1, 1, 1, 2];
            let saved_activations = offloaded(layers);
            cases.push(Case { recompute, sizes, saved_activations, ..PLAIN });
        }
    }
    check(&cases, &model());
}

/// Each rank has a copy of what it writes: of weights and moments that several ranks hold, a share.
#[test]
fn it_has_the_copy_from_which_checkpoints_are_written() {
    let mut cases = Vec::new();
    for dtype in [DType::F32, DType::BF16] {
        let case = Case { dtype, saves: SaveMode::Async, ..PLAIN };
        for sizes in [[1; 4], [1, 1, 3, 1], [2, 1, 1, 2], [1, 2, 1, 1]] {
            cases.push(Case { sizes, ..case });
        }
        for sharding in [Sharding::Optimizer, Sharding::Weights] {
            cases.push(Case { sizes: [1, 1, 2, 1], sharding, ..case });
        }
        cases.push(Case { optimizer_states: MemoryKind::Host, ema_decay: Some(0.9), ..case });
    }
    check(&cases, &model());
    let [alone, plain] =
        [&cases[0], &PLAIN].map(|case| case.plan(&model()).unwrap().rank(0).unwrap());
    assert_eq!(alone.snapshot_bytes, alone.weights_bytes + alone.optimizer_bytes);
    assert_eq!(alone.total_bytes, plain.total_bytes + alone.snapshot_bytes);
}

/// States of any rule are counted, and so is a moving average of the weights.
#[test]
fn it_is_with_every_rule() {
    let muon = OptimizerConfig::Muon(MuonConfig::default());
    let lion = OptimizerConfig::Lion { beta1: 0.95, beta2: 0.98, weight_decay: 0.1 };
    let mut cases = Vec::new();
    for optimizer in [muon, lion, OptimizerConfig::ADAMW] {
        for dtype in [DType::F32, DType::BF16] {
            let case = Case { optimizer, dtype, ema_decay: Some(0.999), ..PLAIN };
            cases.push(case);
            cases.push(Case { sizes: [2, 1, 1, 1], ..case });
            cases.push(Case { sizes: [1, 1, 1, 2], ema_decay: None, ..case });
            cases.push(Case { optimizer_states: MemoryKind::Host, ..case });
        }
        for sharding in [Sharding::Optimizer, Sharding::Weights] {
            let sizes = [1, 1, 2, 1];
            cases.push(Case { optimizer, sharding, sizes, ema_decay: Some(0.999), ..PLAIN });
        }
    }
    check(&cases, &model());
}

/// Parameters that keep f32 are counted: norms, and a matrix and the tied embedding, which layers cast.
#[test]
fn it_is_with_parameters_in_f32() {
    let mut cases = Vec::new();
    for keep_in_fp32 in [&["*norm*"][..], &["*norm*", "wte", "blocks.1.mlp"]] {
        let case = Case { dtype: DType::BF16, keep_in_fp32, ..PLAIN };
        for sharding in Sharding::ALL {
            let recompute = if cases.len() % 2 == 0 { Recompute::None } else { Recompute::FULL };
            cases.push(Case { sharding, recompute, sizes: [1, 1, 2, 1], ..case });
        }
        cases.push(Case { sizes: [2, 1, 1, 2], sequence: SequenceParallel::On, ..case });
        cases.push(Case { optimizer_states: MemoryKind::Host, ema_decay: Some(0.9), ..case });
    }
    check(&cases, &model());
}

/// The estimate is that of the rank that takes most, where ranks own whole parameters and differ.
#[test]
fn it_is_that_of_the_rank_which_takes_most() {
    let rule = AdafactorConfig { beta1: 0.9, ..AdafactorConfig::default() };
    let adafactor = Case { optimizer: OptimizerConfig::Adafactor(rule), ..PLAIN };
    let mut cases = Vec::new();
    for sharding in [Sharding::Optimizer, Sharding::Gradients, Sharding::Weights] {
        for sizes in [[1, 1, 3, 1], [1, 2, 2, 1], [2, 1, 2, 1], [1, 1, 8, 1]] {
            cases.push(Case { sharding, sizes, ..adafactor });
        }
    }
    cases.push(Case { sharding: Sharding::Optimizer, sizes: [1, 1, 3, 2], ..adafactor });
    let mut others = 0;
    for case in &cases {
        let plan = case.plan(&model()).unwrap();
        for StageMemory { ranks, rank, memory, stage, .. } in plan.stages().unwrap() {
            let total = |rank: usize| plan.rank(rank).unwrap().total_bytes;
            let all = stage * ranks..(stage + 1) * ranks;
            let most = all.clone().map(total).max().unwrap();
            // Of those with as many elements one may have more rows and columns.
            let short = most - memory.total_bytes;
            assert!(short * 100 <= most, "{short} of {most}: {case:?}");
            others += usize::from(rank + 1 < all.end);
        }
    }
    assert!(others > 3, "only {others} times another one than the last");
    check(&cases[..3], &model());
}

/// Sharded weights and gradients are whole a few buckets at a time, however many there are.
#[test]
fn buffers_do_not_grow_with_the_model() {
    // A bucket is closed when it has 10000 elements or more, of parameters that have 4096 at most.
    let bucket = 4 * (10_000 + 4096);
    for (sharding, kinds) in [(Sharding::Gradients, 1), (Sharding::Weights, 2)] {
        let case = Case { sharding, sizes: [1, 1, 4, 1], ..PLAIN };
        for layers in [8, 64, 512] {
            let model = GptConfig::gpt2(VOCAB, layers, 32, 4, SEQ_LENGTH);
            let found = case.plan(&model).unwrap().rank(3).unwrap().buffers_bytes;
            let at = format!("{sharding:?}, {layers} layers: {found} bytes");
            assert!(found > bucket && found <= 5 * kinds * bucket, "{at}");
        }
    }
}

/// The estimate of many micro-batches simulates only as many as suffice.
#[test]
fn it_is_with_many_micro_batches() {
    let mut cases = Vec::new();
    for schedule in ScheduleKind::ALL {
        for stages in [1, 2, 4] {
            if stages == 1 && schedule == ScheduleKind::Interleaved
                || stages == 4 && schedule == ScheduleKind::GPipe
            {
                continue;
            }
            cases.push(Case { schedule, sizes: [1, 1, 1, stages], microbatches: 16, ..PLAIN });
        }
    }
    let model = GptConfig::gpt2(VOCAB, 8, 32, 4, SEQ_LENGTH);
    check(&cases, &model);
}
