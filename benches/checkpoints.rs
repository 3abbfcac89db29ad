//! The cost of checkpoints: `cargo bench --bench checkpoints -- async|layouts|dry`.
//!
//! - `async`: how much longer steps of GPT-2 124M take if a checkpoint is written meanwhile, against the same number of
//!   steps without, and against a save that training waits for. It aims at 0.3 of a step.
//! - `layouts [PRESET [FOLDER]]`: seconds and memory of saves by 1 and 8 ranks and of loads by 8 and 2, for GPT-2 355M and
//!   its optimizer's state, against a copy of the bytes. It takes 9 GB of disk in FOLDER.
//! - `dry`: bytes and files of checkpoints of 1.5 and 1000 billion parameters, counted on fake devices, against the
//!   formula of `docs/checkpoints.md`.
//!
//! Results are in `docs/checkpoints.md`.

#[path = "checkpoints/layouts.rs"]
mod layouts;

use ferrotron::models::batch_size::{BatchSize, BatchSizeConfig};
use ferrotron::models::bench::median;
use ferrotron::models::data::{Batch, Samples};
use ferrotron::models::gpt::Gpt;
use ferrotron::models::presets::Preset;
use ferrotron::models::trainer::{Model, ParallelConfig, SaveMode, Trainer, TrainerConfig};
use ferrotron::nn::schedule::LrSchedule;
use ferrotron::nn::{Scope, Sharding};
use ferrotron::parallel::data_parallel::DataParallelConfig;
use ferrotron::parallel::mesh::{Mesh, ParallelDims};
use ferrotron::parallel::tensor_parallel::SequenceParallel;
use ferrotron::{DType, Device, Result};
use std::path::Path;
use std::time::Instant;

/// Cost of a save, in steps, that it should stay below.
const LIMIT: f64 = 0.3;
/// Steps that are taken while a checkpoint is written.
const STEPS: usize = 2;
/// Pairs of steps alone and of steps with a save; the median of the differences is the cost.
const ROUNDS: usize = 7;

fn main() -> Result<()> {
    let mut words = std::env::args().skip(1).filter(|word| !word.starts_with("--"));
    match words.next().as_deref() {
        Some("async") => asynchronous(words.next().and_then(|word| word.parse().ok()).unwrap_or(1)),
        Some("dry") => dry(),
        Some("layouts") => {
            let preset = words.next().unwrap_or_else(|| "gpt2-350m".into());
            let folder = words.next().unwrap_or_else(|| env!("CARGO_TARGET_TMPDIR").into());
            let folder = tempfile::tempdir_in(folder).expect("a folder");
            layouts::all(&preset, folder.path());
            Ok(())
        }
        Some("phase") => {
            let words: Vec<String> = words.collect();
            let [what, layout, preset, folder] = &words[..] else {
                println!("say which: phase save|load LAYOUT PRESET FOLDER");
                return Ok(());
            };
            let config = |data| config(1, data, SaveMode::Blocking);
            layouts::phase([what, layout, preset], Path::new(folder), &config)
        }
        _ => {
            println!("say which: async [MICRO_BATCH], layouts [PRESET [FOLDER]], dry");
            Ok(())
        }
    }
}

/// Example batches of a preset.
struct Examples(Preset);

impl Samples for Examples {
    fn batch(&self, first_sample: u64, micro_batch: usize) -> Result<Batch> {
        let mut batch = Gpt::example_batch(&self.0.config(), micro_batch, self.0.seq_length)?;
        batch.first_sample = first_sample;
        Ok(batch)
    }

    fn seq_length(&self) -> usize {
        self.0.seq_length
    }
}

fn config(
    micro_batch_size: usize,
    data_parallel_size: usize,
    saves: SaveMode,
) -> Result<TrainerConfig> {
    let sizes =
        BatchSizeConfig { micro_batch_size, data_parallel_size, ..BatchSizeConfig::default() };
    let schedule = LrSchedule::constant(1e-4)?;
    Ok(TrainerConfig { saves, ..TrainerConfig::new(1, schedule, BatchSize::new(sizes)?) })
}

fn asynchronous(micro_batch: usize) -> Result<()> {
    let preset = Preset::find("gpt2-124m")?;
    let threads = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let scope = Scope::new(&Device::cpu(threads)?, DType::F32, 1);
    let config = config(micro_batch, 1, SaveMode::Async)?;
    let mut trainer = Trainer::<Gpt>::new(&scope, &preset.config(), config)?;
    let samples = Examples(preset);
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
    let forget = |saved: &Path| std::fs::remove_dir_all(saved).expect("it can be deleted");

    trainer.step(&samples)?;
    let started = Instant::now();
    let saved = trainer.save(folder.path(), None, serde_json::Value::Null)?;
    println!("a save that training waits for: {:.2} s", started.elapsed().as_secs_f64());
    forget(&saved);
    let (mut steps, mut costs) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        let alone = timed_steps(&mut trainer, &samples)?;
        let started = Instant::now();
        let pending = trainer.save_async(folder.path(), None, serde_json::Value::Null)?;
        let copied = started.elapsed().as_secs_f64();
        timed_steps(&mut trainer, &samples)?;
        let stepped = started.elapsed().as_secs_f64();
        let saved = pending.wait()?;
        let all = started.elapsed().as_secs_f64();
        forget(&saved);
        println!(
            "round {round}: {STEPS} steps {alone:.2} s, with a save {all:.2} s: {copied:.2} s for the copy, {:.2} s for \
             the end of the writer",
            all - stepped
        );
        steps.push(alone / STEPS as f64);
        costs.push(all - alone);
    }
    let step = median(steps);
    let cost = median(costs);
    println!(
        "a step {step:.2} s, a save {cost:.2} s: {:.2} of a step, to be below {LIMIT}",
        cost / step
    );
    Ok(())
}

/// Seconds of [`STEPS`] steps.
fn timed_steps(trainer: &mut Trainer<Gpt>, samples: &Examples) -> Result<f64> {
    let started = Instant::now();
    for _ in 0..STEPS {
        trainer.step(samples)?;
    }
    Ok(started.elapsed().as_secs_f64())
}

/// The files that all ranks of a layout write.
fn dry() -> Result<()> {
    for (name, [tensor, data, pipeline], sharding) in [
        ("gpt2-1.5b", [1, 1, 1], Sharding::None),
        ("gpt2-1.5b", [5, 2, 2], Sharding::Optimizer),
        ("ptd-1t", [8, 1, 64], Sharding::None),
    ] {
        let preset = Preset::find(name)?;
        let model = preset.config();
        let world = tensor * data * pipeline;
        let layout = ParallelDims::new(world, tensor, 1, pipeline)?;
        let started = Instant::now();
        let (mut bytes, mut files, mut largest) = (0, 0, 0);
        for rank in 0..world {
            let mesh = Mesh::fake(layout, rank, SequenceParallel::Off)?;
            let scope = Scope::new(&Device::fake(1)?, DType::BF16, 1);
            let data_parallel = DataParallelConfig { sharding, ..DataParallelConfig::default() };
            let parallel = ParallelConfig { data_parallel, ..ParallelConfig::default() };
            let config = TrainerConfig { parallel, ..config(1, data, SaveMode::Blocking)? };
            let trainer = Trainer::<Gpt>::on_mesh(&scope, &mesh, &model, config)?;
            let (weights, moments) = trainer.local_shards()?;
            files += usize::from(!weights.is_empty()) + usize::from(!moments.shards.is_empty());
            let shards = weights.iter().chain(&moments.shards);
            let held: u64 = shards
                .map(|shard| (shard.tensor.numel() * shard.tensor.dtype().size()) as u64)
                .sum();
            bytes += held;
            largest = largest.max(held);
        }
        // bf16 weights; master weights and two moments in f32.
        let want = (2 + 12) * model.num_parameters();
        println!(
            "{name}, tp {tensor} x pp {pipeline} x dp {data}: {bytes} bytes of tensors in {files} files, of a rank at most \
             {largest}; formula {want}; counted in {:.1} s",
            started.elapsed().as_secs_f64()
        );
        assert_eq!(bytes, want);
    }
    Ok(())
}
