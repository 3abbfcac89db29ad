//! Bad steps are skipped or rewound as if their samples were not there, in every layout and on resume.

use ferrotron_models::checkpoint::{Checkpoint, Retention};
use ferrotron_models::data::{Batch, Samples};
use ferrotron_models::evaluate::Evaluation;
use ferrotron_models::run::{Intervals, Metrics, Observer, RunConfig, RunData, read_metrics, run};
use ferrotron_models::stop::StopFlag;
use ferrotron_models::trainer::{BadStepConfig, OnBadStep, Trainer, TrainerConfig};
use ferrotron_nn::{Scope, Sharding};
use ferrotron_parallel::collective::{WorldConfig, run_threads};
use ferrotron_parallel::data_parallel::AsyncUpdates;
use ferrotron_parallel::mesh::{Mesh, ParallelDims};
use ferrotron_parallel::tensor_parallel::SequenceParallel;
use ferrotron_tensor::{DType, Device, RandomKey, Result};
use std::path::Path;

use super::{ALONE, CONFIG, Layout, Mlp, SAMPLES};

const STEPS: u64 = 14;
const SAVE_INTERVAL: u64 = 4;
const NAN: u64 = 6;
const OUTLIER: u64 = 11;

/// The samples of these batches, of which [`NAN`] and [`OUTLIER`] are bad.
struct Batches(Vec<u64>);

impl Samples for Batches {
    fn batch(&self, first_sample: u64, samples: usize) -> Result<Batch> {
        let (count, width) = (SAMPLES as u64, CONFIG.width);
        let number = self.0[(first_sample / count) as usize];
        let first = (number * count + first_sample % count) * width as u64;
        let key = RandomKey::new(5, 0, "batches");
        let x = (0..(samples * width) as u64).map(|i| key.uniform(first + i) as f32);
        let x: Vec<f32> = x.collect();
        let y = x.chunks(width).map(|x| match number {
            NAN => f32::NAN,
            OUTLIER => 100.0,
            _ => x.iter().sum::<f32>().sin(),
        });
        let y = y.collect();
        let batch = Batch::new(first_sample, samples, 1);
        batch.with("x", x, &[samples, width])?.with("y", y, &[samples, 1])
    }

    fn seq_length(&self) -> usize {
        1
    }
}

/// The metrics of all steps, and all warnings.
#[derive(Default)]
struct Watcher(Vec<Metrics>, Vec<String>);

impl Observer for Watcher {
    fn step(&mut self, metrics: &Metrics) {
        self.0.push(metrics.clone());
    }
    fn evaluated(&mut self, _: u64, _: Option<&str>, _: &Evaluation) {}
    /// Whatever happens behind a save, the line of its step is there.
    fn saved(&mut self, checkpoint: &Path) {
        let (path, mut is_logged) = (checkpoint.parent().unwrap().join("metrics.jsonl"), false);
        let is_its_step = |step: u64| checkpoint.ends_with(format!("iter_{step:07}"));
        read_metrics(&path, |line| is_logged |= is_its_step(line.step)).unwrap();
        assert!(is_logged, "{}", checkpoint.display());
    }
    fn warning(&mut self, message: &str) {
        self.1.push(message.into());
    }
}

/// Trains over `batches` in `folder`, from its last checkpoint if there is one, and returns the metrics of the first
/// rank.
fn train(
    layout: &Layout,
    on_bad_step: OnBadStep,
    batches: &[u64],
    folder: &Path,
    exit_interval: Option<u64>,
) -> Result<Vec<Metrics>> {
    let Watcher(metrics, warnings) = watch(layout, on_bad_step, batches, folder, exit_interval)?;
    assert!(warnings.is_empty(), "{warnings:?}");
    Ok(metrics)
}

/// The same with the warnings.
fn watch(
    layout: &Layout,
    on_bad_step: OnBadStep,
    batches: &[u64],
    folder: &Path,
    exit_interval: Option<u64>,
) -> Result<Watcher> {
    let world = layout.data * layout.pipeline;
    let dims = ParallelDims::new(world, 1, 1, layout.pipeline)?;
    let ranks = run_threads(world, &WorldConfig::default(), |world| {
        let mesh = Mesh::new(&world, dims, SequenceParallel::Off)?;
        let scope = Scope::new(&Device::cpu(1)?, DType::F64, 7);
        let bad_steps = BadStepConfig { on_bad_step, loss_spike_factor: Some(20.0) };
        let config = TrainerConfig { bad_steps, ..layout.config()? };
        let mut trainer = Trainer::<Mlp>::on_mesh(&scope, &mesh, &CONFIG, config)?;
        let loaded = match folder.join("latest").exists() {
            true => Some(Checkpoint::peek(folder)?),
            false => None,
        };
        if let Some(checkpoint) = &loaded {
            trainer.load(checkpoint)?;
        }
        let config = RunConfig {
            folder: folder.to_path_buf(),
            loaded: loaded.map(|checkpoint| checkpoint.folder().to_path_buf()),
            intervals: Intervals {
                train_iters: batches.len() as u64,
                save_interval: SAVE_INTERVAL,
                eval_interval: 0,
                eval_tasks_interval: 0,
                exit_interval,
                log_interval: 1,
            },
            seq_length: 1,
            retention: Retention { last: 100, interval: None },
            deadline: None,
            eval_iters: None,
            metrics: folder.join("metrics.jsonl"),
            trace: None,
            straggler_interval: None,
            options: serde_json::Value::Null,
        };
        let samples = Batches(batches.to_vec());
        let data =
            RunData { train: &samples, validation: Vec::new(), tasks: Vec::new(), tokenizer: None };
        let mut watcher = Watcher::default();
        run(&mut trainer, &data, &config, &StopFlag::default(), &mut watcher)?;
        Ok(watcher)
    });
    let ranks: Vec<Watcher> = ranks.into_iter().collect::<Result<_>>()?;
    Ok(ranks.into_iter().next().unwrap_or_default())
}

/// Losses of the steps that are applied and are part of the result, as bits.
fn losses(metrics: &[Metrics], numbers: &[u64]) -> Vec<u64> {
    let bits = |number: &u64| metrics[*number as usize - 1].loss.to_bits();
    numbers.iter().map(bits).collect()
}

const LAYOUTS: [Layout; 4] = [
    ALONE,
    Layout { data: 2, micro_batch: 2, sharding: Sharding::Optimizer, ..ALONE },
    Layout { data: 2, micro_batch: 4, sharding: Sharding::Weights, ..ALONE },
    Layout { data: 2, pipeline: 2, micro_batch: 2, ..ALONE },
];

/// The steps whose batches have a part in the weights in the end.
fn kept(on_bad_step: OnBadStep) -> Vec<u64> {
    let dropped: &[u64] = match on_bad_step {
        OnBadStep::Rewind => &[5, 6, 9, 10, 11], // from the checkpoints of steps 4 and 8 on
        _ => &[6, 11],
    };
    (1..=STEPS).filter(|step| !dropped.contains(step)).collect()
}

#[test]
fn training_goes_on_as_if_bad_steps_were_not_there() -> Result<()> {
    let batches: Vec<u64> = (1..=STEPS).collect();
    for layout in LAYOUTS {
        for on_bad_step in [OnBadStep::Skip, OnBadStep::Rewind] {
            let folder = tempfile::tempdir().unwrap();
            let found = train(&layout, on_bad_step, &batches, folder.path(), None)?;
            assert_eq!(found.len(), STEPS as usize);
            for metrics in &found {
                let why = metrics.bad_step.as_deref().unwrap_or_default();
                let (want, rewound_to) = match metrics.step {
                    NAN => ("loss NaN, gradient norm NaN; ", Some(4)),
                    OUTLIER => (" is over 20 times its running mean ", Some(8)),
                    _ => ("", None),
                };
                let rewound_to = rewound_to.filter(|_| on_bad_step == OnBadStep::Rewind);
                assert!(why.contains(want) && why.is_empty() == want.is_empty(), "{metrics:?}");
                assert_eq!((metrics.rewound_to, metrics.skipped), (rewound_to, !why.is_empty()));
            }
            let kept = kept(on_bad_step);
            let reference = tempfile::tempdir().unwrap();
            let want = train(&layout, OnBadStep::Stop, &kept, reference.path(), None)?;
            let all: Vec<u64> = (1..=kept.len() as u64).collect();
            assert_eq!(losses(&found, &kept), losses(&want, &all), "{layout:?} {on_bad_step}");
        }
    }
    Ok(())
}

/// Stopped at any step, and going on from there.
#[test]
fn a_resumed_run_decides_alike() -> Result<()> {
    let batches: Vec<u64> = (1..=STEPS).collect();
    let layout = LAYOUTS[1];
    for on_bad_step in [OnBadStep::Skip, OnBadStep::Rewind] {
        let folder = tempfile::tempdir().unwrap();
        let whole = train(&layout, on_bad_step, &batches, folder.path(), None)?;
        for stop in [3, 5, 6, 7, 9, 10, 11] {
            let parts = tempfile::tempdir().unwrap();
            let mut found = train(&layout, on_bad_step, &batches, parts.path(), Some(stop))?;
            assert_eq!(found.len() as u64, stop);
            found.extend(train(&layout, on_bad_step, &batches, parts.path(), None)?);
            let all: Vec<u64> = batches.iter().copied().filter(|step| *step != NAN).collect();
            assert_eq!(losses(&found, &all), losses(&whole, &all), "{on_bad_step} at {stop}");
            let of = |run: &Path| std::fs::read(run.join("iter_0000014/progress.json")).unwrap();
            assert_eq!(of(parts.path()), of(folder.path()), "{on_bad_step} at {stop}");
        }
    }
    Ok(())
}

#[test]
fn a_bad_step_stops_or_has_nowhere_to_go() -> Result<()> {
    let layout = LAYOUTS[3];
    let stopped = |on_bad_step, batches: &[u64]| {
        let folder = tempfile::tempdir().unwrap();
        let error = train(&layout, on_bad_step, batches, folder.path(), None).unwrap_err();
        error.to_string()
    };
    let message = stopped(OnBadStep::Stop, &[1, 2, NAN]);
    assert!(message.contains("step 3: loss NaN"), "{message}");
    let message = stopped(OnBadStep::Stop, &[1, 2, OUTLIER]);
    assert!(message.contains("step 3: loss ") && message.contains("over 20 times"), "{message}");
    assert!(message.contains("add --on-bad-step skip or rewind"), "{message}");
    let message = stopped(OnBadStep::Rewind, &[1, 2, NAN]);
    assert!(
        message.contains("step 3 is bad, and there is no checkpoint to rewind to"),
        "{message}"
    );
    let message = stopped(OnBadStep::Skip, &[vec![1, 2], vec![NAN; 20]].concat());
    assert!(message.contains("step 12: loss NaN") && message.contains("too many bad"), "{message}");
    let message = stopped(OnBadStep::Rewind, &[vec![1, 2, 3, 4], [5, NAN].repeat(20)].concat());
    assert!(message.contains("step 26: ") && message.contains("too many bad"), "{message}");
    Ok(())
}

/// Later steps are under way when the spike is found, and their samples are consumed; weights and progress are those before.
#[test]
fn a_spike_of_an_asynchronous_run_leaves_the_state_before_its_step() -> Result<()> {
    let layout = Layout { data: 2, micro_batch: 4, ..ALONE };
    for max_staleness in [0, 1, 3] {
        let folder = tempfile::tempdir().unwrap();
        let ranks = run_threads(2, &WorldConfig::default(), |world| {
            let dims = ParallelDims::new(2, 1, 1, 1)?;
            let mesh = Mesh::new(&world, dims, SequenceParallel::Off)?;
            let scope = Scope::new(&Device::cpu(1)?, DType::F64, 7);
            let bad_steps =
                BadStepConfig { loss_spike_factor: Some(20.0), ..BadStepConfig::default() };
            let mut config = TrainerConfig { bad_steps, ..layout.config()? };
            let updates = AsyncUpdates { max_staleness, drain_interval: STEPS as usize };
            config.parallel.data_parallel.async_updates = Some(updates);
            let mut trainer = Trainer::<Mlp>::on_mesh(&scope, &mesh, &CONFIG, config)?;
            let healthy = |step: u64| if step == NAN { 1 } else { step };
            let samples = Batches((1..=STEPS).map(healthy).collect());
            let error = (0..STEPS).find_map(|_| trainer.step_async(&samples).err());
            let line = error.expect("the spike ends the run").to_string();
            let progress = trainer.progress().clone();
            trainer.save(folder.path(), None, serde_json::Value::Null)?;
            Ok((line, progress, trainer.optimizer().steps()))
        });
        for found in ranks {
            let (line, progress, updates) = found?;
            assert!(line.contains(&format!("step {OUTLIER}: loss ")), "{line}");
            assert!(line.contains("over 20 times") && !line.contains('\n'), "{line}");
            let done = OUTLIER - 1;
            assert_eq!((progress.step, updates), (done, done), "{max_staleness}");
            assert_eq!(progress.consumed_samples, done * SAMPLES as u64);
            assert_eq!(progress.loss_mean.map(|mean| mean.1), Some(done));
        }
        assert_eq!(Checkpoint::open(folder.path())?.progress().step, OUTLIER - 1);
    }
    Ok(())
}

/// The regular checkpoint of step 8 is damaged; the one of step 9, where the run was stopped, is not.
#[test]
fn a_rewind_passes_over_damaged_checkpoints() -> Result<()> {
    let batches: Vec<u64> = (1..=STEPS).collect();
    for layout in &LAYOUTS[..2] {
        let folder = tempfile::tempdir().unwrap();
        train(layout, OnBadStep::Skip, &batches, folder.path(), Some(9))?;
        let damaged = folder.path().join("iter_0000008");
        let files = std::fs::read_dir(&damaged).unwrap().map(|entry| entry.unwrap().path());
        for file in files.filter(|file| file.to_string_lossy().contains("model")) {
            let mut bytes = std::fs::read(&file).unwrap();
            *bytes.last_mut().unwrap() ^= 1;
            std::fs::write(file, bytes).unwrap();
        }
        let Watcher(metrics, warnings) =
            watch(layout, OnBadStep::Rewind, &batches, folder.path(), None)?;
        let bad = metrics.iter().find(|metrics| metrics.step == OUTLIER).unwrap();
        assert_eq!(bad.rewound_to, Some(9), "{warnings:?}");
        assert_eq!(warnings.len(), 1, "{warnings:?}");
        assert!(warnings[0].contains("step 11: rewound to '"), "{warnings:?}");
        assert!(warnings[0].contains("iter_0000008") && warnings[0].contains("is damaged"));
    }
    Ok(())
}
