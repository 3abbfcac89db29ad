//! Local SGD: replicas take steps of their own, and a checkpoint is of all of them only when they agree. So it is with
//! updates that ranks do not wait for.

use ferrotron::models::checkpoint::Retention;
use ferrotron::models::data::{Dataset, Split};
use ferrotron::models::evaluate::Evaluation;
use ferrotron::models::gpt::Gpt;
use ferrotron::models::run::{self, Intervals, Metrics, Observer, RunConfig, StopReason};
use ferrotron::models::stop::StopFlag;
use ferrotron::models::tokenizer::Tokenizer;
use ferrotron::models::trainer::Trainer;
use ferrotron::nn::{Scope, Sharding};
use ferrotron::parallel::collective::{WorldConfig, run_threads};
use ferrotron::parallel::data_parallel::AsyncUpdates;
use ferrotron::parallel::mesh::{self, Mesh};
use ferrotron::parallel::tensor_parallel::SequenceParallel;
use ferrotron::tensor::{DType, Device, Result};
use std::path::Path;
use std::sync::Mutex;

use super::samples::Noise;
use super::train::{Layout, SEQ_LENGTH, Task, difference, run, trainer_config};
use super::{task, tied};

/// Replicas that take steps of their own are saved when they are the same, and keep counting the steps of the run.
#[test]
fn local_steps_are_saved_when_replicas_agree() -> Result<()> {
    let model = tied();
    let folder = tempfile::tempdir().unwrap();
    let save = Some(folder.path());
    let local = Layout { synchronize_every: 2, ..Layout::data(2, Sharding::None) };
    let error = run(&Task { steps: 3, save, ..task(&model, local) }).unwrap_err().to_string();
    // A rank that is still waiting when another ends with this error adds in which call it was.
    assert!(error.contains("differ after step 3") && error.contains("after step 4"), "{error}");
    assert!(std::fs::read_dir(folder.path()).unwrap().next().is_none());

    let saved = run(&Task { steps: 2, save, ..task(&model, local) })?;
    let found = run(&Task { load: save, seed: 4321, ..task(&model, local) })?;
    assert_eq!(difference(&found.tensors, &saved.tensors), None);
    // Synchronized steps leave a number of steps that is no multiple of two: the next one synchronizes.
    let three = run(&Task {
        steps: 1,
        load: save,
        save,
        ..task(&model, Layout::data(2, Sharding::Optimizer))
    })?;
    assert_eq!(three.progress.step, 3);
    let four = run(&Task { steps: 1, load: save, ..task(&model, local) })?;
    assert_eq!(four.progress.step, 4);
    let error = run(&Task { steps: 2, load: save, ..task(&model, local) }).unwrap_err();
    assert!(error.to_string().contains("differ after step 5"), "{error}");
    Ok(())
}

/// Asks for the end after the first step, if it is to.
struct Watch {
    ends: bool,
    stop: StopFlag,
}

impl Observer for Watch {
    fn step(&mut self, _: &Metrics) {
        if self.ends {
            self.stop.set();
        }
    }

    fn evaluated(&mut self, _: u64, _: Option<&str>, _: &Evaluation) {}

    fn saved(&mut self, _: &Path) {}

    fn warning(&mut self, message: &str) {
        panic!("{message}");
    }
}

#[test]
fn a_run_is_saved_when_replicas_agree_or_refused() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let tokenizer = Tokenizer::char("abcdefghijklm")?;
    let dataset = Dataset::from_text(&"abcdefghijklm".repeat(40), &tokenizer, Split::default())?;
    let local = Layout { synchronize_every: 4, ..Layout::SERIAL };
    let updates = AsyncUpdates { max_staleness: 1, drain_interval: 4 };
    let stale = Layout { async_updates: Some(updates), ..Layout::SERIAL };
    let train = |layout: &Layout, save_interval: u64, train_iters: u64, ends: bool| {
        let scope = Scope::new(&Device::cpu(1)?, DType::F32, 1);
        let mut trainer = Trainer::<Gpt>::new(&scope, &tied(), trainer_config(layout)?)?;
        let every = layout.synchronize_every;
        let folder = folder.path().join(format!("{every}-{save_interval}-{train_iters}"));
        let config = RunConfig {
            loaded: None,
            metrics: folder.join("metrics.jsonl"),
            trace: None,
            folder,
            intervals: Intervals {
                train_iters,
                save_interval,
                eval_interval: 100,
                eval_tasks_interval: 0,
                exit_interval: None,
                log_interval: 100,
            },
            seq_length: SEQ_LENGTH,
            retention: Retention { last: 5, interval: None },
            deadline: None,
            eval_iters: Some(1),
            straggler_interval: None,
            options: serde_json::Value::Null,
        };
        let batch = trainer.config().batch_size.full_batch_size();
        let samples = config.samples(&dataset, trainer.config().seed, batch)?;
        let stop = StopFlag::default();
        let mut watch = Watch { ends, stop: stop.clone() };
        let ended =
            run::run(&mut trainer, &samples.run_data(&tokenizer), &config, &stop, &mut watch)?;
        Result::<(StopReason, u64)>::Ok((ended.stop_reason, trainer.progress().step))
    };
    for (layout, option) in [(local, "local-sgd-steps 4"), (stale, "drain-interval 4")] {
        for (save_interval, train_iters, part) in
            [(6, 8, "save-interval 6 is not"), (4, 10, "train-iters 10 is not")]
        {
            let error = train(&layout, save_interval, train_iters, false).unwrap_err().to_string();
            assert!(error.contains(part) && error.contains(option), "{error}");
        }
        assert_eq!(train(&layout, 4, 8, false)?, (StopReason::Finished, 8));
        // The request comes during the first step; the fourth is the next that can be saved.
        assert_eq!(train(&layout, 8, 16, true)?, (StopReason::Stopped, 4));
    }
    Ok(())
}

/// The norm is each replica's own, but what one finds ends all, in the same step.
#[test]
fn gradients_of_one_replica_that_overflow_end_all() {
    let local = Layout { synchronize_every: 4, ..Layout::data(2, Sharding::None) };
    let found = run_threads(2, &WorldConfig::default(), |world| {
        let mesh = Mesh::new(&world, mesh::ParallelDims::new(2, 1, 1, 1)?, SequenceParallel::Off)?;
        let scope = Scope::new(&Device::cpu(1)?, DType::F64, 1);
        let mut trainer = Trainer::<Gpt>::on_mesh(&scope, &mesh, &tied(), trainer_config(&local)?)?;
        let noise = Noise { model: &tied(), distinct_samples: 1 << 32, asked: Mutex::default() };
        trainer.step(&noise)?;
        if mesh.rank() == 1 {
            // A finite loss, and gradients whose squares are not.
            let norm = trainer.buffers().params().find(|param| param.name() == "norm_f.weight");
            let leaf = norm.expect("the last norm").leaf();
            let huge = leaf.value()?.mul_scalar(1e200)?;
            leaf.set_value(&huge)?;
        }
        Ok(trainer.step(&noise).map(|report| report.loss).map_err(|error| error.to_string()))
    });
    for (rank, found) in found.into_iter().enumerate() {
        let line = found.unwrap().unwrap_err();
        assert!(line.contains("step 2: loss ") && !line.contains('\n'), "rank {rank}: {line}");
        let why = ["another replica's gradient norm is not finite", "gradient norm inf"][rank];
        assert!(line.contains(why), "rank {rank}: {line}");
    }
}
