//! Offloading and packing: what waits in host memory is not in the device's, what is packed takes fewer bytes, and
//! nothing else changes, to the bit, but for activations kept in 16 bits. Here what an optimizer keeps, in
//! `activations.rs` what backward needs.

mod activations;
#[path = "../common/mod.rs"]
mod common;

use ferrotron_models::batch_size::{BatchSize, BatchSizeConfig};
use ferrotron_models::checkpoint::Checkpoint;
use ferrotron_models::trainer::{ParallelConfig, PrecisionConfig, Trainer, TrainerConfig};
use ferrotron_nn::schedule::{Schedule, ScheduleConfig};
use ferrotron_nn::{
    AdafactorConfig, Axis, OptimizerConfig, Rounding, Scope, Sharding, WeightUpdate,
};
use ferrotron_parallel::collective::{WorldConfig, run_threads};
use ferrotron_parallel::data_parallel::DataParallelConfig;
use ferrotron_parallel::mesh::{Layout, Mesh};
use ferrotron_parallel::pipeline::ScheduleKind;
use ferrotron_parallel::tensor_parallel::SequenceParallel;
use ferrotron_tensor::{Category, DType, Device, MemoryKind, MemoryStats, Result};

use common::{BATCH, Noise, bits, gpt2};

const STEPS: usize = 3;

/// What is trained, and how.
#[derive(Debug, Clone, Copy)]
struct Case {
    ranks: usize,
    /// Sizes of tensor, context and pipeline parallelism.
    sizes: (usize, usize, usize),
    sequence: SequenceParallel,
    schedule: ScheduleKind,
    chunks: usize,
    sharding: Sharding,
    dtype: DType,
    precision: PrecisionConfig,
    optimizer: OptimizerConfig,
    layers: usize,
}

impl Case {
    fn new(dtype: DType) -> Case {
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

    fn parallel(&self) -> ParallelConfig {
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

    fn trainer(&self, mesh: &Mesh, parallel: ParallelConfig) -> Result<Trainer> {
        let config = TrainerConfig {
            seed: 7,
            optimizer: self.optimizer,
            schedule: Schedule::new(ScheduleConfig { max_lr: 1e-2, ..ScheduleConfig::default() })?,
            clip_grad: 1.0,
            batch_size: BatchSize::new(BatchSizeConfig {
                micro_batch_size: BATCH,
                data_parallel_size: mesh.axis(Axis::Data).size(),
                global_batch_size: Some(4 * BATCH),
                rampup: None,
            })?,
            parallel,
            precision: self.precision,
        };
        let scope = Scope::new(&Device::cpu(1)?, self.dtype, 1234);
        Trainer::on_mesh(&scope, mesh, &gpt2(self.layers), config)
    }

    /// Trains a few steps; what every rank found.
    fn train(&self, parallel: ParallelConfig) -> Vec<Found> {
        let (tp, cp, pp) = self.sizes;
        let layout = Layout::new(self.ranks, tp, cp, pp).unwrap();
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
fn state(trainer: &Trainer) -> Result<Vec<Vec<u64>>> {
    let (weights, moments) = trainer.held()?;
    weights.iter().chain(&moments.held).map(|held| bits(&held.tensor)).collect()
}

/// What a rank found.
struct Found {
    /// Losses, norms, weights and moments.
    bits: Vec<Vec<u64>>,
    /// Of the device's own memory, and of its host memory.
    memory: [MemoryStats; 2],
}

/// Layouts and precisions that differ in what an optimizer keeps, and where.
fn cases() -> Vec<Case> {
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

#[test]
fn optimizer_states_wait_in_host_memory() {
    for case in cases() {
        let (plain, host) = (case.parallel(), MemoryKind::Host);
        let want = case.train(plain);
        let found = case.train(ParallelConfig { optimizer_states: host, ..plain });
        for (found, want) in found.iter().zip(&want) {
            assert!(found.bits == want.bits, "other bits: {case:?}");
            let ([device, host], [all, none]) = (found.memory, want.memory);
            let offloaded = host.of(Category::Optimizer);
            assert!(offloaded > 0 && none.peak == 0, "{case:?}");
            assert_eq!(offloaded, all.of(Category::Optimizer), "{case:?}");
            assert_eq!(device.peak_of(Category::Optimizer), 0, "{case:?}");
            let fell = all.peak - device.peak;
            assert!(fell * 100 >= 95 * offloaded, "{fell} of {offloaded} bytes: {case:?}");
        }
    }
}

#[test]
fn a_run_goes_on_wherever_its_states_wait() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    for case in [Case::new(DType::F32), Case::new(DType::BF16)] {
        let trainer = |kind| {
            let parallel = ParallelConfig { optimizer_states: kind, ..case.parallel() };
            case.trainer(&Mesh::single(), parallel)
        };
        let mut want = trainer(MemoryKind::Device)?;
        for _ in 0..2 * STEPS {
            want.step(&Noise)?;
        }
        for (before, after) in
            [(MemoryKind::Device, MemoryKind::Host), (MemoryKind::Host, MemoryKind::Device)]
        {
            let (mut first, mut second) = (trainer(before)?, trainer(after)?);
            for _ in 0..STEPS {
                first.step(&Noise)?;
            }
            let saved = first.save(folder.path(), None, serde_json::Value::Null)?;
            second.load(&Checkpoint::open(&saved)?)?;
            for _ in 0..STEPS {
                second.step(&Noise)?;
            }
            assert!(state(&second)? == state(&want)?, "{before:?}, then {after:?}");
        }
    }
    Ok(())
}
