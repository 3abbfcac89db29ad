//! Asynchronous data parallelism trains another way than on one rank. A training loop that knows no trainer, and applies
//! the logged staleness of every gradient, repeats the run.

use ferrotron::models::batch_size::{BatchSize, BatchSizeConfig};
use ferrotron::models::bert::NormPlacement;
use ferrotron::models::checkpoint::{Checkpoint, LocalShard};
use ferrotron::models::data::{Batch, Samples};
use ferrotron::models::gpt::{Gpt, GptConfig};
use ferrotron::models::trainer::{
    Model, ParallelConfig, SaveMode, StepReport, Trainer, TrainerConfig,
};
use ferrotron::nn::{
    Context, Mode, Module, Optimizer, OptimizerConfig, Param, ParamAndGradBuffer, Scope, StepConfig,
};
use ferrotron::parallel::collective::{WorldConfig, run_threads};
use ferrotron::parallel::data_parallel::{AsyncUpdates, DataParallelConfig};
use ferrotron::parallel::mesh::{Mesh, ParallelDims};
use ferrotron::parallel::tensor_parallel::SequenceParallel;
use ferrotron::tensor::{DType, Device, Result, Tensor};
use std::path::Path;
use std::time::Duration;

use super::grid_model::{GridConfig, PackedGpt};
use super::layout::{GLOBAL_BATCH, SEQ_LENGTH};
use super::tensors::{Part, Tensors, assemble};
use super::train::{CLIP, Noise, SEED, WEIGHTS, drop_key_biases, schedule};
use super::{bert, gpt2, llama};

const DRAIN: usize = 5;

/// Samples for which a rank waits, each in other steps.
struct Delayed<'a, C> {
    samples: Noise<'a, C>,
    rank: u64,
}

impl<C: GridConfig> Samples for Delayed<'_, C> {
    fn batch(&self, first_sample: u64, micro_batch: usize) -> Result<Batch> {
        let step = first_sample / GLOBAL_BATCH as u64;
        if step % 4 == 2 * self.rank {
            std::thread::sleep(Duration::from_millis(20));
        }
        self.samples.batch(first_sample, micro_batch)
    }

    fn seq_length(&self) -> usize {
        SEQ_LENGTH
    }
}

/// The steps of a run, and its weights after the last of them.
struct Run {
    reports: Vec<StepReport>,
    weights: Named,
    /// Their moving average.
    averages: Tensors,
}

/// Values of parameters, by name.
type Named = Vec<(String, Vec<f64>)>;

/// Decay of that average.
const EMA_DECAY: f64 = 0.75;

fn config(ranks: usize, max_staleness: usize) -> Result<TrainerConfig> {
    let updates = AsyncUpdates { max_staleness, drain_interval: DRAIN };
    let batch_size = BatchSize::new(BatchSizeConfig {
        micro_batch_size: GLOBAL_BATCH / ranks,
        data_parallel_size: ranks,
        ..BatchSizeConfig::default()
    })?;
    let data_parallel = DataParallelConfig {
        async_updates: Some(updates),
        bucket_numel: Some(700),
        ..DataParallelConfig::default()
    };
    Ok(TrainerConfig {
        clip_grad: CLIP,
        ema_decay: Some(EMA_DECAY),
        parallel: ParallelConfig { data_parallel, ..ParallelConfig::default() },
        ..TrainerConfig::new(SEED, schedule()?, batch_size)
    })
}

/// Takes `steps` steps, from a checkpoint if there is one, and saves behind them. All ranks have the same reports and
/// weights.
fn train<C: GridConfig>(
    model: &C,
    (ranks, max_staleness): (usize, usize),
    steps: usize,
    (load, save): (Option<&Path>, Option<&Path>),
) -> Result<Run> {
    let mut found = run_threads(ranks, &WorldConfig::default(), |world| {
        let layout = ParallelDims::new(ranks, 1, 1, 1)?;
        let mesh = Mesh::new(&world, layout, SequenceParallel::Off)?;
        let scope = Scope::new(&Device::cpu(1)?, DType::F64, WEIGHTS);
        let config = config(ranks, max_staleness)?;
        let mut trainer = Trainer::<C::Model>::on_mesh(&scope, &mesh, model.config(), config)?;
        if let Some(folder) = load {
            trainer.load(&Checkpoint::peek(folder)?)?;
        }
        let samples = Delayed { samples: Noise(model), rank: mesh.rank() as u64 };
        let mut reports = Vec::new();
        for step in 1..=steps {
            trainer.step_async(&samples)?;
            reports.extend(trainer.drain_reports(&samples)?);
            if step == 1 && max_staleness > 0 {
                let refused = trainer.local_shards().err().expect("an update is outstanding");
                let refused = refused.to_string();
                assert!(refused.contains("all are applied after step"), "{refused}");
            }
        }
        trainer.drain_updates(&samples)?;
        reports.extend(trainer.drain_reports(&samples)?);
        if let Some(folder) = save {
            trainer.save(folder, None, serde_json::Value::Null)?;
        }
        let weights = named(trainer.buffers().params())?;
        let (_, states) = trainer.local_shards()?;
        let average = |held: &LocalShard| {
            let name = held.name.strip_prefix("optimizer.ema.")?.to_string();
            Some(held.tensor.to_vec().map(|values| (name, held.place.clone(), values)))
        };
        let averages = states.shards.iter().filter_map(average).collect::<Result<Vec<Part>>>()?;
        Ok((Run { reports, weights, averages: Tensors::new() }, averages))
    })
    .into_iter()
    .collect::<Result<Vec<(Run, Vec<Part>)>>>()?;
    let parts = found.iter_mut().flat_map(|(_, parts)| std::mem::take(parts)).collect();
    let mut found = found.into_iter().map(|(run, _)| run);
    let first = found.next().expect("a rank");
    let first = Run { averages: assemble(parts), ..first };
    let log = |run: &Run| -> Vec<_> {
        let of = |report: &StepReport| (report.step, report.staleness.clone(), report.loss);
        run.reports.iter().map(of).collect()
    };
    for other in found {
        assert_eq!(log(&other), log(&first));
        assert_eq!(other.weights, first.weights);
    }
    Ok(first)
}

fn named<'a>(params: impl Iterator<Item = &'a Param>) -> Result<Named> {
    params.map(|param| Ok((param.name().to_string(), param.leaf().value()?.to_vec()?))).collect()
}

fn set<'a>(params: impl Iterator<Item = &'a Param>, to: &[(String, Vec<f64>)]) -> Result<()> {
    for (param, (_, values)) in params.zip(to) {
        let leaf = param.leaf();
        leaf.set_value(&Tensor::from_slice(leaf.device(), values, leaf.dims())?)?;
    }
    Ok(())
}

/// Applies a log: in each step the gradient of every rank's samples, at the weights that this rank had.
fn replay<C: GridConfig>(model: &C, log: &[StepReport]) -> Result<Run> {
    let device = Device::cpu(1)?;
    let whole = model.whole(&Scope::new(&device, DType::F64, WEIGHTS))?;
    let buffers = ParamAndGradBuffer::new(&whole.params())?;
    let mut optimizer = Optimizer::new(OptimizerConfig::ADAMW, &buffers)?;
    let (mut versions, mut reports, mut averages) = (Vec::new(), Vec::new(), Tensors::new());
    for (step, logged) in log.iter().enumerate() {
        versions.push(named(buffers.params())?);
        let micro = GLOBAL_BATCH / logged.staleness.len();
        buffers.zero_gradients();
        let (mut sum, mut counted) = (0.0, 0.0);
        for (rank, missed) in logged.staleness.iter().enumerate() {
            set(buffers.params(), &versions[step - missed])?;
            let batch = model.batch((step * GLOBAL_BATCH + rank * micro) as u64, micro)?;
            let ctx = Context::new(SEED, step as u64, Mode::Train, GLOBAL_BATCH, SEQ_LENGTH);
            let mean = C::loss(&whole, &device, &ctx.micro_batch(rank * micro, micro), &batch)?;
            let count = C::Model::loss_terms(model.config(), &batch)?[0].count;
            sum += mean.value().item()? * count;
            counted += count;
            mean.backward_scaled(1.0 / logged.staleness.len() as f64)?;
        }
        set(buffers.params(), &versions[step])?;
        let norm = buffers.sq_norm()?.sqrt();
        let grad_scale = (CLIP / (norm + 1e-6)).min(1.0);
        optimizer
            .step(&buffers, &StepConfig { lr: schedule()?.lr(step as u64 + 1), grad_scale })?;
        for (name, values) in named(buffers.params())? {
            let means = averages.entry(name).or_insert_with(|| values.clone());
            let pairs = means.iter_mut().zip(values);
            pairs.for_each(|(mean, now)| *mean = EMA_DECAY * *mean + (1.0 - EMA_DECAY) * now);
        }
        reports.push(StepReport { loss: sum / counted, grad_norm: norm, ..logged.clone() });
    }
    Ok(Run { reports, weights: named(buffers.params())?, averages })
}

fn assert_close(what: &str, got: f64, want: f64, scale: f64) {
    assert!((got - want).abs() <= 1e-12 * scale, "{what}: got {got}, want {want}");
}

fn assert_replayed<C: GridConfig>(model: &C, found: &Run) -> Result<()> {
    let want = replay(model, &found.reports)?;
    for (got, want) in found.reports.iter().zip(&want.reports) {
        let step = got.step;
        // Of several terms each has a mean of its own.
        if got.losses.len() == 1 {
            assert_close(&format!("loss of step {step}"), got.loss, want.loss, want.loss);
        }
        let what = format!("gradient norm of step {step}");
        assert_close(&what, got.grad_norm, want.grad_norm, want.grad_norm);
    }
    assert!(found.averages.keys().eq(want.averages.keys()));
    let averages = want.averages.iter().map(|(name, want)| (name, &found.averages[name], want));
    let weights = want.weights.iter().map(|(name, want)| {
        let (_, got) = found.weights.iter().find(|found| found.0 == *name).expect("a weight");
        (name, got, want)
    });
    for (name, got, want) in weights.chain(averages) {
        let [got, want] = [got, want].map(|values| {
            let mut values = values.clone();
            drop_key_biases(name, &mut values, &model.sizes());
            values
        });
        let largest = want.iter().fold(1.0_f64, |largest, x| largest.max(x.abs()));
        for (index, (got, want)) in got.iter().zip(&want).enumerate() {
            assert_close(&format!("{name}[{index}]"), *got, *want, largest);
        }
    }
    Ok(())
}

fn check<C: GridConfig>(model: &C, ranks: usize, max_staleness: usize) -> Result<()> {
    let found = train(model, (ranks, max_staleness), 2 * DRAIN + 2, (None, None))?;
    let log: Vec<&[usize]> = found.reports.iter().map(|report| &report.staleness[..]).collect();
    assert_eq!(log.len(), 2 * DRAIN + 2);
    for (index, staleness) in log.iter().enumerate() {
        let report = &found.reports[index];
        assert_eq!(
            report.step as usize,
            index + 1,
            "updates are applied in the order of the steps"
        );
        let most = max_staleness.min(index % DRAIN); // none is missed behind a drain
        assert!(staleness.iter().all(|&missed| missed <= most), "{log:?}");
    }
    assert!(log.concat().iter().any(|&missed| missed > 0), "{log:?}");
    assert_replayed(model, &found)
}

#[test]
fn the_log_repeats_an_asynchronous_run() -> Result<()> {
    check(&gpt2(), 2, 1)?;
    check(&gpt2(), 3, 3)?;
    check(&llama(), 2, 4)?;
    // Documents are computed one by one in the reference, so nothing may be dropped.
    let plain = GptConfig { hidden_dropout: 0.0, attention_dropout: 0.0, ..gpt2() };
    check(&PackedGpt(plain), 2, 2)?;
    check(&bert(NormPlacement::Pre), 2, 2)
}

/// A checkpoint has no outstanding updates: the log of a run and of the one that resumes it is the log of one run.
#[test]
fn the_log_repeats_a_resumed_run() -> Result<()> {
    let (model, folder) = (gpt2(), tempfile::tempdir().unwrap());
    let path = Some(folder.path());
    let mut begun = train(&model, (2, 2), DRAIN, (None, path))?;
    let resumed = train(&model, (2, 2), DRAIN, (path, None))?;
    begun.reports.extend(resumed.reports);
    assert_replayed(&model, &Run { reports: begun.reports, ..resumed })
}

/// Ranks find it behind different numbers of later steps: all end with the same reason, and can finish a checkpoint together.
#[test]
fn a_step_that_is_not_finite_ends_all_ranks_with_its_number() -> Result<()> {
    let (model, folder) = (gpt2(), tempfile::tempdir().unwrap());
    // Behind a drain, in the steps before one, and where rank 1 is the slow one.
    for (bad, max_staleness) in [(6, 1), (7, 4), (8, 2), (10, 4)] {
        let path = folder.path().join(format!("{bad}"));
        let found = run_threads(3, &WorldConfig::default(), |world| {
            let mesh = Mesh::new(&world, ParallelDims::new(3, 1, 1, 1)?, SequenceParallel::Off)?;
            let scope = Scope::new(&Device::cpu(1)?, DType::F64, WEIGHTS);
            let config = TrainerConfig { saves: SaveMode::Async, ..config(3, max_staleness)? };
            let mut trainer = Trainer::<Gpt>::on_mesh(&scope, &mesh, &model, config)?;
            let samples = Delayed { samples: Noise(&model), rank: mesh.rank() as u64 };
            let mut pending = None;
            for step in 1..=20 {
                if step == bad && mesh.rank() == 1 {
                    let param = trainer.buffers().params().next().expect("a parameter");
                    let leaf = param.leaf();
                    let unknown = leaf.value()?.mul_scalar(f64::NAN)?;
                    leaf.set_value(&unknown)?;
                }
                let taken = trainer.step_async(&samples);
                match taken.and_then(|()| trainer.drain_reports(&samples).map(drop)) {
                    Ok(()) if step == DRAIN as u64 => {
                        pending = Some(trainer.save_async(&path, None, serde_json::Value::Null)?);
                    }
                    Ok(()) => {}
                    Err(error) => {
                        let saved =
                            pending.take().expect("a checkpoint is being written").wait()?;
                        return Ok((error.to_string(), Checkpoint::open(&saved)?.progress().step));
                    }
                }
            }
            Ok(("no error".to_string(), 0))
        });
        for found in found {
            let (line, saved) = found?;
            assert!(line.contains(&format!("step {bad}: loss NaN")), "{line}");
            assert!(line.contains("with a smaller --lr") && !line.contains('\n'), "{line}");
            assert_eq!(saved, DRAIN as u64);
        }
    }
    Ok(())
}

/// Steps were skipped before the run became asynchronous: it has fewer updates than steps, which decide on the drains.
#[test]
fn drains_are_at_multiples_of_steps_behind_skipped_ones() -> Result<()> {
    let (model, folder) = (gpt2(), tempfile::tempdir().unwrap());
    let found = run_threads(2, &WorldConfig::default(), |world| {
        let mesh = Mesh::new(&world, ParallelDims::new(2, 1, 1, 1)?, SequenceParallel::Off)?;
        let scope = Scope::new(&Device::cpu(1)?, DType::F64, WEIGHTS);
        let mut trainer = Trainer::<Gpt>::on_mesh(&scope, &mesh, &model, config(2, 2)?)?;
        let mut progress = trainer.progress().clone();
        progress.step = 2;
        progress.consumed_samples = 2 * GLOBAL_BATCH as u64;
        trainer.set_progress(progress);
        let samples = Noise(&model);
        for wait in (0..DRAIN as u64 - 2).rev() {
            trainer.step_async(&samples)?;
            assert_eq!(trainer.steps_to_synchronization(), wait);
        }
        trainer.drain_reports(&samples)?;
        assert_eq!(trainer.optimizer().steps() + 2, trainer.progress().step);
        trainer.save(folder.path(), None, serde_json::Value::Null)?;
        Ok(trainer.progress().step)
    });
    for step in found {
        assert_eq!(step?, DRAIN as u64);
    }
    Ok(())
}

/// Staleness 0 is the synchronous run, bit for bit.
#[test]
fn without_staleness_it_is_the_synchronous_run() -> Result<()> {
    let model = gpt2();
    let found = train(&model, (3, 0), 4, (None, None))?;
    let synchronous = run_threads(3, &WorldConfig::default(), |world| {
        let mesh = Mesh::new(&world, ParallelDims::new(3, 1, 1, 1)?, SequenceParallel::Off)?;
        let scope = Scope::new(&Device::cpu(1)?, DType::F64, WEIGHTS);
        let mut config = config(3, 0)?;
        config.parallel.data_parallel.async_updates = None;
        let mut trainer = Trainer::<Gpt>::on_mesh(&scope, &mesh, &model, config)?;
        let samples = Noise(&model);
        let steps = (0..4).map(|_| trainer.step(&samples));
        let steps = steps.map(|report| report.map(|found| (found.loss, found.grad_norm)));
        let steps = steps.collect::<Result<Vec<_>>>()?;
        Ok((steps, named(trainer.buffers().params())?))
    });
    let (steps, weights) = synchronous.into_iter().next().expect("three ranks")?;
    let found_steps = found.reports.iter().map(|found| (found.loss, found.grad_norm));
    assert_eq!(found_steps.collect::<Vec<_>>(), steps);
    assert_eq!(found.weights, weights);
    Ok(())
}
