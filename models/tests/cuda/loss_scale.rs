//! A GPU adapts a dynamic loss scale by itself: steps, scales and weights are those of a host that reads every step.

use super::numbers::numbers;
use super::waits::trainer;
use super::*;
use ferrotron_cuda::gpu::GpuConfig;
use ferrotron_models::batch_size::Rampup;
use ferrotron_models::checkpoint::Checkpoint;
use ferrotron_models::trainer::{ExecutionMode, ScheduleUnit, StepReport};
use ferrotron_nn::schedule::{DecayStyle, LrScheduleConfig};
use ferrotron_nn::{LossScale, LossScaler, MuonConfig, OptimizerConfig, Rounding};

/// A scale that moves often: it overflows at first, and each growth brings it beyond what the gradients bear.
pub const MOVING: LossScale =
    LossScale::Dynamic { initial: 3_145_728.0, window: 3, hysteresis: 2, minimum: 1.0 };
const STEPS: u64 = 16;

/// A small model in f16.
pub fn half() -> Case {
    let model = GptConfig {
        hidden_dropout: 0.1,
        attention_dropout: 0.1,
        ..GptConfig::gpt2(VOCAB, 1, 16, 1, LENGTH)
    };
    Case { name: "gpt2 f16", model, dtype: DType::F16, tolerance: 2_f64.powi(-9) }
}

/// Another learning rate in each update.
fn moving(config: &mut TrainerConfig) {
    config.precision.loss_scale = MOVING;
    config.schedule = LrSchedule::new(LrScheduleConfig {
        style: DecayStyle::Cosine,
        max_lr: 1e-2,
        min_lr: 1e-3,
        warmup_steps: 8,
        decay_steps: 40,
        ..LrScheduleConfig::default()
    })
    .unwrap();
}

/// A small model in f16 on a GPU of its own, whose scale and learning rate move.
fn moving_trainer(gpu: &GpuConfig, execution: ExecutionMode) -> Result<Trainer<Gpt>> {
    trainer(&half(), &Device::cuda(gpu)?, |config| {
        moving(config);
        config.execution = execution;
    })
}

/// The numbers that are told of a step.
type Told = (u64, f64, u64, f64, f64, bool);

fn told(report: &StepReport) -> Told {
    let StepReport { step, loss, grad_norm, lr, loss_scale, skipped, .. } = *report;
    // Any overflow is as good as any other.
    let norm = if skipped { 0 } else { grad_norm.to_bits() };
    (step, loss, norm, lr, loss_scale, skipped)
}

/// All that a run has told and holds.
#[derive(PartialEq)]
struct Found {
    told: Vec<Told>,
    weights: Vec<f64>,
    updates: u64,
    scaler: Option<(f64, u64, u64)>,
    skipped_samples: u64,
}

/// Takes the steps, and reads those since the last time behind each that `reads` says.
fn run(
    trainer: &mut Trainer<Gpt>,
    steps: std::ops::Range<u64>,
    reads: impl Fn(u64) -> bool,
) -> Result<Found> {
    let mut all = Vec::new();
    for step in steps.clone() {
        trainer.step_async(&Noise)?;
        if reads(step) || step + 1 == steps.end {
            all.extend(trainer.drain_reports(&Noise)?.iter().map(told));
        }
    }
    let progress = trainer.progress();
    Ok(Found {
        told: all,
        updates: trainer.optimizer().steps(),
        scaler: progress.loss_scaler,
        skipped_samples: progress.skipped_samples,
        weights: numbers(trainer)?,
    })
}

#[test]
fn a_gpu_adapts_the_loss_scale_as_a_host_that_reads_every_step() -> Result<()> {
    let test = "a_gpu_adapts_the_loss_scale_as_a_host_that_reads_every_step";
    let Some(gpu) = ferrotron_cuda_sim::gpu(test) else { return Ok(()) };
    let plain = |_: &mut TrainerConfig| {};
    let samples = |config: &mut TrainerConfig| {
        let schedule = LrScheduleConfig {
            style: DecayStyle::Cosine,
            max_lr: 1e-2,
            min_lr: 1e-3,
            warmup_steps: 8 * BATCH as u64,
            decay_steps: 40 * BATCH as u64,
            ..LrScheduleConfig::default()
        };
        config.schedule = LrSchedule::new(schedule).unwrap();
        config.schedule_unit = ScheduleUnit::Samples;
        config.ema_decay = Some(0.9);
        // The batch grows twice.
        config.batch_size = BatchSize::new(BatchSizeConfig {
            micro_batch_size: 1,
            global_batch_size: Some(BATCH),
            rampup: Some(Rampup { start: 2, increment: 1, samples: 16 }),
            ..BatchSizeConfig::default()
        })
        .unwrap();
    };
    let rounded = |config: &mut TrainerConfig| {
        config.precision.rounding = Rounding::Stochastic { seed: 5 };
    };
    let unfused = |config: &mut TrainerConfig| {
        config.optimizer = OptimizerConfig::Muon(MuonConfig::default());
    };
    type Change<'a> = &'a dyn Fn(&mut TrainerConfig);
    let cases: [(&str, Change, bool); 4] = [
        ("plain", &plain, true),
        ("samples", &samples, true),
        ("rounded", &rounded, true),
        ("unfused", &unfused, false),
    ];
    for (what, change, captures) in cases {
        let make = |execution: ExecutionMode| {
            trainer(&half(), &Device::cuda(&gpu)?, |config| {
                moving(config);
                change(config);
                config.execution = execution;
            })
        };
        let mut each = make(ExecutionMode::Eager)?;
        let want = run(&mut each, 0..STEPS, |_| true)?;
        // The trajectory is that of the rule.
        let mut scaler = LossScaler::new(MOVING)?;
        let mut lrs = Vec::new();
        for &(step, _, _, lr, loss_scale, skipped) in &want.told {
            assert_eq!(loss_scale, scaler.scale(), "{what}, step {step}");
            scaler.update(skipped);
            lrs.extend((!skipped).then_some(lr));
        }
        let skipped = want.told.iter().filter(|told| told.5).count() as u64;
        assert!((3..STEPS - 6).contains(&skipped), "{what}: {skipped} skipped");
        let grown = want.told.windows(2).any(|two| two[1].4 > two[0].4);
        assert!(grown, "{what}: the scale has never grown");
        assert_eq!(want.updates, STEPS - skipped, "{what}");
        assert!(lrs.windows(2).all(|two| two[0] != two[1]), "{what}: {lrs:?}");

        let read = |step: u64| step % 7 == 4;
        let modes = if captures {
            &[ExecutionMode::Eager, ExecutionMode::CudaGraph][..]
        } else {
            &[ExecutionMode::Eager]
        };
        for &execution in modes {
            let ahead = run(&mut make(execution)?, 0..STEPS, read)?;
            assert_eq!(ahead.told, want.told, "{what}, {execution:?}");
            assert!(ahead == want, "{what}, {execution:?}: another state");
        }
    }
    Ok(())
}

/// A checkpoint in the middle of a window has the scale and its history.
#[test]
fn a_run_whose_gpu_adapts_the_loss_scale_goes_on_to_the_last_bit() -> Result<()> {
    let test = "a_run_whose_gpu_adapts_the_loss_scale_goes_on_to_the_last_bit";
    let Some(gpu) = ferrotron_cuda_sim::gpu(test) else { return Ok(()) };
    for execution in [ExecutionMode::Eager, ExecutionMode::CudaGraph] {
        let make = || moving_trainer(&gpu, execution);
        let want = run(&mut make()?, 0..STEPS, |_| false)?;
        for after in [4, 9] {
            let folder = tempfile::tempdir().unwrap();
            let mut first = make()?;
            let before = run(&mut first, 0..after, |_| false)?;
            let saved = first.save(folder.path(), None, serde_json::Value::Null)?;
            let mut second = make()?;
            run(&mut second, 0..2, |_| false)?; // it has a state of its own
            second.load(&Checkpoint::open(&saved)?)?;
            let mut rest = run(&mut second, after..STEPS, |step| step == after + 3)?;
            rest.told.splice(0..0, before.told);
            assert_eq!(rest.told, want.told, "{execution:?}, saved after {after}");
            assert!(rest == want, "{execution:?}, saved after {after}: another state");
        }
    }
    Ok(())
}

/// A step that is lost behind skipped ones is found with the numbers that it had, and taken back to the state before it.
#[test]
fn a_lost_step_behind_skipped_ones_is_taken_back() -> Result<()> {
    let test = "a_lost_step_behind_skipped_ones_is_taken_back";
    let Some(gpu) = ferrotron_cuda_sim::gpu(test) else { return Ok(()) };
    for execution in [ExecutionMode::Eager, ExecutionMode::CudaGraph] {
        let make = || moving_trainer(&gpu, execution);
        let (mut lost, mut fine) = (make()?, make()?);
        let want = run(&mut fine, 0..6, |_| true)?;
        assert!(want.skipped_samples > 0);
        (0..6).try_for_each(|_| lost.step_async(&Noise))?;
        let norm = lost.buffers().params().find(|param| param.name() == "norm_f.weight");
        let leaf = norm.expect("the last norm").leaf().clone();
        let whole = leaf.value()?.copy()?;
        leaf.set_value(&whole.mul_scalar(f64::INFINITY)?)?; // so that the loss is not finite
        (0..3).try_for_each(|_| lost.step_async(&Noise))?;
        let error = lost.drain_reports(&Noise).unwrap_err().to_string();
        assert!(error.contains("step 7: loss "), "{error}");
        leaf.set_value(&whole)?;
        let reports: Vec<Told> = lost.completed_reports().iter().map(told).collect();
        assert_eq!(reports, want.told);
        let progress = lost.progress();
        assert_eq!((progress.step, progress.loss_scaler), (6, want.scaler));
        assert_eq!(progress.skipped_samples, want.skipped_samples);
        assert_eq!(lost.optimizer().steps(), want.updates);
        let (want, got) = (run(&mut fine, 6..12, |_| true)?, run(&mut lost, 6..12, |_| false)?);
        assert_eq!(got.told, want.told, "{execution:?}");
        assert!(got == want, "{execution:?}: another state");
    }
    Ok(())
}
