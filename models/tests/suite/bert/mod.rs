//! A BERT computes the same as PyTorch, and trains and is evaluated in every layout with the same losses. Its
//! norms are before or after attention and MLP. It takes the memory that was estimated.

use ferrotron_models::batch_size::{BatchSize, BatchSizeConfig};
use ferrotron_models::bert::{Bert, BertConfig, NormPlacement};
use ferrotron_models::data::{Batch, FiniteSamples, PairBatch, Samples};
use ferrotron_models::gpt::Recompute;
use ferrotron_models::memory::{DocumentResets, MemoryEstimator, PlannedDevice};
use ferrotron_models::stop::StopFlag;
use ferrotron_models::trainer::{ParallelConfig, Trainer, TrainerConfig};
use ferrotron_nn::schedule::LrSchedule;
use ferrotron_nn::{Scope, Sharding};
use ferrotron_parallel::collective::{WorldConfig, run_threads};
use ferrotron_parallel::data_parallel::{DataParallelConfig, ReplicaCheck};
use ferrotron_parallel::mesh::{Mesh, ParallelDims};
use ferrotron_parallel::pipeline::ScheduleKind;
use ferrotron_parallel::tensor_parallel::SequenceParallel;
use ferrotron_tensor::{DType, Device, RandomKey, Result};

mod golden;
mod multiple_choice;
mod padding;

const SAMPLES: usize = 8;
const LENGTH: usize = 8;
const STEPS: usize = 4;
const VOCAB: usize = 13;

fn config(placement: NormPlacement) -> BertConfig {
    small(BertConfig::new(placement, VOCAB, 5, 16, 4, LENGTH))
}

/// A model of width 16, with dropout and an inner width that two ranks do not divide.
fn small(config: BertConfig) -> BertConfig {
    BertConfig {
        ffn_hidden_size: 21,
        init_method_std: 0.2,
        hidden_dropout: 0.1,
        attention_dropout: 0.1,
        ..config
    }
}

/// Random tokens, some of them to be predicted; one sample in three has no label of its order. Samples have 3 to 8
/// positions before their padding. Evaluations end after the given number of samples.
struct Noise(u64);

impl Samples for Noise {
    fn batch(&self, first_sample: u64, samples: usize) -> Result<Batch> {
        let key = RandomKey::new(5, 0, "noise");
        let numbers = first_sample * LENGTH as u64..(first_sample + samples as u64) * LENGTH as u64;
        let draw = |i: u64, what: u64| key.uniform(4 * i + what);
        let token = |i: u64, what: u64| (draw(i, what) * VOCAB as f64) as u32;
        let counts = |sample: u64| self.0 == 0 || sample < self.0;
        let masked = |i: u64| draw(i, 2) < 0.4 && counts(i / LENGTH as u64);
        let target = |i: u64| if masked(i) { i64::from(token(i, 1)) } else { -100 };
        let label = |sample: u64| match sample % 3 {
            0 | 1 if counts(sample) => (sample / 2 % 2) as i64,
            _ => -100,
        };
        let length = |sample: u64| 3 + (5 * sample % 6) as usize;
        let dims = [samples, LENGTH];
        let segment = |i: u64| u32::from(i % LENGTH as u64 >= 2 + i / LENGTH as u64 % 4);
        Batch::new(first_sample, samples, LENGTH)
            .with_positions(
                PairBatch::TOKENS,
                numbers.clone().map(|i| token(i, 0)).collect(),
                &dims,
            )?
            .with_positions(PairBatch::SEGMENTS, numbers.clone().map(segment).collect(), &dims)?
            .with_positions(PairBatch::TARGETS, numbers.map(target).collect(), &dims)?
            .with(
                PairBatch::ORDER,
                (first_sample..).take(samples).map(label).collect(),
                &[samples],
            )?
            .with_key_lengths((first_sample..).take(samples).map(length).collect())
    }

    fn seq_length(&self) -> usize {
        LENGTH
    }
}

impl FiniteSamples for Noise {
    fn len(&self) -> u64 {
        self.0
    }
}

#[derive(Debug, Clone, Copy)]
struct Layout {
    /// Tensor, context, data, pipeline.
    sizes: [usize; 4],
    sequence: SequenceParallel,
    schedule: ScheduleKind,
    chunks: usize,
    micro_batch: usize,
    sharding: Sharding,
    recompute: Recompute,
}

const ALONE: Layout = Layout {
    sizes: [1; 4],
    sequence: SequenceParallel::Off,
    schedule: ScheduleKind::OneFOneB,
    chunks: 1,
    micro_batch: SAMPLES,
    sharding: Sharding::None,
    recompute: Recompute::None,
};

const SPLIT: Layout = Layout { micro_batch: 2, ..ALONE };

const LAYOUTS: [Layout; 11] = [
    Layout { recompute: Recompute::FULL, ..SPLIT },
    Layout { sizes: [2, 1, 1, 1], ..SPLIT },
    Layout { sizes: [2, 1, 1, 1], sequence: SequenceParallel::On, ..SPLIT },
    Layout { sizes: [1, 2, 1, 1], ..SPLIT },
    Layout { sizes: [2, 2, 1, 1], sequence: SequenceParallel::On, ..SPLIT },
    Layout { sizes: [1, 1, 2, 1], sharding: Sharding::Optimizer, ..SPLIT },
    Layout { sizes: [1, 1, 2, 1], sharding: Sharding::Gradients, ..SPLIT },
    Layout {
        sizes: [1, 1, 2, 1],
        sharding: Sharding::Weights,
        recompute: Recompute::FULL,
        ..SPLIT
    },
    Layout { sizes: [1, 1, 1, 2], schedule: ScheduleKind::Interleaved, chunks: 2, ..SPLIT },
    Layout { sizes: [1, 1, 1, 3], schedule: ScheduleKind::ZbH1, ..SPLIT },
    Layout {
        sizes: [2, 1, 2, 2],
        sequence: SequenceParallel::On,
        sharding: Sharding::Optimizer,
        recompute: Recompute::SELECTIVE,
        ..SPLIT
    },
];

impl Layout {
    fn dims(&self) -> ParallelDims {
        let [tensor, context, _, pipeline] = self.sizes;
        ParallelDims::new(self.sizes.iter().product(), tensor, context, pipeline).unwrap()
    }

    fn trainer(&self) -> Result<TrainerConfig> {
        let sizes = BatchSize::new(BatchSizeConfig {
            micro_batch_size: self.micro_batch,
            data_parallel_size: self.sizes[2],
            global_batch_size: Some(SAMPLES),
            ..BatchSizeConfig::default()
        })?;
        let parallel = ParallelConfig {
            chunks: self.chunks,
            pipeline_schedule: self.schedule,
            data_parallel: DataParallelConfig {
                sharding: self.sharding,
                bucket_numel: Some(700),
                replica_check: ReplicaCheck::EveryStep,
                ..DataParallelConfig::default()
            },
            recompute: self.recompute,
            ..ParallelConfig::default()
        };
        Ok(TrainerConfig { parallel, ..TrainerConfig::new(7, LrSchedule::constant(1e-2)?, sizes) })
    }

    /// Trains; returns (loss, masked tokens, order, norm) of each step and, last, the evaluation.
    fn train(&self, model: &BertConfig) -> Vec<[f64; 4]> {
        let ranks = run_threads(self.dims().world(), &WorldConfig::default(), |world| {
            let mesh = Mesh::new(&world, self.dims(), self.sequence)?;
            let scope = Scope::new(&Device::cpu(1)?, DType::F64, 7);
            let mut trainer = Trainer::<Bert>::on_mesh(&scope, &mesh, model, self.trainer()?)?;
            let mut found = Vec::new();
            for _ in 0..STEPS {
                let report = trainer.step(&Noise(0))?;
                let names: Vec<&str> = report.losses.iter().map(|(name, _)| *name).collect();
                assert_eq!(names, ["masked_lm", "sentence_order"]);
                let [masked, order] = [report.losses[0].1, report.losses[1].1];
                found.push([report.loss, masked, order, report.grad_norm]);
            }
            let evaluation = trainer.evaluate(&Noise(11), &StopFlag::default())?;
            let evaluation = evaluation.expect("not stopped");
            let [masked, order] = [evaluation.losses[0].1, evaluation.losses[1].1];
            found.push([evaluation.loss, masked, order, evaluation.tokens as f64]);
            Ok(found)
        });
        let ranks: Vec<_> = ranks.into_iter().collect::<Result<_>>().unwrap();
        assert!(ranks.iter().all(|found| *found == ranks[0]), "{self:?}");
        ranks[0].clone()
    }
}

fn close(got: &[[f64; 4]], want: &[[f64; 4]], what: &dyn std::fmt::Debug) {
    assert_eq!(got.len(), want.len());
    for (step, (got, want)) in got.iter().zip(want).enumerate() {
        for (got, want) in got.iter().zip(want) {
            let off = (got - want).abs() / want.abs();
            assert!(off <= 1e-12, "{what:?}, step {}: {got} {want}, {off:e} off", step + 1);
        }
    }
}

#[test]
fn every_layout_trains_as_one_rank() {
    for placement in [NormPlacement::Pre, NormPlacement::Post] {
        let model = config(placement);
        let want = ALONE.train(&model);
        assert!(want.iter().flatten().all(|number| number.is_finite()), "{want:?}");
        for layout in LAYOUTS {
            let got = layout.train(&model);
            close(&got, &want, &(placement, layout));
        }
    }
}

#[test]
fn memory_is_the_number_of_a_step() -> Result<()> {
    for (placement, layout) in [NormPlacement::Pre, NormPlacement::Post]
        .into_iter()
        .flat_map(|placement| LAYOUTS.map(|layout| (placement, layout)))
    {
        let model = config(placement);
        let plan = MemoryEstimator::<Bert> {
            model: model.clone(),
            layout: layout.dims(),
            sequence_parallel: layout.sequence,
            trainer: layout.trainer()?,
            dtype: DType::F64,
            seq_length: LENGTH,
            documents: DocumentResets::default(),
            device: PlannedDevice::Cpu { threads: 1 },
        };
        let measured = run_threads(layout.dims().world(), &WorldConfig::default(), |world| {
            let mesh = Mesh::new(&world, layout.dims(), layout.sequence)?;
            let device = Device::cpu(1)?;
            let scope = Scope::new(&device, DType::F64, 7);
            let mut trainer = Trainer::<Bert>::on_mesh(&scope, &mesh, &model, layout.trainer()?)?;
            trainer.step(&Noise(0))?;
            drop(trainer);
            Ok(device.memory().peak)
        });
        let measured = measured.into_iter().collect::<Result<Vec<_>>>()?;
        for stage in plan.stages()? {
            let rank = stage.rank;
            let got = stage.memory.total_bytes;
            assert_eq!(got, measured[rank], "{placement:?} {layout:?} rank {rank}");
        }
    }
    Ok(())
}

#[test]
fn what_a_bert_cannot_be_is_one_line() {
    let good = config(NormPlacement::Pre);
    for (bad, line) in [
        (
            BertConfig { num_attention_heads: 3, ..good.clone() },
            "bert: num-attention-heads 3 does not divide hidden-size 16",
        ),
        (
            BertConfig { num_token_types: 0, ..good.clone() },
            "bert: num-token-types must be positive, got 0",
        ),
        (
            BertConfig { hidden_size: usize::MAX, num_attention_heads: 1, ..good.clone() },
            "bert: a model of vocab-size 13, num-layers 5, hidden-size 18446744073709551615, ffn-hidden-size 21, \
             num-attention-heads 1, max-position-embeddings 8, num-token-types 2, kv-channels 18446744073709551615 \
             would have more than 10^15 parameters: check these sizes",
        ),
    ] {
        assert_eq!(bad.validate().unwrap_err().to_string(), line);
    }
}
