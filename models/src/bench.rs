//! How long a training step takes: random tokens, the whole step (forward, backward, clip, optimizer).

use ferrotron_nn::schedule::Schedule;
use ferrotron_nn::{Axis, OptimizerConfig, Scope};
use ferrotron_parallel::mesh::Mesh;
use ferrotron_tensor::{DType, Device, Place, RandomKey, Result, Tensor};
use serde::Serialize;
use std::time::Instant;

use crate::batch_size::{BatchSize, BatchSizeConfig};
use crate::data::{Sampler, TokenSource};
use crate::gpt::GptConfig;
use crate::trainer::{Execution, ParallelConfig, PrecisionConfig, Trainer, TrainerConfig};

/// What to time.
#[derive(Debug, Clone)]
pub struct BenchConfig {
    /// The model.
    pub model: GptConfig,
    /// Samples per step.
    pub micro_batch_size: usize,
    /// Tokens per sample.
    pub seq_length: usize,
    /// Timed steps.
    pub steps: usize,
    /// Steps before those.
    pub warmup: usize,
    /// Type of weights and activations.
    pub dtype: DType,
    /// Which optimizer, with its constants.
    pub optimizer: OptimizerConfig,
    /// How the work is spread, and what is computed again.
    pub parallel: ParallelConfig,
    /// How weights of 16 bits are trained.
    pub precision: PrecisionConfig,
    /// How a GPU is given a step.
    pub execution: Execution,
}

impl BenchConfig {
    /// Five steps of four samples as long as the model takes, after one, in f32, with AdamW and all else by default.
    pub fn new(model: GptConfig) -> BenchConfig {
        BenchConfig {
            micro_batch_size: 4,
            seq_length: model.max_position_embeddings,
            model,
            steps: 5,
            warmup: 1,
            dtype: DType::F32,
            optimizer: OptimizerConfig::ADAMW,
            parallel: ParallelConfig::default(),
            precision: PrecisionConfig::default(),
            execution: Execution::Eager,
        }
    }
}

/// What was measured.
#[derive(Debug, Clone, Serialize)]
pub struct BenchReport {
    /// Number of parameters.
    pub params: u64,
    /// Samples per step.
    pub micro_batch_size: usize,
    /// Tokens per sample.
    pub seq_length: usize,
    /// Threads that computed.
    pub threads: usize,
    /// Median duration of a step.
    pub s_per_step: f64,
    /// Tokens per second at the median.
    pub tokens_per_s: f64,
    /// 10^9 floating-point operations per second at the median, by [`GptConfig::flops`].
    pub gflops: f64,
    /// Seconds that the step's matrix products alone take.
    pub gemm_floor_s: f64,
    /// Most resident memory of the process.
    pub peak_rss_mb: u64,
    /// Most bytes of the pool in use at once.
    pub peak_pool_mb: u64,
    /// Kernels and matrix products that a GPU was given in a step, on average; a CUDA graph is one launch, not counted.
    pub launches_per_step: Option<f64>,
    /// Bytes of the pool in use after the last step.
    pub pool_bytes: usize,
    /// Loss of the last step.
    pub last_loss: f64,
}

/// The training that is timed, and its samples: this rank's share of it, on `device`. Ranks that hold different samples
/// share the micro-batch.
pub fn trainer(config: &BenchConfig, device: &Device, mesh: &Mesh) -> Result<(Trainer, Sampler)> {
    let scope = Scope::new(device, config.dtype, 0);
    let data_parallel_size = mesh.layout().size(Axis::Data);
    let batch_size = BatchSize::new(BatchSizeConfig {
        micro_batch_size: config.micro_batch_size / data_parallel_size,
        data_parallel_size,
        global_batch_size: Some(config.micro_batch_size),
        ..BatchSizeConfig::default()
    })?;
    let trainer = TrainerConfig {
        optimizer: config.optimizer,
        parallel: config.parallel,
        precision: config.precision,
        execution: config.execution,
        ..TrainerConfig::new(0, Schedule::constant(6e-4)?, batch_size)
    };
    let trainer = Trainer::on_mesh(&scope, mesh, &config.model, trainer)?;
    Ok((trainer, Sampler::new(random_tokens(config)?, config.seq_length, 0)?))
}

/// Times training steps on `device`.
pub fn bench(config: &BenchConfig, device: &Device) -> Result<BenchReport> {
    let (mut trainer, sampler) = trainer(config, device, &Mesh::single())?;
    let model = &config.model;
    // One step after another, as in training: of a GPU, the mean of all is known.
    let mut steps = |count: usize| {
        (0..count).try_for_each(|_| trainer.advance(&sampler))?;
        trainer.reports(&sampler)
    };
    steps(config.warmup + config.execution.first_steps())?;
    let launches = || device.gpu().map_or(0, |gpu| gpu.launches() + gpu.product_launches());
    let before = launches();
    let reports = steps(config.steps)?;
    let given = (launches() - before) as f64 / config.steps.max(1) as f64;
    let last_loss = reports.last().map_or(f64::NAN, |report| report.loss);
    let seconds = reports.iter().map(|report| report.seconds).collect();
    let memory = device.memory();
    // Before the products alone are timed, which take memory of their own.
    let peak_rss_mb = peak_rss_bytes() >> 20;
    drop(trainer);
    let s_per_step = median(seconds);
    let tokens = (config.micro_batch_size * config.seq_length) as u64;
    Ok(BenchReport {
        params: model.num_parameters(),
        micro_batch_size: config.micro_batch_size,
        seq_length: config.seq_length,
        threads: device.threads(),
        s_per_step,
        tokens_per_s: tokens as f64 / s_per_step,
        gflops: model.flops(tokens, config.seq_length) / s_per_step / 1e9,
        gemm_floor_s: gemm_floor(config, device)?,
        peak_rss_mb,
        peak_pool_mb: (memory.peak >> 20) as u64,
        launches_per_step: device.is_gpu().then_some(given),
        pool_bytes: memory.current,
        last_loss,
    })
}

/// Uniform tokens, enough for every step to see others.
fn random_tokens(config: &BenchConfig) -> Result<TokenSource> {
    let key = RandomKey::new(0, 0, "bench tokens");
    let count =
        (config.micro_batch_size * (config.seq_length + 1) * (config.steps + config.warmup))
            .max(4096);
    let vocab = config.model.vocab_size;
    let tokens = (0..count as u64).map(|i| (key.uniform(i) * vocab as f64) as u32).collect();
    TokenSource::from_tokens(tokens, vocab)
}

/// Times the matrix products of a step alone: y = x W^T, dx = dy W and dW = dy^T x of every linear
/// layer, without attention.
fn gemm_floor(config: &BenchConfig, device: &Device) -> Result<f64> {
    use ferrotron_tensor::ops::matmul::{Accum, matmul_into};
    use ferrotron_tensor::ops::random::uniform;
    let model = &config.model;
    let heads = (model.num_attention_heads + 2 * model.num_query_groups) * model.kv_channels;
    let fc = if model.activation == crate::gpt::ActivationKind::Swiglu { 2 } else { 1 }
        * model.ffn_hidden_size;
    let shapes = [
        (model.hidden_size, heads, model.num_layers),
        (model.num_attention_heads * model.kv_channels, model.hidden_size, model.num_layers),
        (model.hidden_size, fc, model.num_layers),
        (model.ffn_hidden_size, model.hidden_size, model.num_layers),
        (model.hidden_size, model.vocab_size, 1),
    ];
    let rows = config.micro_batch_size * config.seq_length;
    let mut total = 0.0;
    for (inputs, outputs, count) in shapes {
        let random = |dims: [usize; 2]| {
            let key = RandomKey::new(0, 0, "floor");
            uniform(device, config.dtype, &Place::whole(&dims), &key, -1.0, 1.0)
        };
        let (x, w, dy) =
            (random([rows, inputs])?, random([outputs, inputs])?, random([rows, outputs])?);
        let empty = |like: &Tensor| Tensor::empty(device, config.dtype, like.dims());
        let (mut y, mut dx, mut dw) = (empty(&dy)?, empty(&x)?, empty(&w)?);
        let mut products = || {
            device.synchronize()?;
            let started = Instant::now();
            matmul_into(&mut y, Accum::Replace, &x, &w.transpose(0, 1)?)?;
            matmul_into(&mut dx, Accum::Replace, &dy, &w)?;
            matmul_into(&mut dw, Accum::Replace, &dy.transpose(0, 1)?, &x)?;
            device.synchronize()?;
            Ok(started.elapsed().as_secs_f64())
        };
        // The first time touches the memory; small products are repeated, as they are in a step.
        let repeats = (1_000_000_000 / (rows * inputs * outputs)).clamp(3, 100);
        let seconds =
            device.run(|| (0..=repeats).map(|_| products()).collect::<Result<Vec<f64>>>())?;
        total += median(seconds[1..].to_vec()) * count as f64;
    }
    Ok(total)
}

/// The middle one of `values`, the upper one of two; NaN of none.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Most resident memory of this process so far, from the kernel's own count; 0 where there is none.
pub fn peak_rss_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kilobytes =
        line.and_then(|line| line.trim().trim_end_matches(" kB").trim().parse::<u64>().ok());
    kilobytes.unwrap_or(0) * 1024
}
