//! Runs of several ranks: their small calls, and which one is slow.

use ferrotron_nn::schedule::LrSchedule;
use ferrotron_nn::{Axis, Scope};
use ferrotron_parallel::collective::{WorldConfig, run_threads};
use ferrotron_parallel::mesh::{Mesh, ParallelDims};
use ferrotron_parallel::tensor_parallel::SequenceParallel;
use ferrotron_tensor::{DType, Device, Result};
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use super::{
    Intervals, Metrics, Observer, RunConfig, RunData, SlowestRank, Stragglers, read_metrics, run,
};
use crate::io::checkpoint::Retention;
use crate::io::data::{Batch, Samples, TokenBatch};
use crate::model::gpt::{Gpt, GptConfig};
use crate::training::batch_size::{BatchSize, BatchSizeConfig};
use crate::training::evaluate::Evaluation;
use crate::training::stop::StopFlag;
use crate::training::trainer::{Trainer, TrainerConfig};

const SEQ_LENGTH: usize = 8;

/// Far more than a step takes, also on a machine with other work.
const DELAY: Duration = Duration::from_millis(150);

/// Samples for which a rank waits, or behind which it does something else.
struct Delayed {
    reading: Duration,
    working: Duration,
}

impl Samples for Delayed {
    fn batch(&self, first_sample: u64, micro_batch: usize) -> Result<Batch> {
        sleep(self.reading);
        let tokens = micro_batch * SEQ_LENGTH;
        TokenBatch {
            inputs: (0..tokens).map(|i| i as u32 % 7).collect(),
            targets: (0..tokens).map(|i| i as i64 % 5).collect(),
            first_sample,
            micro_batch,
            seq_length: SEQ_LENGTH,
        }
        .try_into()
    }

    fn seq_length(&self) -> usize {
        SEQ_LENGTH
    }

    fn prefetch(&self, _: &[(u64, usize)]) {
        sleep(self.working);
    }
}

#[derive(Default)]
struct Watch(Vec<String>);

impl Observer for Watch {
    fn step(&mut self, _: &Metrics) {}

    fn evaluated(&mut self, _: u64, _: Option<&str>, _: &Evaluation) {}

    fn saved(&mut self, _: &Path) {}

    fn warning(&mut self, message: &str) {
        self.0.push(message.to_string());
    }
}

fn trainer(mesh: &Mesh) -> Result<Trainer<Gpt>> {
    let batch_size = BatchSize::new(BatchSizeConfig {
        micro_batch_size: 2,
        data_parallel_size: mesh.axis(Axis::Data).size(),
        global_batch_size: Some(8),
        rampup: None,
    })?;
    let config = TrainerConfig::new(1, LrSchedule::constant(1e-3)?, batch_size);
    let model = GptConfig::gpt2(8, 2, 8, 2, SEQ_LENGTH);
    let scope = Scope::new(&Device::cpu(1)?, DType::F32, 1);
    Trainer::on_mesh(&scope, mesh, &model, config)
}

/// The slowest ranks of steps 2 and 4, from the metrics, and the warnings of the first rank.
fn train(
    layout: ParallelDims,
    delay: impl Fn(usize) -> Delayed + Sync,
) -> (Vec<Stragglers>, Vec<String>) {
    let folder = tempfile::tempdir().unwrap();
    let warnings = run_threads(layout.world(), &WorldConfig::default(), |world| {
        let mesh = Mesh::new(&world, layout, SequenceParallel::Off)?;
        let mut trainer = trainer(&mesh)?;
        let samples = delay(world.rank());
        let data =
            RunData { train: &samples, validation: Vec::new(), tasks: Vec::new(), tokenizer: None };
        let config = RunConfig {
            folder: folder.path().to_path_buf(),
            loaded: None,
            intervals: Intervals {
                train_iters: 4,
                save_interval: 0,
                eval_interval: 0,
                eval_tasks_interval: 0,
                exit_interval: None,
                log_interval: 2,
            },
            seq_length: SEQ_LENGTH,
            retention: Retention { last: 1, interval: None },
            deadline: None,
            eval_iters: Some(0),
            straggler_interval: Some(2),
            metrics: folder.path().join("metrics.jsonl"),
            trace: None,
            options: serde_json::Value::Null,
        };
        let mut watch = Watch::default();
        run(&mut trainer, &data, &config, &StopFlag::default(), &mut watch)?;
        Ok(watch.0)
    });
    let warnings: Vec<Vec<String>> = warnings.into_iter().map(Result::unwrap).collect();
    assert!(warnings[1..].iter().all(Vec::is_empty), "{warnings:?}");
    let mut found = Vec::new();
    read_metrics(&folder.path().join("metrics.jsonl"), |line| {
        assert_eq!(line.stragglers.is_some(), line.step % 2 == 0);
        found.extend(line.stragglers);
    })
    .unwrap();
    (found, warnings[0].clone())
}

/// Flags and counts travel together, the loss once it is known; finding the slowest ranks takes two calls.
#[test]
fn a_step_has_two_small_calls_over_all_ranks() {
    for (t, p) in [(1, 1), (2, 1), (1, 2)] {
        let ranks = 2 * t * p;
        let layout = ParallelDims::new(ranks, t, 1, p).unwrap();
        let found = run_threads(ranks, &WorldConfig::default(), |world| {
            let mesh = Mesh::new(&world, layout, SequenceParallel::Off)?;
            let mut trainer = trainer(&mesh)?;
            let samples = Delayed { reading: Duration::ZERO, working: Duration::ZERO };
            // The first step asks besides whether all terms of the loss were returned.
            trainer.step(&samples)?;
            let calls = || {
                [mesh.world(), mesh.axis(Axis::Data)]
                    .map(|group| group.traffic().calls_and_bytes("all_reduce"))
            };
            let mut all = vec![calls()];
            for step in 0..3 {
                let mut flags = [world.rank() as f64, 0.0, f64::from(step), 1.0];
                let begun = trainer.begin_step(&samples, &mut flags)?;
                let sum = ranks as f64;
                assert_eq!(flags, [sum * (sum - 1.0) / 2.0, 0.0, sum * f64::from(step), sum]);
                trainer.take_step(begun, &samples)?;
            }
            all.push(calls());
            Stragglers::measure(&mut trainer)?;
            all.push(calls());
            // Without flags, ranks along the data axis count alone.
            trainer.step(&samples)?;
            all.push(calls());
            Ok(all)
        });
        let found: Vec<Vec<[(u64, u64); 2]>> = found.into_iter().map(Result::unwrap).collect();
        // Calls of a rank, and bytes of all, between two looks.
        let between = |at: usize, group: usize| {
            let calls = found.iter().map(|of| of[at + 1][group].0 - of[at][group].0);
            let calls: Vec<u64> = calls.collect();
            assert!(calls.iter().all(|&own| own == calls[0]), "{layout:?}: {calls:?}");
            let bytes = found.iter().map(|of| of[at + 1][group].1 - of[at][group].1);
            (calls[0], bytes.sum::<u64>())
        };
        let sent = |bytes: u64| 2 * (ranks as u64 - 1) * bytes;
        assert_eq!(between(0, 0), (3 * 2, 3 * sent((4 + 1) * 8 + 8)), "{layout:?}");
        assert_eq!(between(0, 1), (0, 0), "{layout:?}");
        assert_eq!(between(1, 0), (2, sent(2 * 24)), "{layout:?}");
        assert_eq!(between(2, 0), (1, sent(8)), "{layout:?}");
        assert_eq!(between(2, 1), (1, 2 * (ranks / 2) as u64 * 8), "{layout:?}");
    }
}

/// Samples that were read for a step that was left out, or behind another one, are not used.
#[test]
fn a_step_that_was_left_out_is_begun_anew() -> Result<()> {
    let samples = Delayed { reading: Duration::ZERO, working: Duration::ZERO };
    let mut trainer = trainer(&Mesh::single())?;
    let left_out = trainer.begin_step(&samples, &mut [])?;
    trainer.step(&samples)?;
    let error = trainer.take_step(left_out, &samples).unwrap_err().to_string();
    assert_eq!(
        error,
        "train: the step was begun at sample 0, and the trainer is at 8: begin it anew"
    );
    assert_eq!(trainer.step(&samples)?.step, 2);
    Ok(())
}

#[test]
fn the_rank_that_is_late_is_named_in_any_layout() {
    for (layout, slow) in
        [((4, 1, 1, 1), 2), ((4, 2, 1, 2), 1), ((4, 2, 1, 2), 2), ((4, 1, 1, 1), 0)]
    {
        let (ranks, tp, cp, pp) = layout;
        let layout = ParallelDims::new(ranks, tp, cp, pp).unwrap();
        let of = |rank: usize| if rank == slow { DELAY } else { Duration::ZERO };
        let works = |rank| Delayed { reading: Duration::ZERO, working: of(rank) };
        let (found, warnings) = train(layout, works);
        assert_eq!(found.len(), 2);
        for Stragglers { compute, communication, .. } in &found {
            assert_eq!(compute.rank, slow, "{layout:?}: {found:?}");
            assert!(compute.ms > 150.0 && compute.ms > 2.0 * compute.mean_ms, "{compute:?}");
            assert!(communication.rank != slow && communication.ms > 75.0, "{communication:?}");
        }
        // Once, not at every interval.
        let line = format!("rank {slow} computes ");
        let named = warnings.iter().filter(|warning| warning.contains(&line)).count();
        assert_eq!(named, 1, "{layout:?}: {warnings:?}");
        assert!(warnings.iter().any(|warning| warning.starts_with("step 2: ")), "{warnings:?}");

        let reads = |rank| Delayed { reading: of(rank), working: Duration::ZERO };
        let (found, warnings) = train(layout, reads);
        for Stragglers { data, communication, .. } in &found {
            assert_eq!(data.rank, slow, "{layout:?}: {found:?}");
            assert!(data.ms > 150.0 && communication.rank != slow, "{layout:?}: {found:?}");
        }
        let line = format!("rank {slow} waits for samples ");
        assert!(warnings.iter().any(|warning| warning.contains(&line)), "{warnings:?}");
    }
}

#[test]
fn ranks_alike_are_no_news_and_another_one_is() {
    let even = |ms: f64| SlowestRank { rank: 5, ms, mean_ms: 100.0 };
    let of = |compute: SlowestRank, data: SlowestRank| Stragglers {
        compute,
        communication: SlowestRank { rank: 0, ms: 900.0, mean_ms: 100.0 },
        data,
    };
    let mut told = [None; 2];
    assert!(of(even(119.0), even(120.0)).warnings(1, &mut told).is_empty());
    let lines = of(even(150.0), even(100.0)).warnings(7, &mut told);
    let want =
        "step 7: rank 5 computes 150.0 ms a step, 1.50 x the mean of all ranks, which wait for it";
    assert_eq!(lines, [want]);
    assert!(of(even(160.0), even(100.0)).warnings(8, &mut told).is_empty());
    let other = SlowestRank { rank: 6, ..even(150.0) };
    assert_eq!(of(other, even(200.0)).warnings(9, &mut told).len(), 2);
    // Many times the mean, and too little to matter.
    let tiny = SlowestRank { rank: 1, ms: 4.0, mean_ms: 1.0 };
    assert!(of(even(100.0), tiny).warnings(10, &mut told).is_empty());
}
