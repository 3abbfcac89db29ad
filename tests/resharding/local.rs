//! Local SGD: replicas take steps of their own, and a checkpoint is of all of them only when they agree.

use ferrotron::models::data::Dataset;
use ferrotron::models::evaluate::Evaluation;
use ferrotron::models::run::{self, Ended, Metrics, Observer, RunConfig};
use ferrotron::models::tokenizer::Tokenizer;
use ferrotron::models::trainer::Trainer;
use ferrotron::nn::{Scope, Sharding};
use ferrotron::tensor::{DType, Device, Result};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::train::{Layout, SEQ_LENGTH, Task, difference, run, trainer_config};
use super::{task, tied};

/// Replicas that take steps of their own are saved when they are the same, and go on counting the steps of
/// the run.
#[test]
fn local_steps_are_saved_when_replicas_agree() -> Result<()> {
    let model = tied();
    let folder = tempfile::tempdir().unwrap();
    let save = Some(folder.path());
    let local = Layout { synchronize_every: 2, ..Layout::data(2, Sharding::None) };
    let error = run(&Task { steps: 3, save, ..task(&model, local) }).unwrap_err().to_string();
    assert!(error.contains("differ after step 3") && error.ends_with("after step 4"), "{error}");
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
    stop: Arc<AtomicBool>,
}

impl Observer for Watch {
    fn step(&mut self, _: &Metrics) {
        self.stop.store(self.ends, Relaxed);
    }

    fn evaluated(&mut self, _: u64, _: &Evaluation) {}

    fn saved(&mut self, _: &Path) {}
}

#[test]
fn a_run_is_saved_when_replicas_agree_or_refused() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let tokenizer = Tokenizer::char("abcdefghijklm")?;
    let dataset = Dataset::from_text(&"abcdefghijklm".repeat(40), &tokenizer, 0.1)?;
    let local = Layout { synchronize_every: 4, ..Layout::SERIAL };
    let train = |save_interval: u64, train_iters: u64, ends: bool| -> Result<(Ended, u64)> {
        let scope = Scope::new(&Device::cpu(1)?, DType::F32, 1);
        let mut trainer = Trainer::new(&scope, &tied(), trainer_config(&local)?)?;
        let folder = folder.path().join(format!("{save_interval}-{train_iters}"));
        let config = RunConfig {
            metrics: folder.join("metrics.jsonl"),
            trace: None,
            folder,
            train_iters,
            seq_length: SEQ_LENGTH,
            save_interval,
            save_retain: 5,
            eval_interval: 100,
            eval_iters: 1,
            exit_interval: None,
            options: serde_json::Value::Null,
        };
        let stop = Arc::new(AtomicBool::new(false));
        let mut watch = Watch { ends, stop: stop.clone() };
        let ended = run::run(&mut trainer, &dataset, &tokenizer, &config, &stop, &mut watch)?;
        Ok((ended.ended, trainer.progress().step))
    };
    for (save_interval, train_iters, part) in
        [(6, 8, "save-interval 6 is not"), (4, 10, "train-iters 10 is not")]
    {
        let error = train(save_interval, train_iters, false).unwrap_err().to_string();
        assert!(error.contains(part) && error.contains("the 4 steps"), "{error}");
    }
    assert_eq!(train(4, 8, false)?, (Ended::Finished, 8));
    // The request comes during the first step; the fourth is the next that can be saved.
    assert_eq!(train(8, 16, true)?, (Ended::Stopped, 4));
    Ok(())
}
