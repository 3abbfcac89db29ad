//! A whole training step (forward, backward, clip, AdamW) of the char model.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use ferrotron::Device;
use ferrotron::models::bench::{BenchConfig, bench};
use ferrotron::models::gpt::GptConfig;
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

criterion_group!(benches, step);
criterion_main!(benches);
