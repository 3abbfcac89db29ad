//! A small model in training in a layout, every rank a thread, and what its ranks hold together.

use ferrotron::models::batch_size::{BatchSize, BatchSizeConfig};
use ferrotron::models::checkpoint::{Checkpoint, LocalShard, TrainState};
use ferrotron::models::gpt::GptConfig;
use ferrotron::models::stop::StopFlag;
use ferrotron::models::support::{ModelSizes, ParallelismCheck, check};
use ferrotron::models::trainer::{ParallelConfig, PrecisionConfig, Trainer, TrainerConfig};
use ferrotron::nn::schedule::LrSchedule;
use ferrotron::nn::{OptimizerConfig, ParamPatterns, Scope, Sharding};
use ferrotron::parallel::collective::{WorldConfig, run_threads};
use ferrotron::parallel::data_parallel::{AsyncUpdates, DataParallelConfig};
use ferrotron::parallel::mesh::{self, Mesh};
use ferrotron::parallel::pipeline::ScheduleKind;
use ferrotron::parallel::tensor_parallel::SequenceParallel;
use ferrotron::tensor::{DType, Device, Result};
use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use super::samples::{Configuration, Noise};
use super::tensors::{Part, Tensors, assemble};

pub const SEQ_LENGTH: usize = 8;
const GLOBAL_BATCH: usize = 8;

/// The layout of the work.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Layout {
    pub tp: usize,
    pub pp: usize,
    pub dp: usize,
    pub cp: usize,
    pub sequence: SequenceParallel,
    pub chunks: usize,
    pub sharding: Sharding,
    pub synchronize_every: usize,
    pub async_updates: Option<AsyncUpdates>,
}

impl Layout {
    /// One rank.
    pub const SERIAL: Layout = Layout {
        tp: 1,
        pp: 1,
        dp: 1,
        cp: 1,
        sequence: SequenceParallel::Off,
        chunks: 1,
        sharding: Sharding::None,
        synchronize_every: 1,
        async_updates: None,
    };

    pub fn model(tp: usize, pp: usize) -> Layout {
        Layout { tp, pp, ..Layout::SERIAL }
    }

    pub fn data(dp: usize, sharding: Sharding) -> Layout {
        Layout { dp, sharding, ..Layout::SERIAL }
    }

    pub fn ranks(&self) -> usize {
        self.tp * self.pp * self.dp * self.cp
    }

    fn mesh(&self) -> mesh::ParallelDims {
        mesh::ParallelDims::new(self.ranks(), self.tp, self.cp, self.pp).unwrap()
    }

    fn parallel(&self) -> ParallelConfig {
        ParallelConfig {
            pipeline_schedule: match self.chunks {
                1 => ScheduleKind::OneFOneB,
                _ => ScheduleKind::Interleaved,
            },
            chunks: self.chunks,
            data_parallel: DataParallelConfig {
                sharding: self.sharding,
                // Several buckets, which no parameter fills exactly.
                bucket_numel: Some(700),
                synchronize_every: self.synchronize_every,
                async_updates: self.async_updates,
                ..DataParallelConfig::default()
            },
            ..ParallelConfig::default()
        }
    }

    /// Whether `model` can be trained so.
    pub fn allowed(&self, model: impl Into<ModelSizes>) -> bool {
        let plan = ParallelismCheck {
            model: model.into(),
            layout: self.mesh(),
            sequence_parallel: self.sequence,
            parallel: &self.parallel(),
            seq_length: SEQ_LENGTH,
            microbatches: GLOBAL_BATCH / self.dp,
        };
        check(&plan).is_ok()
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Layout { tp, pp, dp, cp, chunks, sharding, .. } = self;
        let sequence = if self.sequence == SequenceParallel::On { "+sp" } else { "" };
        let zero = *sharding as usize;
        write!(f, "(tp {tp}{sequence} pp {pp} x {chunks} dp {dp} cp {cp} zero {zero})")
    }
}

/// The work of every rank, in order.
pub struct Task<'a, C = GptConfig> {
    pub model: &'a C,
    pub optimizer: OptimizerConfig,
    pub ema_decay: Option<f64>,
    /// Patterns of parameters that stay in f32.
    pub keep_in_fp32: &'a [&'a str],
    pub dtype: DType,
    pub precision: PrecisionConfig,
    /// Constant.
    pub learning_rate: f64,
    /// Number of samples after which the same ones come again.
    pub distinct_samples: u64,
    pub layout: Layout,
    /// The seed of the initial weights.
    pub seed: u64,
    /// The checkpoint to resume from.
    pub load: Option<&'a Path>,
    /// Number of steps to take.
    pub steps: usize,
    /// Folder to save in after each of them, with an evaluation.
    pub between: Option<&'a Path>,
    /// Folder to save in at the end.
    pub save: Option<&'a Path>,
}

impl<C> Clone for Task<'_, C> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<C> Copy for Task<'_, C> {}

/// The results of a task.
#[derive(Debug)]
pub struct Found {
    /// Loss of every step.
    pub losses: Vec<f64>,
    /// Gradient norm of every step.
    pub norms: Vec<f64>,
    /// Loss of every evaluation.
    pub evaluations: Vec<f64>,
    /// Numbers of the samples of every step.
    pub samples: Vec<BTreeSet<u64>>,
    /// All weights, and moments as checkpoints call them, at the end.
    pub tensors: Tensors,
    pub progress: TrainState,
    /// Bytes of files that each rank has read to load, and bytes that it has sent to others.
    pub traffic: Vec<(u64, u64)>,
}

struct RankFound {
    losses: Vec<f64>,
    norms: Vec<f64>,
    evaluations: Vec<f64>,
    samples: Vec<BTreeSet<u64>>,
    held: Vec<Part>,
    progress: TrainState,
    traffic: (u64, u64),
}

fn run_ranks<C: Configuration>(task: &Task<C>) -> Vec<Result<RankFound>> {
    let config = WorldConfig { timeout: Duration::from_secs(60) };
    run_threads(task.layout.ranks(), &config, |world| {
        run_rank(task, &Mesh::new(&world, task.layout.mesh(), task.layout.sequence)?)
    })
}

/// The errors of ranks that cannot carry out a task.
pub fn load_errors<C: Configuration>(task: &Task<C>) -> Vec<String> {
    run_ranks(task).into_iter().filter_map(Result::err).map(|error| error.to_string()).collect()
}

/// Carries out a task, and checks that the ranks agree and hold every element once.
pub fn run<C: Configuration>(task: &Task<C>) -> Result<Found> {
    let ranks = run_ranks(task).into_iter().collect::<Result<Vec<_>>>()?;
    let (losses, progress) = (ranks[0].losses.clone(), ranks[0].progress.clone());
    let (norms, evaluations) = (ranks[0].norms.clone(), ranks[0].evaluations.clone());
    let mut samples = vec![BTreeSet::new(); task.steps];
    let (mut held, mut traffic) = (Vec::new(), Vec::new());
    for (rank, found) in ranks.into_iter().enumerate() {
        let seen = (&found.losses, &found.evaluations, &found.progress);
        assert_eq!(seen, (&losses, &evaluations, &progress), "rank {rank} of {}", task.layout);
        // Replicas that take steps of their own have gradients of their own.
        if task.layout.synchronize_every == 1 {
            assert_eq!(found.norms, norms, "rank {rank} of {}", task.layout);
        }
        for (all, own) in samples.iter_mut().zip(found.samples) {
            all.extend(own);
        }
        held.extend(found.held);
        traffic.push(found.traffic);
    }
    let tensors = assemble(held);
    Ok(Found { losses, norms, evaluations, samples, tensors, progress, traffic })
}

pub fn trainer_config(layout: &Layout) -> Result<TrainerConfig> {
    let batch_size = BatchSize::new(BatchSizeConfig {
        data_parallel_size: layout.dp,
        global_batch_size: Some(GLOBAL_BATCH),
        ..BatchSizeConfig::default()
    })?;
    Ok(TrainerConfig {
        clip_grad: 0.05,
        parallel: layout.parallel(),
        ..TrainerConfig::new(7, LrSchedule::constant(1e-2)?, batch_size)
    })
}

fn run_rank<C: Configuration>(task: &Task<C>, mesh: &Mesh) -> Result<RankFound> {
    let scope = Scope::new(&Device::cpu(1)?, task.dtype, task.seed);
    let config = TrainerConfig {
        optimizer: task.optimizer,
        ema_decay: task.ema_decay,
        keep_in_fp32: ParamPatterns::new(task.keep_in_fp32.iter().copied())?,
        precision: task.precision,
        schedule: LrSchedule::constant(task.learning_rate)?,
        ..trainer_config(&task.layout)?
    };
    let mut trainer = Trainer::<C::Model>::on_mesh(&scope, mesh, task.model, config)?;
    let mut traffic = (0, 0);
    if let Some(path) = task.load {
        let checkpoint = Checkpoint::peek(path)?;
        trainer.load(&checkpoint)?;
        traffic = (checkpoint.bytes_read(), mesh.world().traffic().calls_and_bytes("send").1);
    }
    let noise = Noise {
        model: task.model,
        distinct_samples: task.distinct_samples,
        asked: Mutex::default(),
    };
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    let (mut evaluations, mut samples) = (Vec::new(), Vec::new());
    for _ in 0..task.steps {
        let report = trainer.step(&noise)?;
        losses.push(report.loss);
        norms.push(report.grad_norm);
        samples.push(std::mem::take(&mut *noise.asked.lock().unwrap()));
        if let Some(folder) = task.between {
            let found = trainer.evaluate(&*task.model.validation()?, &StopFlag::default())?;
            evaluations.push(found.expect("nobody asks to stop").loss);
            trainer.save(folder, None, serde_json::Value::Null)?;
        }
    }
    if let Some(folder) = task.save {
        trainer.save(folder, None, serde_json::Value::Null)?;
    }
    let (weights, moments) = trainer.local_shards()?;
    let part = |held: LocalShard| Ok((held.name, held.place, held.tensor.to_f64()?));
    let held = weights.into_iter().chain(moments.shards).map(part).collect::<Result<_>>()?;
    Ok(RankFound {
        losses,
        norms,
        evaluations,
        samples,
        held,
        progress: trainer.progress().clone(),
        traffic,
    })
}

/// The first element that is not the same to the last bit, or `None`.
pub fn difference(got: &Tensors, want: &Tensors) -> Option<String> {
    if !got.keys().eq(want.keys()) {
        let (got, want): (Vec<_>, Vec<_>) = (got.keys().collect(), want.keys().collect());
        return Some(format!("other tensors: got {got:?}, want {want:?}"));
    }
    got.iter().zip(want).find_map(|((name, got), (_, want))| {
        let differs = |(got, want): (&f64, &f64)| got.to_bits() != want.to_bits();
        let index = got.iter().zip(want).position(differs);
        let index = index.or((got.len() != want.len()).then_some(got.len().min(want.len())))?;
        let (got, want) = (got.get(index), want.get(index));
        Some(format!("{name}[{index}]: got {got:?}, want {want:?}"))
    })
}
