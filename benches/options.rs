//! Measures the options that save memory: training steps of GPT-2 124M (4 sequences of 256 tokens) on all cores. Each
//! row has the peak of the device's pool and the time of a step, beside those of plain f32 training. Host memory is in
//! the system's folder for temporary files (`TMPDIR`), which should be on a disk.
//!
//! `cargo bench --bench options [-- STEPS]` prints a table in Markdown: the medians of STEPS steps (3 unless told),
//! the rows one after another in one run.

use ferrotron::autograd::ActivationCompressionConfig;
use ferrotron::models::bench::{BenchConfig, median, trainer};
use ferrotron::models::gpt::{
    Recompute, RecomputeMethod, RecomputeModules, RecomputedAttention, RecomputedMlp, RegionInputs,
    SavedActivations,
};
use ferrotron::models::presets::Preset;
use ferrotron::models::trainer::{ParallelConfig, PrecisionConfig};
use ferrotron::nn::{AdafactorConfig, OptimizerConfig, WeightUpdate};
use ferrotron::parallel::mesh::Mesh;
use ferrotron::tensor::Category;
use ferrotron::{DType, Device, MemoryKind, Result};

fn main() -> Result<()> {
    let steps = std::env::args().filter_map(|arg| arg.parse().ok()).next().unwrap_or(3);
    let threads = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let plain = BenchConfig {
        seq_length: 256,
        steps,
        ..BenchConfig::new(Preset::find("gpt2-124m")?.config())
    };
    let rows = rows(&plain);
    println!("| options | weights | gradients | optimizer | saved | peak in all | host | step | |");
    println!("|---|---|---|---|---|---|---|---|---|");
    let mut first = None;
    for (number, (name, config)) in rows.iter().enumerate() {
        eprintln!("{} of {}: {name}", number + 1, rows.len());
        let found = measure(config, &Device::cpu(threads)?)?;
        let baseline = *first.get_or_insert(found.seconds);
        let megabytes = |category: Category| found.peaks[category as usize] >> 20;
        println!(
            "| {name} | {} | {} | {} | {} | {} MiB | {} | {:.2} s | {:.2} x |",
            megabytes(Category::Weights),
            megabytes(Category::Gradients),
            megabytes(Category::Optimizer),
            megabytes(Category::Saved),
            found.peak >> 20,
            found.host >> 20,
            found.seconds,
            found.seconds / baseline,
        );
    }
    Ok(())
}

/// The configurations that are compared, by their options on the command line. The first is the reference of the
/// others.
fn rows(plain: &BenchConfig) -> Vec<(&'static str, BenchConfig)> {
    let with = |recompute: Recompute| BenchConfig {
        parallel: ParallelConfig { recompute, ..plain.parallel },
        ..plain.clone()
    };
    let kept = |saved_activations: SavedActivations| BenchConfig {
        parallel: ParallelConfig { saved_activations, ..plain.parallel },
        ..plain.clone()
    };
    let host = |config: BenchConfig| BenchConfig {
        parallel: ParallelConfig { optimizer_states: MemoryKind::Host, ..config.parallel },
        ..config
    };
    let offloaded = SavedActivations { offloaded_layers: 10, ..SavedActivations::default() };
    let narrow = SavedActivations {
        packing: ActivationCompressionConfig {
            dtype: Some(DType::BF16),
            ..ActivationCompressionConfig::default()
        },
        ..SavedActivations::default()
    };
    let bf16 = BenchConfig { dtype: DType::BF16, ..plain.clone() };
    let in_place =
        PrecisionConfig { weight_update: WeightUpdate::InPlace, ..PrecisionConfig::default() };
    let selective =
        |attention, mlp| with(Recompute::Selective(RecomputeModules { attention, mlp }));
    let full = |layers| {
        let (method, inputs) = (RecomputeMethod::Uniform, RegionInputs::Whole);
        with(Recompute::Full { method, layers, inputs })
    };
    vec![
        ("none", plain.clone()),
        (
            "`--recompute-granularity selective`",
            selective(RecomputedAttention::Core, RecomputedMlp::None),
        ),
        (
            "`--recompute-granularity selective --recompute-modules attn mlp`",
            selective(RecomputedAttention::Layer, RecomputedMlp::Layer),
        ),
        ("`--recompute-granularity full`", full(1)),
        ("`--recompute-granularity full --recompute-num-layers 3`", full(3)),
        ("`--saved-activations-dtype bf16`", kept(narrow)),
        ("`--cpu-offloading-num-layers 10`", kept(offloaded)),
        ("`--offload-optimizer-states`", host(plain.clone())),
        ("`--offload-optimizer-states --cpu-offloading-num-layers 10`", host(kept(offloaded))),
        (
            "`--optimizer adafactor`",
            BenchConfig {
                optimizer: OptimizerConfig::Adafactor(AdafactorConfig::default()),
                ..plain.clone()
            },
        ),
        ("`--bf16`", bf16.clone()),
        ("`--bf16 --offload-optimizer-states`", host(bf16.clone())),
        ("`--bf16 --no-master-weights`", BenchConfig { precision: in_place, ..bf16.clone() }),
    ]
}

/// The measurements of one configuration.
struct Found {
    peaks: [usize; Category::ALL.len()],
    peak: usize,
    /// Peak of host memory, in bytes.
    host: usize,
    seconds: f64,
}

fn measure(config: &BenchConfig, device: &Device) -> Result<Found> {
    let (mut trainer, sampler) = trainer(config, device, &Mesh::single())?;
    let mut seconds = Vec::new();
    for step in 0..config.warmup + config.steps {
        let report = trainer.step(&sampler)?;
        seconds.extend((step >= config.warmup).then_some(report.seconds));
    }
    let (memory, host) = (device.memory(), device.memory_of(MemoryKind::Host).peak);
    let seconds = median(seconds);
    Ok(Found { peaks: memory.peak_by_category, peak: memory.peak, host, seconds })
}
