//! Small models, and their training in layouts and precisions.

use ferrotron_models::batch_size::{BatchSize, BatchSizeConfig};
use ferrotron_models::checkpoint::LocalShard;
use ferrotron_models::data::{Batch, Samples, TokenBatch};
use ferrotron_models::gpt::{ActivationKind, Gpt, GptConfig, WindowPattern};
use ferrotron_models::trainer::{ParallelConfig, PrecisionConfig, Trainer, TrainerConfig};
use ferrotron_nn::schedule::LrSchedule;
use ferrotron_nn::{
    AdafactorConfig, Axis, OptimizerConfig, RopeScaling, Rounding, Scope, Sharding, WeightUpdate,
};
use ferrotron_parallel::collective::{WorldConfig, run_threads};
use ferrotron_parallel::data_parallel::DataParallelConfig;
use ferrotron_parallel::mesh::{Mesh, ParallelDims};
use ferrotron_parallel::pipeline::ScheduleKind;
use ferrotron_parallel::tensor_parallel::SequenceParallel;
use ferrotron_tensor::{DType, Device, MemoryKind, MemoryStats, RandomKey, Result};

/// Samples of a micro-batch.
pub const BATCH: usize = 2;
/// Tokens of a sample.
pub const SEQ_LENGTH: usize = 16;
pub const STEPS: usize = 3;

/// GPT-2 with dropout everywhere.
pub fn gpt2(layers: usize) -> GptConfig {
    GptConfig {
        hidden_dropout: 0.1,
        attention_dropout: 0.1,
        ..GptConfig::gpt2(13, layers, 32, 4, SEQ_LENGTH)
    }
}

/// A scaling that changes some of the frequencies of sequences as short as these.
const SCALING: RopeScaling =
    RopeScaling { original_max_position_embeddings: 8, ..RopeScaling::llama3(4.0) };

/// The same with ReLU, as it is, a model with grouped queries and SwiGLU, that with all options of attention, and one of
/// Gemma 2's style with biases.
pub fn models(layers: usize) -> [GptConfig; 5] {
    let llama = GptConfig {
        hidden_dropout: 0.1,
        attention_dropout: 0.1,
        ..GptConfig::llama(13, layers, 32, 4, 2, SEQ_LENGTH)
    };
    let optioned = GptConfig {
        rotary_percent: 0.5,
        qk_layernorm: true,
        add_qkv_bias: true,
        window_size: Some(5),
        window_attn_skip_freq: Some(WindowPattern::SkipEvery(2)),
        attn_logit_softcapping: Some(5.0),
        rope_scaling: Some(SCALING),
        use_parallel_residual: true,
        ..llama.clone()
    };
    let gemma = GptConfig {
        kv_channels: 6,
        window_size: Some(5),
        query_pre_attn_scalar: Some(10.0),
        add_attention_bias: true,
        add_mlp_bias: true,
        hidden_dropout: 0.1,
        attention_dropout: 0.1,
        ..GptConfig::gemma2(13, layers, 32, 4, 2, SEQ_LENGTH)
    };
    let relu = GptConfig { activation: ActivationKind::Relu, ..gpt2(layers) };
    [relu, gpt2(layers), llama, optioned, gemma]
}

/// Tokens by sample number.
pub struct Noise;

impl Samples for Noise {
    fn batch(&self, first_sample: u64, micro_batch: usize) -> Result<Batch> {
        let key = RandomKey::new(3, 0, "tokens");
        let draw = |i: usize| key.uniform(first_sample * 2 * SEQ_LENGTH as u64 + i as u64) * 13.0;
        let numbers = micro_batch * SEQ_LENGTH;
        TokenBatch {
            inputs: (0..numbers).map(|i| draw(2 * i) as u32).collect(),
            targets: (0..numbers).map(|i| draw(2 * i + 1) as i64).collect(),
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

/// The options of a GPT-2 training.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    pub ranks: usize,
    /// Sizes of tensor, context and pipeline parallelism.
    pub sizes: (usize, usize, usize),
    pub sequence: SequenceParallel,
    pub schedule: ScheduleKind,
    pub chunks: usize,
    pub sharding: Sharding,
    pub dtype: DType,
    pub precision: PrecisionConfig,
    pub optimizer: OptimizerConfig,
    pub layers: usize,
}

impl Case {
    pub fn new(dtype: DType) -> Case {
        Case {
            ranks: 1,
            sizes: (1, 1, 1),
            sequence: SequenceParallel::Off,
            schedule: ScheduleKind::OneFOneB,
            chunks: 1,
            sharding: Sharding::None,
            dtype,
            precision: PrecisionConfig::default(),
            optimizer: OptimizerConfig::ADAMW,
            layers: 4,
        }
    }

    pub fn parallel(&self) -> ParallelConfig {
        ParallelConfig {
            pipeline_schedule: self.schedule,
            chunks: self.chunks,
            data_parallel: DataParallelConfig {
                sharding: self.sharding,
                bucket_numel: Some(3000),
                ..DataParallelConfig::default()
            },
            ..ParallelConfig::default()
        }
    }

    pub fn trainer(&self, mesh: &Mesh, parallel: ParallelConfig) -> Result<Trainer<Gpt>> {
        let batch_size = BatchSize::new(BatchSizeConfig {
            micro_batch_size: BATCH,
            data_parallel_size: mesh.axis(Axis::Data).size(),
            global_batch_size: Some(4 * BATCH),
            ..BatchSizeConfig::default()
        })?;
        let config = TrainerConfig {
            optimizer: self.optimizer,
            parallel,
            precision: self.precision,
            ..TrainerConfig::new(7, LrSchedule::constant(1e-2)?, batch_size)
        };
        let scope = Scope::new(&Device::cpu(1)?, self.dtype, 1234);
        Trainer::<Gpt>::on_mesh(&scope, mesh, &gpt2(self.layers), config)
    }

    /// Trains a few steps; what every rank found.
    pub fn train(&self, parallel: ParallelConfig) -> Vec<Found> {
        let (tp, cp, pp) = self.sizes;
        let layout = ParallelDims::new(self.ranks, tp, cp, pp).unwrap();
        let ranks = run_threads(self.ranks, &WorldConfig::default(), |world| {
            let mesh = Mesh::new(&world, layout, self.sequence)?;
            let mut trainer = self.trainer(&mesh, parallel)?;
            let mut found = Vec::new();
            for _ in 0..STEPS {
                let report = trainer.step(&Noise)?;
                found.push(vec![report.loss.to_bits(), report.grad_norm.to_bits()]);
            }
            found.extend(state(&trainer)?);
            let device = trainer.scope().device().clone();
            let memory = [MemoryKind::Device, MemoryKind::Host].map(|kind| device.memory_of(kind));
            drop(trainer);
            assert_eq!(device.memory_of(MemoryKind::Host).current, 0, "{self:?} {parallel:?}");
            Ok(Found { bits: found, memory })
        });
        ranks.into_iter().collect::<Result<Vec<_>>>().unwrap()
    }
}

/// Weights, moments and master weights.
pub fn state(trainer: &Trainer<Gpt>) -> Result<Vec<Vec<u64>>> {
    let (weights, moments) = trainer.local_shards()?;
    let bits =
        |held: &LocalShard| Ok(held.tensor.to_f64()?.into_iter().map(f64::to_bits).collect());
    weights.iter().chain(&moments.shards).map(bits).collect()
}

/// The results of a rank.
pub struct Found {
    /// Losses, norms, weights and moments.
    pub bits: Vec<Vec<u64>>,
    /// Statistics of the device's own memory, and of its host memory.
    pub memory: [MemoryStats; 2],
}

/// Layouts and precisions that differ in what an optimizer keeps, and where.
pub fn cases() -> Vec<Case> {
    let (single, half) = (Case::new(DType::F32), Case::new(DType::BF16));
    let in_place = PrecisionConfig {
        weight_update: WeightUpdate::InPlace,
        rounding: Rounding::Stochastic { seed: 5 },
        ..PrecisionConfig::default()
    };
    let random = PrecisionConfig { weight_update: WeightUpdate::MasterCopy, ..in_place };
    let on = SequenceParallel::On;
    let adafactor = AdafactorConfig { beta1: 0.9, ..AdafactorConfig::default() };
    let adafactor = OptimizerConfig::Adafactor(adafactor);
    vec![
        single,
        half,
        Case { precision: in_place, ..half },
        Case { optimizer: adafactor, ..single },
        Case { ranks: 2, sizes: (2, 1, 1), optimizer: adafactor, precision: random, ..half },
        Case { precision: random, ..half },
        Case { ranks: 2, sharding: Sharding::Optimizer, ..single },
        Case { ranks: 2, sharding: Sharding::Gradients, ..half },
        Case { ranks: 2, sharding: Sharding::Weights, ..half },
        Case { ranks: 2, sizes: (1, 1, 2), schedule: ScheduleKind::ZbH1, ..single },
        Case { ranks: 2, sizes: (1, 2, 1), ..single },
        Case { ranks: 4, sizes: (2, 1, 2), sequence: on, ..half },
        Case { ranks: 4, sizes: (2, 1, 1), sharding: Sharding::Optimizer, ..single },
    ]
}
