//! Trains a small model for a few steps in a layout, and puts together what its ranks hold.

use ferrotron::models::batch_size::{BatchSize, BatchSizeConfig};
use ferrotron::models::checkpoint::LocalShard;
use ferrotron::models::data::{Batch, Samples};
use ferrotron::models::support::ModelSizes;
use ferrotron::models::trainer::{
    BadStepConfig, ExecutionMode, ParallelConfig, PrecisionConfig, SaveMode, ScheduleUnit, Trainer,
    TrainerConfig,
};
use ferrotron::nn::schedule::LrSchedule;
use ferrotron::nn::{GradDType, OptimizerConfig, ParamPatterns, Scope, clip_coefficient};
use ferrotron::parallel::collective::{Collective, WorldConfig, run_threads};
use ferrotron::parallel::data_parallel::{DataParallelConfig, ReplicaCheck};
use ferrotron::parallel::mesh::Mesh;
use ferrotron::tensor::{DType, Device, Error, Result};
use std::sync::Arc;
use std::time::Duration;

use super::grid_model::GridConfig;
use super::layout::{GLOBAL_BATCH, Layout, SEQ_LENGTH};
use super::tensors::{Part, Tensors, assemble, indices};

pub const STEPS: usize = 3;

/// The seed of the initial weights.
pub const WEIGHTS: u64 = 1234;

/// The seed of the training: dropout.
pub const SEED: u64 = 7;

pub fn schedule() -> Result<LrSchedule> {
    LrSchedule::constant(1e-2)
}

/// Small enough that every step is clipped.
pub const CLIP: f64 = 0.05;

/// Samples of a model, by their numbers.
pub struct Noise<'a, C>(pub &'a C);

impl<C: GridConfig> Samples for Noise<'_, C> {
    fn batch(&self, first_sample: u64, micro_batch: usize) -> Result<Batch> {
        self.0.batch(first_sample, micro_batch)
    }

    fn seq_length(&self) -> usize {
        SEQ_LENGTH
    }
}

/// The types in which the model is trained.
#[derive(Debug, Clone, Copy)]
pub struct Numbers {
    pub dtype: DType,
    pub optimizer: OptimizerConfig,
    /// Seed of the initial weights.
    pub weights: u64,
    /// Largest gradient norm.
    pub clip_grad: f64,
    pub gradients: GradDType,
    pub precision: PrecisionConfig,
    /// Text in the names of parameters that are not trained.
    pub frozen: &'static [&'static str],
}

impl Numbers {
    /// The numbers of a dtype, with AdamW, gradients clipped and summed in the accumulation type.
    pub fn with_dtype(dtype: DType) -> Numbers {
        Numbers {
            dtype,
            optimizer: OptimizerConfig::ADAMW,
            weights: WEIGHTS,
            clip_grad: CLIP,
            gradients: GradDType::Accumulator,
            precision: PrecisionConfig::default(),
            frozen: &[],
        }
    }
}

/// The results of a run: the same in every layout.
#[derive(Debug)]
pub struct Found {
    /// Loss and gradient norm of every step.
    pub steps: Vec<(f64, f64)>,
    /// The gradients of the first step, where the optimizer keeps them: AdamW does.
    pub gradients: Tensors,
    /// The weights after the last step.
    pub weights: Tensors,
}

impl Found {
    /// All but the biases of the keys: see [`drop_key_biases`].
    pub fn without_key_biases(mut self, model: impl Into<ModelSizes>) -> Found {
        let model = model.into();
        for tensors in [&mut self.gradients, &mut self.weights] {
            tensors.iter_mut().for_each(|(name, values)| drop_key_biases(name, values, &model));
        }
        self
    }
}

/// Removes the biases of the keys, which nothing depends on. Adding to all keys of a head adds to all scores of a query,
/// and its softmax is the same (Namazifar et al., arXiv 2302.08626). Their gradients are rounding errors, and optimizers
/// that divide by the size of gradients make steps of some size from them.
pub fn drop_key_biases(name: &str, values: &mut Vec<f64>, model: &ModelSizes) {
    if name.ends_with("attn.qkv.bias") {
        let [queries, keys, _] = model.attention.packed_widths();
        values.drain(queries..queries + keys);
    }
}

/// The results of a rank.
struct RankFound {
    steps: Vec<(f64, f64)>,
    gradients: Vec<Part>,
    weights: Vec<Part>,
    /// The f32 copies of weights with 16 bits.
    masters: Vec<Part>,
    /// Every weight that the rank has, also those that another one would write.
    copies: Vec<Part>,
}

/// Stands between a rank and its collectives.
pub type Wrap<'a> = &'a (dyn Fn(Arc<dyn Collective>) -> Arc<dyn Collective> + Sync);

/// Trains in a layout, every rank a thread, with gradients clipped to the norm `clip_grad`.
pub fn train<C: GridConfig>(
    model: &C,
    layout: &Layout,
    numbers: &Numbers,
    wrap: Wrap,
) -> Result<Found> {
    let config = WorldConfig { timeout: Duration::from_secs(60) };
    let ranks = run_threads(layout.ranks(), &config, |world| {
        let mesh = Mesh::new(&world, layout.mesh(), layout.sequence())?.map_collectives(wrap);
        train_rank(model, layout, numbers, &mesh)
    });
    let ranks = ranks.into_iter().collect::<Result<Vec<_>>>()?;
    let steps = ranks[0].steps.clone();
    if let Some(rank) = ranks.iter().position(|found| found.steps != steps) {
        let (got, want) = (&ranks[rank].steps, &steps);
        let message = format!("rank {rank} reports {got:?}, rank 0 {want:?}");
        return Err(Error::value("layouts", message));
    }
    let [mut gradients, mut weights, mut masters, mut copies] = [const { Vec::new() }; 4];
    for rank in ranks {
        gradients.extend(rank.gradients);
        weights.extend(rank.weights);
        masters.extend(rank.masters);
        copies.extend(rank.copies);
    }
    let weights = assemble(weights);
    for (name, place, values) in copies {
        let whole = &weights[&name];
        if indices(&place).zip(values).any(|(index, value)| whole[index] != value) {
            let message = format!("ranks have different copies of {name}");
            return Err(Error::value("layouts", message));
        }
    }
    // The masters are what is trained.
    let weights = if masters.is_empty() { weights } else { assemble(masters) };
    Ok(Found { steps, gradients: assemble(gradients), weights })
}

fn train_rank<C: GridConfig>(
    model: &C,
    layout: &Layout,
    numbers: &Numbers,
    mesh: &Mesh,
) -> Result<RankFound> {
    let Numbers { dtype, optimizer, weights, clip_grad, gradients, precision, frozen } = *numbers;
    let scope = Scope::new(&Device::cpu(1)?, dtype, weights);
    let parallel = layout.parallel();
    let replica_check = ReplicaCheck::EveryStep;
    let data_parallel = DataParallelConfig { gradients, replica_check, ..parallel.data_parallel };
    let config = TrainerConfig {
        seed: SEED,
        optimizer,
        frozen: ParamPatterns::new(frozen.iter().map(|part| format!("*{part}*")))?,
        keep_in_fp32: ParamPatterns::default(),
        ema_decay: None,
        schedule: schedule()?,
        clip_grad,
        batch_size: BatchSize::new(BatchSizeConfig {
            micro_batch_size: layout.micro,
            data_parallel_size: layout.dp,
            global_batch_size: Some(GLOBAL_BATCH),
            ..BatchSizeConfig::default()
        })?,
        parallel: ParallelConfig { data_parallel, ..parallel },
        precision,
        schedule_unit: ScheduleUnit::Steps,
        bad_steps: BadStepConfig::default(),
        execution: ExecutionMode::Eager,
        saves: SaveMode::Blocking,
    };
    let samples = Noise(model);
    let mut trainer = Trainer::<C::Model>::on_mesh(&scope, mesh, model.config(), config)?;
    let (mut steps, mut first_gradients) = (Vec::new(), Vec::new());
    for step in 0..STEPS {
        let report = trainer.step(&samples)?;
        steps.push((report.loss, report.grad_norm));
        if step == 0 && optimizer == OptimizerConfig::ADAMW {
            let (_, moments) = trainer.local_shards()?;
            for held in &moments.shards {
                let Some(name) = held.name.strip_prefix("optimizer.exp_avg.") else { continue };
                // The first moment is (1 - beta1) times the clipped gradient.
                let factor = 0.1 * clip_coefficient(report.grad_norm, clip_grad);
                let values = held.tensor.to_f64()?.iter().map(|m| m / factor).collect();
                first_gradients.push((name.to_string(), held.place.clone(), values));
            }
        }
    }
    let (weights, moments) = trainer.local_shards()?;
    let part = |name: &str, held: &LocalShard| -> Result<Part> {
        Ok((name.to_string(), held.place.clone(), held.tensor.to_f64()?))
    };
    let weights = weights.iter().map(|held| part(&held.name, held));
    let masters = moments
        .shards
        .iter()
        .filter_map(|held| Some(part(held.name.strip_prefix("optimizer.master.")?, held)));
    let masters = masters.collect::<Result<_>>()?;
    let copies = trainer.buffers().params().map(|param| {
        Ok((param.name().to_string(), param.shard_spec().clone(), param.leaf().value()?.to_f64()?))
    });
    let copies = copies.collect::<Result<_>>()?;
    let weights = weights.collect::<Result<_>>()?;
    Ok(RankFound { steps, gradients: first_gradients, weights, masters, copies })
}

/// NaN is close to nothing.
fn close(got: f64, want: f64, scale: f64) -> bool {
    within(1e-10, got, want, scale)
}

fn within(tolerance: f64, got: f64, want: f64, scale: f64) -> bool {
    (got - want).abs() <= tolerance * scale
}

/// The first difference over 1e-12 between the losses, gradient norms and gradients of the first steps, or `None`.
pub fn first_difference(got: &Found, want: &Found) -> Option<String> {
    for (what, got, want) in [
        ("loss", got.steps[0].0, want.steps[0].0),
        ("gradient norm", got.steps[0].1, want.steps[0].1),
    ] {
        if !within(1e-12, got, want, want.abs()) {
            return Some(format!("{what} of step 1: got {got}, want {want}"));
        }
    }
    for (name, want) in &want.gradients {
        let largest = want.iter().fold(1.0_f64, |largest, x| largest.max(x.abs()));
        let pairs = got.gradients[name].iter().zip(want).enumerate();
        for (index, (got, want)) in pairs {
            if !within(1e-12, *got, *want, largest) {
                return Some(format!("gradient {name}[{index}]: got {got}, want {want}"));
            }
        }
    }
    None
}

/// The first difference between two runs, or `None`.
pub fn difference(got: &Found, want: &Found) -> Option<String> {
    assert_eq!(got.steps.len(), want.steps.len());
    for (step, (got, want)) in got.steps.iter().zip(&want.steps).enumerate() {
        for (what, got, want) in [("loss", got.0, want.0), ("gradient norm", got.1, want.1)] {
            if !close(got, want, want.abs()) {
                return Some(format!("{what} of step {}: got {got}, want {want}", step + 1));
            }
        }
    }
    let named =
        [("gradient", &got.gradients, &want.gradients), ("weight", &got.weights, &want.weights)];
    for (what, got, want) in named {
        if !got.keys().eq(want.keys()) {
            let (got, want): (Vec<_>, Vec<_>) = (got.keys().collect(), want.keys().collect());
            return Some(format!("other {what}s: got {got:?}, want {want:?}"));
        }
        for (name, want) in want {
            let largest = want.iter().fold(1.0_f64, |largest, x| largest.max(x.abs()));
            let pairs = got[name].iter().zip(want).enumerate();
            for (index, (got, want)) in pairs {
                if !close(*got, *want, largest) {
                    return Some(format!("{what} {name}[{index}]: got {got}, want {want}"));
                }
            }
        }
    }
    None
}
