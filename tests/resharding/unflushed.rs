//! Pipelines without a flush: a serial trainer that applies the staleness has the same weights, and a run that is saved
//! and resumed where the pipeline is drained is the unbroken one.

use ferrotron::models::batch_size::BatchSize;
use ferrotron::models::checkpoint::{Checkpoint, LocalShard};
use ferrotron::models::gpt::{Gpt, GptConfig};
use ferrotron::models::trainer::{ParallelConfig, StepReport, Trainer, TrainerConfig};
use ferrotron::nn::schedule::LrSchedule;
use ferrotron::nn::{Axis, LossScale, OptimizerConfig, Param, Scope, Sharding};
use ferrotron::parallel::collective::{WorldConfig, run_threads};
use ferrotron::parallel::data_parallel::DataParallelConfig;
use ferrotron::parallel::mesh::{Mesh, ParallelDims};
use ferrotron::parallel::pipeline::ScheduleKind;
use ferrotron::parallel::tensor_parallel::SequenceParallel;
use ferrotron::tensor::{DType, Device, Result, Tensor};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;

use super::samples::Noise;
use super::tensors::{Part, assemble};
use super::{tied, untied};

const DRAIN: usize = 5;

/// A run of windows of [`DRAIN`] steps.
#[derive(Clone, Copy)]
struct Case<'a> {
    kind: ScheduleKind,
    stages: usize,
    data: usize,
    tensor: usize,
    context: usize,
    sequence: SequenceParallel,
    microbatches: usize,
    optimizer: OptimizerConfig,
    ema_decay: Option<f64>,
    windows: usize,
    load: Option<&'a Path>,
    /// The folder in which each window is saved.
    save: Option<&'a Path>,
}

type Named = BTreeMap<String, Vec<f64>>;

/// Weights by name with their stages, their moving averages if there are some, and the losses and norms of all steps.
struct Outcome {
    weights: Named,
    averages: Named,
    stages: BTreeMap<String, usize>,
    losses: Vec<(u64, f64, f64)>,
}

impl Case<'_> {
    fn config(&self) -> Result<TrainerConfig> {
        let global = self.microbatches * self.data;
        let mut config = TrainerConfig {
            optimizer: self.optimizer,
            ema_decay: self.ema_decay,
            clip_grad: 0.0,
            parallel: ParallelConfig {
                pipeline_schedule: self.kind,
                drain_interval: DRAIN,
                data_parallel: DataParallelConfig {
                    sharding: if self.data > 1 { Sharding::Optimizer } else { Sharding::None },
                    bucket_numel: Some(700),
                    ..DataParallelConfig::default()
                },
                ..ParallelConfig::default()
            },
            ..TrainerConfig::new(
                7,
                LrSchedule::constant(0.05)?,
                BatchSize::constant(1, self.data, global)?,
            )
        };
        config.precision.loss_scale = LossScale::Constant(8.0);
        Ok(config)
    }

    /// The same steps on one rank, one after another.
    fn serial(&self) -> Result<TrainerConfig> {
        let global = self.microbatches * self.data;
        Ok(TrainerConfig {
            optimizer: self.optimizer,
            clip_grad: 0.0,
            ..TrainerConfig::new(7, LrSchedule::constant(0.05)?, BatchSize::constant(1, 1, global)?)
        })
    }

    fn run(&self) -> Result<Outcome> {
        let model = untied();
        let size = self.stages * self.data * self.tensor * self.context;
        let ranks = run_threads(size, &WorldConfig::default(), |world| {
            let layout = ParallelDims::new(size, self.tensor, self.context, self.stages)?;
            let mesh = Mesh::new(&world, layout, self.sequence)?;
            let scope = Scope::new(&Device::cpu(1)?, DType::F64, 1234);
            let mut trainer = Trainer::<Gpt>::on_mesh(&scope, &mesh, &model, self.config()?)?;
            if let Some(path) = self.load {
                trainer.load(&Checkpoint::peek(path)?)?;
            }
            let noise = Noise { model: &model, distinct_samples: 1 << 32, asked: Mutex::default() };
            let mut reports: Vec<StepReport> = Vec::new();
            for _ in 0..self.windows {
                assert_eq!(trainer.steps_at_once(), DRAIN as u64);
                trainer.step_async(&noise)?;
                reports.extend(trainer.drain_reports(&noise)?);
                if let Some(folder) = self.save {
                    trainer.save(folder, None, serde_json::Value::Null)?;
                }
            }
            let names: Vec<String> =
                trainer.buffers().params().map(|param| param.name().to_string()).collect();
            let (weights, moments) = trainer.local_shards()?;
            let part = |held: &LocalShard| -> Result<Part> {
                Ok((held.name.clone(), held.place.clone(), held.tensor.to_f64()?))
            };
            let parts: Vec<Part> =
                weights.iter().chain(&moments.shards).map(part).collect::<Result<_>>()?;
            let losses: Vec<_> =
                reports.iter().map(|found| (found.step, found.loss, found.grad_norm)).collect();
            Ok((mesh.axis(Axis::Pipeline).rank(), names, parts, losses))
        });
        let (mut parts, mut stages, mut all) = (Vec::new(), BTreeMap::new(), Vec::new());
        for rank in ranks {
            let (stage, names, held, losses) = rank?;
            assert!(all.is_empty() || all == losses);
            all = losses;
            stages.extend(names.into_iter().map(|name| (name, stage)));
            parts.extend(held);
        }
        let (states, weights): (Vec<Part>, Vec<Part>) =
            parts.into_iter().partition(|part| part.0.starts_with("optimizer."));
        let average = |(name, place, values): Part| {
            Some((name.strip_prefix("optimizer.ema.")?.to_string(), place, values))
        };
        let averages = assemble(states.into_iter().filter_map(average).collect());
        Ok(Outcome { weights: assemble(weights), averages, stages, losses: all })
    }
}

fn named(param: &Param) -> Result<(String, Vec<f64>)> {
    Ok((param.name().to_string(), param.leaf().value()?.to_vec()?))
}

fn case(kind: ScheduleKind, stages: usize) -> Case<'static> {
    let microbatches = if kind == ScheduleKind::PipeDream2Bw { 3 } else { 1 };
    Case {
        kind,
        stages,
        data: 1,
        tensor: 1,
        context: 1,
        sequence: SequenceParallel::Off,
        microbatches,
        optimizer: OptimizerConfig::SGD,
        ema_decay: None,
        windows: 2,
        load: None,
        save: None,
    }
}

/// A trainer on one rank takes each step from the weights that are stale as the papers say. Of SGD, the difference that a
/// step makes is what the newest weights need. Their moving average begins with those of the first step.
fn serial(case: &Case, stages: &BTreeMap<String, usize>) -> Result<(Named, Named, Vec<f64>)> {
    let model = untied();
    let scope = Scope::new(&Device::cpu(1)?, DType::F64, 1234);
    let mut trainer = Trainer::<Gpt>::new(&scope, &model, case.serial()?)?;
    let noise = Noise { model: &model, distinct_samples: 1 << 32, asked: Mutex::default() };
    let weights = |trainer: &Trainer<Gpt>| -> Result<Named> {
        trainer.buffers().params().map(named).collect()
    };
    let set = |trainer: &Trainer<Gpt>, weights: &Named| {
        trainer.buffers().params().try_for_each(|param| {
            let leaf = param.leaf();
            leaf.set_value(&Tensor::from_slice(leaf.device(), &weights[param.name()], leaf.dims())?)
        })
    };
    let delay = |stage: usize| match case.kind {
        ScheduleKind::PipeDream => case.stages - 1 - stage,
        ScheduleKind::PipeDreamVerticalSync => case.stages - 1,
        _ => 1,
    };
    let mut newest = weights(&trainer)?;
    let (mut losses, mut averages) = (Vec::new(), Named::new());
    for _ in 0..case.windows {
        let mut history = vec![newest.clone()];
        for t in 0..DRAIN {
            let stale: Named = newest
                .keys()
                .map(|name| {
                    (name.clone(), history[t.saturating_sub(delay(stages[name]))][name].clone())
                })
                .collect();
            set(&trainer, &stale)?;
            losses.push(trainer.step(&noise)?.loss);
            for (name, after) in weights(&trainer)? {
                let now = newest.get_mut(&name).expect("a parameter of the model");
                for ((now, before), after) in now.iter_mut().zip(&stale[&name]).zip(after) {
                    *now += after - before;
                }
            }
            history.push(newest.clone());
            let Some(decay) = case.ema_decay else { continue };
            for (name, values) in &newest {
                let means = averages.entry(name.clone()).or_insert_with(|| values.clone());
                let pairs = means.iter_mut().zip(values);
                pairs.for_each(|(mean, now)| *mean = decay * *mean + (1.0 - decay) * now);
            }
        }
    }
    Ok((newest, averages, losses))
}

#[test]
fn a_run_is_the_serial_one_with_stale_weights() -> Result<()> {
    for kind in ScheduleKind::UNFLUSHED {
        for stages in [2, 3, 4] {
            let plain = case(kind, stages);
            let mut cases = vec![plain];
            if stages == 2 {
                let sequence = SequenceParallel::On;
                cases.extend([
                    Case { data: 2, ema_decay: Some(0.75), ..plain },
                    Case { tensor: 2, ema_decay: Some(0.5), ..plain },
                    Case { tensor: 2, sequence, ..plain },
                    Case { context: 2, data: 2, ..plain },
                    Case { context: 2, tensor: 2, sequence, ..plain },
                ]);
            }
            for case in cases {
                let found = case.run()?;
                let (weights, averages, losses) = serial(&case, &found.stages)?;
                for (found, wanted) in [(&found.weights, &weights), (&found.averages, &averages)] {
                    assert!(found.keys().eq(wanted.keys()));
                    for (name, want) in wanted {
                        for (got, want) in found[name].iter().zip(want) {
                            let at = format!("{kind}, {stages} stages: {name}");
                            assert!((got - want).abs() <= 1e-12, "{at}: got {got}, want {want}");
                        }
                    }
                }
                for ((step, got, _), want) in found.losses.iter().zip(losses) {
                    let at = format!("{kind}, {stages} stages, step {step}");
                    assert!((got - want).abs() <= 1e-12, "{at}: loss {got}, want {want}");
                }
            }
        }
    }
    Ok(())
}

/// The pipeline is drained after steps of certain numbers, whether they are saved or not.
#[test]
fn resuming_where_the_pipeline_is_drained_changes_nothing() -> Result<()> {
    for kind in ScheduleKind::UNFLUSHED {
        for (data, tensor) in [(1, 1), (2, 1), (1, 2)] {
            let folder = tempfile::tempdir().unwrap();
            let path = Some(folder.path());
            let case = Case { data, tensor, optimizer: OptimizerConfig::ADAMW, ..case(kind, 2) };
            let unbroken = Case { windows: 3, ..case }.run()?;
            let first = Case { windows: 1, save: path, ..case }.run()?;
            let second = Case { windows: 2, load: path, save: path, ..case }.run()?;
            let losses: Vec<_> = first.losses.into_iter().chain(second.losses).collect();
            assert_eq!(losses, unbroken.losses, "{kind}");
            let steps: Vec<u64> = losses.iter().map(|(step, ..)| *step).collect();
            assert_eq!(steps, (1..=3 * DRAIN as u64).collect::<Vec<_>>());
            let bits = |weights: &Named| -> Vec<u64> {
                weights.values().flatten().map(|value| value.to_bits()).collect()
            };
            assert_eq!(bits(&second.weights), bits(&unbroken.weights), "{kind}");
        }
    }
    Ok(())
}

#[test]
fn what_needs_a_flush_is_refused_in_one_line() -> Result<()> {
    let refused = |change: &(dyn Fn(&mut TrainerConfig) + Sync), model: &GptConfig, part: &str| {
        let ranks = run_threads(2, &WorldConfig::default(), |world| {
            let layout = ParallelDims::new(2, 1, 1, 2)?;
            let mesh = Mesh::new(&world, layout, SequenceParallel::Off)?;
            let scope = Scope::new(&Device::cpu(1)?, DType::F32, 1234);
            let mut config = case(ScheduleKind::PipeDream, 2).config()?;
            change(&mut config);
            Ok(Trainer::<Gpt>::on_mesh(&scope, &mesh, model, config)
                .map(drop)
                .map_err(|e| e.to_string()))
        });
        for found in ranks {
            let line = found.unwrap().unwrap_err();
            assert!(line.contains(part) && !line.contains('\n'), "{line}");
        }
    };
    use ferrotron::models::trainer::{BadStepConfig, OnBadStep};
    refused(&|_| (), &tied(), "--untie-embeddings-and-output-weights");
    let model = &untied();
    refused(&|config| config.clip_grad = 1.0, model, "add --clip-grad 0");
    refused(
        &|config| config.parallel.drain_interval = 0,
        model,
        "--pipeline-drain-interval: must be",
    );
    refused(&|config| config.precision.loss_scale = LossScale::DYNAMIC, model, "use bf16");
    refused(
        &|config| config.parallel.data_parallel.synchronize_every = 2,
        model,
        "--local-sgd-steps",
    );
    let skip = BadStepConfig { on_bad_step: OnBadStep::Skip, ..BadStepConfig::default() };
    refused(&|config| config.bad_steps = skip, model, "--on-bad-step");
    Ok(())
}

/// Later updates have used what is not finite by then, so there is nothing to save, and only a checkpoint to go on from.
#[test]
fn a_loss_that_is_not_finite_ends_all_ranks_at_the_drain() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let unbroken = case(ScheduleKind::PipeDream, 2).run()?;
    let ranks = run_threads(2, &WorldConfig::default(), |world| {
        let mesh = Mesh::new(&world, ParallelDims::new(2, 1, 1, 2)?, SequenceParallel::Off)?;
        let scope = Scope::new(&Device::cpu(1)?, DType::F64, 1234);
        let (model, config) = (untied(), case(ScheduleKind::PipeDream, 2).config()?);
        let mut trainer = Trainer::<Gpt>::on_mesh(&scope, &mesh, &model, config)?;
        let noise = Noise { model: &model, distinct_samples: 1 << 32, asked: Mutex::default() };
        trainer.step(&noise)?;
        let saved = trainer.save(folder.path(), None, serde_json::Value::Null)?;
        if let Some(param) =
            trainer.buffers().params().find(|param| param.name().contains("norm_f"))
        {
            let leaf = param.leaf();
            let unknown = leaf.value()?.mul_scalar(f64::NAN)?;
            leaf.set_value(&unknown)?;
        }
        let failed = trainer.step(&noise).unwrap_err().to_string();
        let refused = [trainer.local_shards().map(drop), trainer.step(&noise).map(drop)];
        let refused = refused.map(|refused| refused.unwrap_err().to_string());
        trainer.load(&Checkpoint::peek(&saved)?)?;
        let report = trainer.step(&noise)?;
        Ok((failed, refused, (report.step, report.loss, report.grad_norm)))
    });
    for (rank, found) in ranks.into_iter().enumerate() {
        let (line, refused, last) = found?;
        assert!(
            line.contains("step 6: loss NaN") && line.contains("last checkpoint"),
            "{rank}: {line}"
        );
        assert!(!line.contains('\n'), "{line}");
        for line in refused {
            assert!(line.contains("steps of pipedream have failed"), "{rank}: {line}");
            assert!(line.contains("load the last checkpoint") && !line.contains('\n'), "{line}");
        }
        assert_eq!(Some(&last), unbroken.losses.last());
    }
    Ok(())
}
