//! A whole training step (forward, backward, clip, AdamW) of the char model; the memory number of a trillion
//! parameters on 512 ranks.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use ferrotron::models::batch_size::{BatchSize, BatchSizeConfig};
use ferrotron::models::bench::{BenchConfig, bench};
use ferrotron::models::gpt::{Gpt, GptConfig, Recompute};
use ferrotron::models::memory::{DocumentResets, MemoryEstimator, PlannedDevice};
use ferrotron::models::presets::Preset;
use ferrotron::models::trainer::{ParallelConfig, TrainerConfig};
use ferrotron::nn::schedule::LrSchedule;
use ferrotron::parallel::mesh::ParallelDims;
use ferrotron::parallel::tensor_parallel::SequenceParallel;
use ferrotron::{DType, Device};
use std::time::Duration;

fn step(c: &mut Criterion) {
    let threads = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let config = BenchConfig {
        micro_batch_size: 12,
        steps: 20,
        warmup: 3,
        ..BenchConfig::new(GptConfig::gpt2(65, 4, 128, 4, 64))
    };
    let device = Device::cpu(threads).expect("threads start");
    let mut group = c.benchmark_group("step");
    group.sample_size(10).throughput(Throughput::Elements(12 * 64));
    // `bench` times its own steps, so that making the model does not count.
    group.bench_function("char model", |b| {
        b.iter_custom(|iterations| {
            let seconds = (0..iterations)
                .map(|_| bench(&config, &device).expect("the step runs").s_per_step)
                .sum();
            Duration::from_secs_f64(seconds)
        });
    });
}

fn memory(c: &mut Criterion) {
    let preset = Preset::find("ptd-1t").expect("the preset exists");
    let schedule = LrSchedule::constant(1e-3).expect("a rate");
    let batch_size = BatchSizeConfig { global_batch_size: Some(512), ..BatchSizeConfig::default() };
    let estimator = MemoryEstimator::<Gpt> {
        model: preset.config(),
        layout: ParallelDims::new(512, 8, 1, 64).expect("a layout"),
        sequence_parallel: SequenceParallel::Off,
        trainer: TrainerConfig {
            parallel: ParallelConfig { recompute: Recompute::FULL, ..ParallelConfig::default() },
            ..TrainerConfig::new(1, schedule, BatchSize::new(batch_size).expect("a batch size"))
        },
        dtype: DType::BF16,
        seq_length: preset.seq_length,
        documents: DocumentResets::default(),
        device: PlannedDevice::Cpu { threads: 2 },
    };
    let mut group = c.benchmark_group("memory number");
    group.sample_size(10);
    group.bench_function("ptd-1t", |b| b.iter(|| estimator.stages().expect("it is estimated")));
}

criterion_group!(benches, step, memory);
criterion_main!(benches);
