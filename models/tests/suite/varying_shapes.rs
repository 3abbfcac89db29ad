//! The pool reserves little more than is in use, for any sequence of lengths that is trained on.
//!
//! On a fake device, whose pool hands out the same blocks as any.

use ferrotron_models::batch_size::{BatchSize, BatchSizeConfig};
use ferrotron_models::data::{Batch, Samples, TokenBatch};
use ferrotron_models::gpt::{Gpt, GptConfig, Recompute};
use ferrotron_models::trainer::{ParallelConfig, Trainer, TrainerConfig};
use ferrotron_nn::Scope;
use ferrotron_nn::schedule::LrSchedule;
use ferrotron_tensor::{DType, Device, RandomKey, Result};

struct OfLength(usize);

impl Samples for OfLength {
    fn batch(&self, first_sample: u64, micro_batch: usize) -> Result<Batch> {
        let tokens = micro_batch * self.0;
        TokenBatch {
            inputs: vec![1; tokens],
            targets: vec![2; tokens],
            first_sample,
            micro_batch,
            seq_length: self.0,
        }
        .try_into()
    }

    fn seq_length(&self) -> usize {
        self.0
    }
}

fn trainer(model: &GptConfig, micro: usize, dtype: DType, recompute: Recompute) -> Trainer<Gpt> {
    let batch_size = BatchSizeConfig { micro_batch_size: micro, ..BatchSizeConfig::default() };
    let (schedule, batch_size) = (LrSchedule::constant(1e-3), BatchSize::new(batch_size));
    let config = TrainerConfig {
        parallel: ParallelConfig { recompute, ..ParallelConfig::default() },
        ..TrainerConfig::new(1, schedule.unwrap(), batch_size.unwrap())
    };
    let scope = Scope::new(&Device::fake(2).unwrap(), dtype, 1);
    Trainer::<Gpt>::new(&scope, model, config).unwrap()
}

/// GPT-2 and Llama, and the small model that is trained without options.
fn runs() -> [(GptConfig, usize, DType, Recompute); 4] {
    let gpt2 = GptConfig::gpt2(50_257, 12, 768, 12, 1024);
    let llama = GptConfig::llama(32_000, 4, 1024, 16, 4, 512);
    [
        (gpt2.clone(), 4, DType::BF16, Recompute::None),
        (gpt2, 4, DType::F32, Recompute::FULL),
        (llama, 2, DType::F32, Recompute::SELECTIVE),
        (GptConfig::gpt2(65, 4, 128, 4, 64), 12, DType::F32, Recompute::None),
    ]
}

#[test]
fn reserved_memory_keeps_within_five_percent_over_a_thousand_steps() {
    for (model, micro, dtype, recompute) in runs() {
        let mut trainer = trainer(&model, micro, dtype, recompute);
        let key = RandomKey::new(1, 0, "lengths");
        for step in 0..1000 {
            let share = key.uniform(step);
            let length = 1 + (share * model.max_position_embeddings as f64) as usize;
            trainer.step(&OfLength(length)).unwrap();
            let memory = trainer.scope().device().memory();
            let (reserved, peak) = (memory.reserved, memory.peak);
            assert!(
                reserved as f64 <= 1.05 * peak as f64,
                "{model:?}: step {step}, {length} positions: {reserved} bytes reserved, {peak} in use at most"
            );
        }
    }
}

/// Memory that goes back has to be fetched again. Where steps are alike there is nothing to gain by it.
#[test]
fn steps_of_one_shape_keep_their_memory() {
    let tiny = (GptConfig::gpt2(65, 2, 32, 4, 16), 2, DType::F32, Recompute::None);
    for (model, micro, dtype, recompute) in runs().into_iter().chain([tiny]) {
        let mut trainer = trainer(&model, micro, dtype, recompute);
        let samples = OfLength(model.max_position_embeddings);
        let mut steps = |count: usize| {
            for _ in 0..count {
                trainer.step(&samples).unwrap();
            }
            trainer.scope().device().memory()
        };
        let reserved = steps(100).reserved;
        let returned = steps(0).returned;
        let after = steps(200);
        assert_eq!((after.reserved, after.returned), (reserved, returned), "{model:?}");
    }
}
