//! Published runs as runs of this project.

use ferrotron_models::batch_size::{BatchSize, BatchSizeConfig};
use ferrotron_models::gpt::{Gpt, GptConfig, Recompute};
use ferrotron_models::memory::{DocumentResets, MemoryEstimator, PlannedDevice, RankMemory};
use ferrotron_models::support::{ParallelismCheck, check};
use ferrotron_models::trainer::{ParallelConfig, TrainerConfig};
use ferrotron_nn::schedule::LrSchedule;
use ferrotron_nn::{Axis, GradDType, Sharding};
use ferrotron_parallel::data_parallel::DataParallelConfig;
use ferrotron_parallel::mesh::ParallelDims;
use ferrotron_parallel::pipeline::ScheduleKind;
use ferrotron_parallel::tensor_parallel::SequenceParallel;
use ferrotron_planner::cluster::{AttentionKernels, Cluster, OptimizerPasses, Software};
use ferrotron_planner::{Prediction, RecordedRun};
use ferrotron_tensor::{DType, Result};

/// Vocabulary of all runs: GPT-2's, padded.
pub const VOCAB: usize = 51_200;

/// A run of Megatron-LM or DeepSpeed.
#[derive(Debug, Clone, Copy)]
pub struct Run {
    /// Layers, hidden size, heads.
    pub model: [usize; 3],
    /// Tensor- and pipeline-parallel size, and chunks of a stage.
    pub layout: [usize; 3],
    /// Whether weights' gradients are put off: ZB-H1.
    pub zero_bubble: bool,
    /// Samples of a micro-batch and of a step.
    pub batch: [usize; 2],
    pub gpus: usize,
    pub seq_length: usize,
    pub recompute: Recompute,
    pub sequence_parallel: SequenceParallel,
    pub sharding: Sharding,
    pub dtype: DType,
}

impl Run {
    /// The settings that most runs share. Sizes are those of no run.
    pub const MEGATRON: Run = Run {
        model: [1, 128, 1],
        layout: [1, 1, 1],
        zero_bubble: false,
        batch: [1, 1],
        gpus: 1,
        seq_length: 2048,
        recompute: Recompute::FULL,
        sequence_parallel: SequenceParallel::Off,
        sharding: Sharding::None,
        dtype: DType::BF16,
    };

    /// Records one rank of each stage that differs.
    pub fn record(&self, cluster: &Cluster) -> Result<RecordedRun> {
        RecordedRun::of_differing_stages(&self.estimator()?, cluster)
    }

    /// The predicted step.
    pub fn predict(&self, cluster: &Cluster) -> Result<Prediction> {
        self.record(cluster)?.predict(cluster, false)
    }

    /// The predicted TFLOP/s of a GPU, with recomputation.
    pub fn tflops(&self, cluster: &Cluster) -> Result<f64> {
        Ok(self.predict(cluster)?.hardware_per_gpu() / 1e12)
    }

    /// The memory of a rank of the first stage.
    pub fn first_stage(&self, cluster: &Cluster) -> Result<RankMemory> {
        let run = MemoryEstimator::<Gpt> { device: cluster.gpu.device, ..self.estimator()? };
        Ok(run.stage(0)?.memory)
    }

    /// The run as the trainer takes it. Errors as a training would.
    pub fn estimator(&self) -> Result<MemoryEstimator<Gpt>> {
        let [layers, hidden, heads] = self.model;
        let [tensor, pipeline, chunks] = self.layout;
        let [micro_batch_size, batch] = self.batch;
        let mut model = GptConfig::gpt2(VOCAB, layers, hidden, heads, self.seq_length);
        (model.hidden_dropout, model.attention_dropout) = (0.1, 0.1); // Megatron-LM's defaults
        let batch_size = BatchSize::new(BatchSizeConfig {
            micro_batch_size,
            data_parallel_size: self.gpus / (tensor * pipeline),
            global_batch_size: Some(batch),
            ..BatchSizeConfig::default()
        })?;
        let trainer = TrainerConfig::new(1, LrSchedule::constant(1e-4)?, batch_size);
        // DeepSpeed gathers each matrix of a block by itself (arXiv 2104.07857, section 6.1); the smallest has hidden x hidden.
        let bucket = if self.sharding == Sharding::Weights { hidden * hidden } else { 40_000_000 };
        let parallel = ParallelConfig {
            pipeline_schedule: match (chunks, self.zero_bubble) {
                (_, true) => ScheduleKind::ZbH1,
                (1, false) => ScheduleKind::OneFOneB,
                _ => ScheduleKind::Interleaved,
            },
            chunks,
            // Gradients were reduced in 16 bits.
            data_parallel: DataParallelConfig {
                gradients: GradDType::Weight,
                bucket_numel: Some(bucket),
                sharding: self.sharding,
                ..DataParallelConfig::default()
            },
            recompute: self.recompute,
            ..ParallelConfig::default()
        };
        let run = MemoryEstimator::<Gpt> {
            model,
            layout: ParallelDims::new(self.gpus, tensor, 1, pipeline)?,
            sequence_parallel: self.sequence_parallel,
            trainer: TrainerConfig { parallel, ..trainer },
            dtype: self.dtype,
            seq_length: self.seq_length,
            documents: DocumentResets::default(),
            device: PlannedDevice::Cpu { threads: 1 },
        };
        check(&ParallelismCheck {
            model: (&run.model).into(),
            layout: run.layout,
            sequence_parallel: run.sequence_parallel,
            parallel: &run.trainer.parallel,
            seq_length: run.seq_length,
            microbatches: batch / (micro_batch_size * run.layout.size(Axis::Data)),
        })?;
        Ok(run)
    }
}

/// The cluster of that name with the software of 2019 to 2022.
pub fn cluster(name: &str) -> Result<Cluster> {
    let cluster = Cluster::named(name)?;
    // Megatron-LM's `p2p_communication.py` waits for each batch of messages.
    let software = Software {
        attention: AttentionKernels::Unfused,
        overlap_messages: false,
        optimizer: OptimizerPasses::Unfused,
        sequence_first: true,
        ..cluster.software
    };
    Ok(Cluster { software, ..cluster })
}

/// `cluster` with the products' efficiency multiplied by `scale`.
pub fn scaled(cluster: &Cluster, scale: f64) -> Cluster {
    let mut cluster = cluster.clone();
    cluster.gpu.product_efficiency = (scale * cluster.gpu.product_efficiency).min(1.0);
    cluster
}

/// Scales that are fitted to rows: from the first by so much.
const FIRST: f64 = 0.80;
const STEP: f64 = 0.005;
const SCALES: usize = 75;

/// The scales of the products' efficiency that are tried.
pub fn scales() -> impl Iterator<Item = f64> {
    (0..SCALES).map(|step| FIRST + STEP * step as f64)
}

/// The scale with the least squares of relative errors over rows, of each of which the errors by scale are given.
pub fn fitted<'a>(rows: impl Iterator<Item = &'a Vec<f64>> + Clone) -> f64 {
    let loss = |index: usize| -> f64 { rows.clone().map(|errors| errors[index].powi(2)).sum() };
    let best = (0..SCALES).min_by(|a, b| loss(*a).total_cmp(&loss(*b)));
    FIRST + STEP * best.unwrap_or(0) as f64
}

/// Prints the mean and the largest of relative errors.
pub fn print_errors(of: &str, errors: &[f64]) {
    let mean = errors.iter().map(|error| error.abs()).sum::<f64>() / errors.len() as f64;
    let worst = errors.iter().fold(0.0, |worst: f64, error| worst.max(error.abs()));
    println!("{of}: mean error {:.2} %, worst {:.2} %", 100.0 * mean, 100.0 * worst);
}
