//! Training on a GPU, which here is a stand-in, is training on the CPU: alone, and in layouts of ranks that share the GPU.

mod graphs;
mod graphs_of_ranks;
mod loss_scale;
mod memory;
#[path = "../common/numbers.rs"]
mod numbers;
mod offload;
mod profile;
mod residuals;
mod waits;

use ferrotron_models::batch_size::{BatchSize, BatchSizeConfig};
use ferrotron_models::data::{Batch, Samples, TokenBatch};
use ferrotron_models::gpt::{Gpt, GptConfig};
use ferrotron_models::trainer::{ParallelConfig, Trainer, TrainerConfig};
use ferrotron_nn::schedule::LrSchedule;
use ferrotron_nn::{Scope, Sharding};
use ferrotron_parallel::collective::{WorldConfig, run_threads};
use ferrotron_parallel::data_parallel::DataParallelConfig;
use ferrotron_parallel::mesh::{Mesh, ParallelDims};
use ferrotron_parallel::tensor_parallel::SequenceParallel;
use ferrotron_tensor::{DType, Device, RandomKey, Result};

const VOCAB: usize = 61;
const LENGTH: usize = 16;
const STEPS: usize = 3;
const BATCH: usize = 4;

/// Loss and gradient norm of each step.
type Steps = Vec<(f64, f64)>;

/// A model, and what it is trained in.
#[derive(Clone)]
struct Case {
    name: &'static str,
    model: GptConfig,
    dtype: DType,
    /// Largest relative difference of a loss.
    tolerance: f64,
}

impl Case {
    fn all() -> [Case; 3] {
        let gpt2 = GptConfig {
            hidden_dropout: 0.1,
            attention_dropout: 0.1,
            ..GptConfig::gpt2(VOCAB, 2, 32, 4, LENGTH)
        };
        let llama = GptConfig::llama(VOCAB, 2, 32, 4, 2, LENGTH);
        let f32_rounding = 1e-5;
        // Half a unit in the last place of bf16, 2^-9, enters at each of some fifty roundings on the way to a loss that
        // averages over 64 tokens.
        let bf16_rounding = 2_f64.powi(-9);
        [
            Case {
                name: "gpt2 f32",
                model: gpt2.clone(),
                dtype: DType::F32,
                tolerance: f32_rounding,
            },
            Case { name: "llama f32", model: llama, dtype: DType::F32, tolerance: f32_rounding },
            Case { name: "gpt2 bf16", model: gpt2, dtype: DType::BF16, tolerance: bf16_rounding },
        ]
    }

    fn train(&self, device: &Device, mesh: &Mesh, parallel: ParallelConfig) -> Result<Steps> {
        let data_parallel_size = mesh.layout().size(ferrotron_nn::Axis::Data);
        let batch_size = BatchSize::new(BatchSizeConfig {
            micro_batch_size: 1,
            data_parallel_size,
            global_batch_size: Some(BATCH),
            ..BatchSizeConfig::default()
        })?;
        let config = TrainerConfig {
            parallel,
            ..TrainerConfig::new(7, LrSchedule::constant(1e-2)?, batch_size)
        };
        let scope = Scope::new(device, self.dtype, 1234);
        let mut trainer = Trainer::<Gpt>::on_mesh(&scope, mesh, &self.model, config)?;
        (0..STEPS).map(|_| trainer.step(&Noise).map(|step| (step.loss, step.grad_norm))).collect()
    }

    fn check(&self, what: &str, got: &Steps, want: &Steps) {
        for (step, (got, want)) in got.iter().zip(want).enumerate() {
            // The norm is a sum of squares of numbers that are rounded once more.
            let parts = [("loss", got.0, want.0, 1.0), ("norm", got.1, want.1, 100.0)];
            for (part, got, want, more) in parts {
                let (name, off) = (self.name, (got / want - 1.0).abs());
                let limit = more * self.tolerance;
                assert!(
                    off <= limit,
                    "{name}, {what}, step {step}: {part} {got}, want {want}: {off:e} > {limit:e}"
                );
            }
        }
        assert_eq!(got.len(), STEPS);
    }
}

/// Tokens by sample number.
struct Noise;

impl Noise {
    fn tokens(&self, first_sample: u64, micro_batch: usize) -> TokenBatch {
        let key = RandomKey::new(3, 0, "tokens");
        let numbers = micro_batch * LENGTH;
        let first = first_sample * LENGTH as u64;
        let token = |i: usize, what: u64| {
            (key.uniform(2 * (first + i as u64) + what) * VOCAB as f64) as u32
        };
        TokenBatch {
            inputs: (0..numbers).map(|i| token(i, 0)).collect(),
            targets: (0..numbers).map(|i| i64::from(token(i, 1))).collect(),
            first_sample,
            micro_batch,
            seq_length: LENGTH,
        }
    }
}

impl Samples for Noise {
    fn batch(&self, first_sample: u64, micro_batch: usize) -> Result<Batch> {
        self.tokens(first_sample, micro_batch).try_into()
    }

    fn seq_length(&self) -> usize {
        LENGTH
    }
}

fn on_cpu(case: &Case) -> Result<Steps> {
    case.train(&Device::cpu(1)?, &Mesh::single(), ParallelConfig::default())
}

#[test]
fn a_gpu_trains_as_the_cpu_does() -> Result<()> {
    let Some(gpu) = ferrotron_cuda_sim::gpu("a_gpu_trains_as_the_cpu_does") else {
        return Ok(());
    };
    for case in Case::all() {
        let found = case.train(&Device::cuda(&gpu)?, &Mesh::single(), ParallelConfig::default())?;
        case.check("alone", &found, &on_cpu(&case)?);
    }
    Ok(())
}

#[test]
fn ranks_that_share_a_gpu_train_as_one_does() -> Result<()> {
    let Some(gpu) = ferrotron_cuda_sim::gpu("ranks_that_share_a_gpu_train_as_one_does") else {
        return Ok(());
    };
    let [case, ..] = Case::all();
    let want = on_cpu(&case)?;
    for (tp, pp, sequence, sharding) in [
        (2, 1, SequenceParallel::On, Sharding::Optimizer),
        (2, 2, SequenceParallel::Off, Sharding::None),
        (1, 2, SequenceParallel::Off, Sharding::None),
        (1, 1, SequenceParallel::Off, Sharding::Weights),
    ] {
        let what = format!("tp {tp}, pp {pp}, {sequence:?}, {sharding:?}");
        let ranks = run_threads(4, &WorldConfig::default(), |world| {
            let mesh = Mesh::new(&world, ParallelDims::new(4, tp, 1, pp)?, sequence)?;
            let data_parallel = DataParallelConfig { sharding, ..DataParallelConfig::default() };
            let parallel = ParallelConfig { data_parallel, ..ParallelConfig::default() };
            case.train(&Device::cuda(&gpu)?, &mesh, parallel)
        });
        for found in ranks {
            case.check(&what, &found?, &want);
        }
    }
    Ok(())
}
