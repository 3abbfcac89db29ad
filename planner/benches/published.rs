//! Compares predictions with published runs: `cargo bench -p ferrotron-planner`.
//!
//! Each row has the published TFLOP/s a GPU, the prediction with the cluster's own numbers, and the prediction with one
//! scale of the products' efficiency that is fitted to the other rows of the table.

use ferrotron_models::batch_size::{BatchSize, BatchSizeConfig};
use ferrotron_models::gpt::{Gpt, GptConfig, Recompute};
use ferrotron_models::memory::{MemoryEstimator, PlannedDevice};
use ferrotron_models::trainer::{ParallelConfig, TrainerConfig};
use ferrotron_nn::GradDType;
use ferrotron_nn::schedule::LrSchedule;
use ferrotron_parallel::data_parallel::DataParallelConfig;
use ferrotron_parallel::mesh::ParallelDims;
use ferrotron_parallel::pipeline::ScheduleKind;
use ferrotron_parallel::tensor_parallel::SequenceParallel;
use ferrotron_planner::cluster::{AttentionKernels, Cluster, Software};
use ferrotron_planner::{Prediction, RecordedRun};
use ferrotron_tensor::{DType, Result};
use std::time::Instant;

/// Vocabulary and sequence length of all rows.
const VOCAB: usize = 51_200;
const SEQ_LENGTH: usize = 2048;

/// A row of table 1 of arXiv:2104.04473, with the settings of Megatron-LM's `examples/sc21`.
struct Row {
    name: &'static str,
    /// Layers, hidden size, heads.
    model: [usize; 3],
    /// Tensor- and pipeline-parallel size, micro-batch, chunks.
    layout: [usize; 4],
    /// GPUs and global batch.
    scale: [usize; 2],
    /// Whether gradients were reduced during backward.
    overlap: bool,
    tflops: f64,
}

const fn row(
    name: &'static str,
    model: [usize; 3],
    layout: [usize; 4],
    scale: [usize; 2],
    overlap: bool,
    tflops: f64,
) -> Row {
    Row { name, model, layout, scale, overlap, tflops }
}

const PTD_P: [Row; 10] = [
    row("1.7B", [24, 2304, 24], [1, 1, 16, 1], [32, 512], true, 137.0),
    row("3.6B", [30, 3072, 32], [2, 1, 16, 1], [64, 512], true, 138.0),
    row("7.5B", [36, 4096, 32], [4, 1, 16, 1], [128, 512], true, 142.0),
    row("18.4B", [40, 6144, 48], [8, 1, 8, 1], [256, 1024], true, 135.0),
    row("39.1B", [48, 8192, 64], [8, 2, 4, 1], [512, 1536], false, 138.0),
    row("76.1B", [60, 10240, 80], [8, 4, 2, 3], [1024, 1792], false, 140.0),
    row("145.6B", [80, 12288, 96], [8, 8, 2, 2], [1536, 2304], false, 148.0),
    row("310.1B", [96, 16384, 128], [8, 16, 1, 2], [1920, 2160], false, 155.0),
    // Heads of 160 elements, of which the runs had 128 and 160: kernels here take heads of at most 128.
    row("529.6B", [105, 20480, 160], [8, 35, 1, 3], [2520, 2520], false, 163.0),
    row("1008.0B", [128, 25600, 200], [8, 64, 1, 1], [3072, 3072], false, 163.0),
];

impl Row {
    fn run(&self) -> Result<MemoryEstimator<Gpt>> {
        let [layers, hidden, heads] = self.model;
        let [tensor, pipeline, micro_batch_size, chunks] = self.layout;
        let [gpus, batch] = self.scale;
        let mut model = GptConfig::gpt2(VOCAB, layers, hidden, heads, SEQ_LENGTH);
        (model.hidden_dropout, model.attention_dropout) = (0.1, 0.1); // Megatron-LM's defaults
        let batch_size = BatchSize::new(BatchSizeConfig {
            micro_batch_size,
            data_parallel_size: gpus / (tensor * pipeline),
            global_batch_size: Some(batch),
            ..BatchSizeConfig::default()
        })?;
        let trainer = TrainerConfig::new(1, LrSchedule::constant(1e-4)?, batch_size);
        let parallel = ParallelConfig {
            pipeline_schedule: match chunks {
                1 => ScheduleKind::OneFOneB,
                _ => ScheduleKind::Interleaved,
            },
            chunks,
            // Gradients were reduced in 16 bits.
            data_parallel: DataParallelConfig {
                gradients: GradDType::Weight,
                bucket_numel: Some(40_000_000),
                ..DataParallelConfig::default()
            },
            recompute: Recompute::FULL,
            ..ParallelConfig::default()
        };
        Ok(MemoryEstimator::<Gpt> {
            model,
            layout: ParallelDims::new(gpus, tensor, 1, pipeline)?,
            sequence_parallel: SequenceParallel::Off,
            trainer: TrainerConfig { parallel, ..trainer },
            dtype: DType::BF16,
            seq_length: SEQ_LENGTH,
            device: PlannedDevice::Cpu { threads: 1 },
        })
    }
}

/// A row, recorded, and the cluster of its time.
struct Recorded<'a> {
    row: &'a Row,
    run: RecordedRun,
    cluster: Cluster,
}

impl Recorded<'_> {
    /// The prediction with the products' efficiency multiplied by `scale`.
    fn predict(&self, scale: f64) -> Result<Prediction> {
        let mut cluster = self.cluster.clone();
        cluster.gpu.product_efficiency *= scale;
        self.run.predict(&cluster, false)
    }

    /// Predicted over published TFLOP/s, less one.
    fn error(&self, scale: f64) -> Result<f64> {
        Ok(self.predict(scale)?.hardware_per_gpu() / 1e12 / self.row.tflops - 1.0)
    }
}

/// The scale with the least mean absolute error over `rows`, by golden-section search.
fn fitted(rows: &[&Recorded<'_>]) -> Result<f64> {
    let loss =
        |scale: f64| -> Result<f64> { rows.iter().map(|row| row.error(scale).map(f64::abs)).sum() };
    let golden = (5_f64.sqrt() - 1.0) / 2.0;
    let (mut low, mut high) = (0.5, 1.3);
    for _ in 0..14 {
        let (a, b) = (high - golden * (high - low), low + golden * (high - low));
        if loss(a)? < loss(b)? { high = b } else { low = a }
    }
    Ok((low + high) / 2.0)
}

fn main() -> Result<()> {
    // `cargo test` runs benches too, without this argument.
    if !std::env::args().any(|argument| argument == "--bench") {
        return Ok(());
    }
    let started = Instant::now();
    let cluster = Cluster::named("dgx-a100-80")?;
    let record = |row: &'static Row| -> Result<Recorded<'static>> {
        let software =
            Software { attention: AttentionKernels::Unfused, overlap_grad_reduce: row.overlap };
        let run = RecordedRun::new(&row.run()?, cluster.gpu.architecture, false)?;
        Ok(Recorded { row, run, cluster: Cluster { software, ..cluster.clone() } })
    };
    let rows: Vec<Recorded<'_>> = PTD_P.iter().map(record).collect::<Result<_>>()?;
    println!("recorded in {:.1} s", started.elapsed().as_secs_f64());
    println!(
        "{:10}{:>10}{:>10}{:>9}{:>8}{:>10}{:>9}{:>9}{:>9}{:>9}{:>9}",
        "model",
        "published",
        "predicted",
        "error %",
        "scale",
        "left out",
        "error %",
        "bubble",
        "tp %",
        "dp %",
        "GB"
    );
    let mut errors = [Vec::new(), Vec::new()];
    for (left_out, row) in rows.iter().enumerate() {
        let others: Vec<&Recorded<'_>> =
            rows.iter().enumerate().filter(|(i, _)| *i != left_out).map(|(_, row)| row).collect();
        let scale = fitted(&others)?;
        let (plain, scaled) = (row.predict(1.0)?, row.predict(scale)?);
        let found = [row.error(1.0)?, row.error(scale)?];
        let exposed = |kind: usize| 100.0 * scaled.mean.exposed[kind] / scaled.seconds();
        println!(
            "{:10}{:>10.0}{:>10.1}{:>9.1}{:>8.3}{:>10.1}{:>9.1}{:>9.3}{:>9.1}{:>9.1}{:>9.1}",
            row.row.name,
            row.row.tflops,
            plain.hardware_per_gpu() / 1e12,
            100.0 * found[0],
            scale,
            scaled.hardware_per_gpu() / 1e12,
            100.0 * found[1],
            scaled.bubble(),
            exposed(0),
            exposed(2),
            scaled.peak_bytes() as f64 / 1e9
        );
        errors.iter_mut().zip(found).for_each(|(errors, found)| errors.push(found.abs()));
    }
    for (name, errors) in ["predicted", "left out"].into_iter().zip(errors) {
        let mean = errors.iter().sum::<f64>() / errors.len() as f64;
        let worst = errors.iter().fold(0.0, |worst: f64, error| worst.max(*error));
        println!("{name}: mean error {:.2} %, worst {:.2} %", 100.0 * mean, 100.0 * worst);
    }
    println!("{:.1} s in all", started.elapsed().as_secs_f64());
    Ok(())
}
