//! Benchmark of training steps on random tokens: forward, backward, clipping and optimizer.

use ferrotron_nn::schedule::LrSchedule;
use ferrotron_nn::{Axis, OptimizerConfig, Scope};
use ferrotron_parallel::mesh::Mesh;
use ferrotron_tensor::ceilings::Ceilings;
use ferrotron_tensor::{DType, Device, RandomKey, Result, ShardSpec, Tensor};
use serde::Serialize;
use std::time::Instant;

use crate::io::data::{Sampler, TokenSource};
use crate::model::gpt::{Gpt, GptConfig};
use crate::training::batch_size::{BatchSize, BatchSizeConfig};
use crate::training::profile::{Profile, profile};
use crate::training::trainer::{
    ExecutionMode, ParallelConfig, PrecisionConfig, Trainer, TrainerConfig,
};

/// Configuration of a benchmark.
#[derive(Debug, Clone)]
pub struct BenchConfig {
    /// The model.
    pub model: GptConfig,
    /// Samples per step.
    pub micro_batch_size: usize,
    /// Tokens per sample.
    pub seq_length: usize,
    /// Number of timed steps.
    pub steps: usize,
    /// Number of steps before the timed ones.
    pub warmup: usize,
    /// Dtype of weights and activations.
    pub dtype: DType,
    /// The optimizer with its hyperparameters.
    pub optimizer: OptimizerConfig,
    /// Parallelism and recomputation.
    pub parallel: ParallelConfig,
    /// Training of 16-bit weights.
    pub precision: PrecisionConfig,
    /// Execution of steps on a GPU.
    pub execution: ExecutionMode,
    /// Whether as many steps more are taken for a [`Profile`].
    pub profile: bool,
}

impl BenchConfig {
    /// Five steps of four samples of maximum length after one warm-up step, in f32, with AdamW and defaults
    /// otherwise.
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
            execution: ExecutionMode::Eager,
            profile: false,
        }
    }
}

/// Results of a benchmark.
#[derive(Debug, Clone, Serialize)]
pub struct BenchReport {
    /// Number of parameters.
    pub params: u64,
    /// Samples per step.
    pub micro_batch_size: usize,
    /// Tokens per sample.
    pub seq_length: usize,
    /// Number of compute threads.
    pub threads: usize,
    /// Median duration of a step.
    pub s_per_step: f64,
    /// Tokens per second at the median.
    pub tokens_per_s: f64,
    /// 10^9 floating-point operations per second at the median, by [`GptConfig::flops`].
    pub gflops: f64,
    /// Seconds of the step's matrix products alone.
    pub gemm_floor_s: f64,
    /// Peak resident memory of the process.
    pub peak_rss_mb: u64,
    /// Peak memory of the pool in use.
    pub peak_pool_mb: u64,
    /// Average kernels and matrix products enqueued per step on a GPU; a CUDA graph counts as none.
    pub launches_per_step: Option<f64>,
    /// Bytes of the pool in use after the last step.
    pub pool_bytes: usize,
    /// Bytes that the pool took from the system during the timed steps: 0 once it is warm, since a GPU waits for more.
    pub pool_growth: usize,
    /// Loss of the last timed step.
    pub last_loss: f64,
    /// Time by operation, if it was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<Profile>,
}

/// This rank's trainer and samples for the benchmark, on `device`. Data-parallel ranks split the micro-batch.
pub fn trainer(
    config: &BenchConfig,
    device: &Device,
    mesh: &Mesh,
) -> Result<(Trainer<Gpt>, Sampler)> {
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
        ..TrainerConfig::new(0, LrSchedule::constant(6e-4)?, batch_size)
    };
    let trainer = Trainer::on_mesh(&scope, mesh, &config.model, trainer)?;
    Ok((trainer, Sampler::new(random_tokens(config)?, config.seq_length, 0)?))
}

/// Measures training steps on `device`.
pub fn bench(config: &BenchConfig, device: &Device) -> Result<BenchReport> {
    let (mut trainer, sampler) = trainer(config, device, &Mesh::single())?;
    let model = &config.model;
    // Without waiting in between, as in training; on a GPU only the mean duration is known.
    let mut steps = |count: usize| {
        (0..count).try_for_each(|_| trainer.step_async(&sampler))?;
        trainer.drain_reports(&sampler)
    };
    steps(config.warmup + config.execution.first_steps())?;
    let launches = || device.gpu().map_or(0, |gpu| gpu.launches() + gpu.product_launches());
    let (before, warm) = (launches(), device.memory().reserved);
    let reports = steps(config.steps)?;
    let given = (launches() - before) as f64 / config.steps.max(1) as f64;
    let last_loss = reports.last().map_or(f64::NAN, |report| report.loss);
    let seconds = reports.iter().map(|report| report.seconds).collect();
    let memory = device.memory();
    // Before timing the products alone, which allocates memory.
    let peak_rss_mb = peak_rss_bytes() >> 20;
    let profile = match config.profile {
        true => Some(profile(
            || Ceilings::measure(device),
            device,
            || {
                (0..config.steps).try_for_each(|_| trainer.step_async(&sampler))?;
                trainer.drain_reports(&sampler).map(drop)
            },
        )?),
        false => None,
    };
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
        pool_growth: memory.reserved.saturating_sub(warm),
        last_loss,
        profile,
    })
}

/// Uniform random tokens, enough for every step to get different ones.
fn random_tokens(config: &BenchConfig) -> Result<TokenSource> {
    let key = RandomKey::new(0, 0, "bench tokens");
    let count =
        (config.micro_batch_size * (config.seq_length + 1) * (config.steps + config.warmup))
            .max(4096);
    let vocab = config.model.vocab_size;
    let tokens = (0..count as u64).map(|i| (key.uniform(i) * vocab as f64) as u32).collect();
    TokenSource::from_tokens(tokens, vocab)
}

/// Times the matrix products of a step alone: y = x W^T, dx = dy W and dW = dy^T x of every linear layer. Attention is
/// left out.
fn gemm_floor(config: &BenchConfig, device: &Device) -> Result<f64> {
    use ferrotron_tensor::ops::matmul::{Accum, matmul_into};
    use ferrotron_tensor::ops::random::uniform;
    let model = &config.model;
    let heads = (model.num_attention_heads + 2 * model.num_query_groups) * model.kv_channels;
    let fc = if model.activation.is_gated() { 2 } else { 1 } * model.ffn_hidden_size;
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
            uniform(device, config.dtype, &ShardSpec::unsharded(&dims), &key, -1.0, 1.0)
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
        // The first run touches the memory and is not counted; small products are repeated, as in a step.
        let repeats = (1_000_000_000 / (rows * inputs * outputs)).clamp(3, 100);
        let seconds = (0..=repeats).map(|_| products()).collect::<Result<Vec<f64>>>()?;
        total += median(seconds[1..].to_vec()) * count as f64;
    }
    Ok(total)
}

/// The median of `values`, the mean of the middle two of an even number; NaN if empty.
///
/// ```
/// use ferrotron_models::bench::median;
/// assert_eq!((median(vec![3.0, 1.0, 2.0]), median(vec![4.0, 1.0, 2.0, 3.0])), (2.0, 2.5));
/// assert!(median(vec![]).is_nan());
/// ```
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let half = values.len() / 2;
    let Some(upper) = values.get(half) else { return f64::NAN };
    match values.len() % 2 {
        0 => (values[half - 1] + upper) / 2.0,
        _ => *upper,
    }
}

/// Peak resident memory of this process, as reported by the kernel; 0 if unavailable.
pub fn peak_rss_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kilobytes =
        line.and_then(|line| line.trim().trim_end_matches(" kB").trim().parse::<u64>().ok());
    kilobytes.unwrap_or(0) * 1024
}
