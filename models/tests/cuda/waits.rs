//! The host does not wait for a GPU's steps: it synchronizes when it reads their numbers, and nowhere else.

use super::loss_scale::{MOVING, half};
use super::numbers::numbers;
use super::*;
use ferrotron_cuda::gpu::GpuConfig;
use ferrotron_models::gpt::Gpt;
use ferrotron_models::gpt::Recompute;
use ferrotron_models::trainer::{PrecisionConfig, StepReport};
use ferrotron_nn::{AdafactorConfig, LossScale, OptimizerConfig, Rounding};
use ferrotron_parallel::collective::NcclConfig;
use ferrotron_tensor::Error;
use std::time::Duration;

pub fn trainer(
    case: &Case,
    device: &Device,
    change: impl Fn(&mut TrainerConfig),
) -> Result<Trainer<Gpt>> {
    let batch_size = BatchSize::new(BatchSizeConfig {
        micro_batch_size: 2,
        global_batch_size: Some(BATCH),
        ..BatchSizeConfig::default()
    })?;
    let mut config = TrainerConfig::new(7, LrSchedule::constant(1e-2)?, batch_size);
    change(&mut config);
    Trainer::<Gpt>::new(&Scope::new(device, case.dtype, 1234), &case.model, config)
}

#[test]
fn nobody_waits_for_a_gpu_before_its_numbers_are_read() -> Result<()> {
    let test = "nobody_waits_for_a_gpu_before_its_numbers_are_read";
    let Some(gpu) = ferrotron_cuda_sim::stand_in(test) else { return Ok(()) };
    let [gpt2, llama, bf16] = Case::all();
    let plain = |_: &mut TrainerConfig| {};
    let recomputing = |config: &mut TrainerConfig| config.parallel.recompute = Recompute::FULL;
    let adafactor = |config: &mut TrainerConfig| {
        config.optimizer = OptimizerConfig::Adafactor(AdafactorConfig::default());
    };
    let rounding = |config: &mut TrainerConfig| {
        config.precision.rounding = Rounding::Stochastic { seed: 5 };
    };
    let half = half();
    let scaled = |config: &mut TrainerConfig| config.precision.loss_scale = MOVING;
    type Change<'a> = &'a dyn Fn(&mut TrainerConfig);
    let cases: [(&Case, Change); 6] = [
        (&gpt2, &plain),
        (&llama, &recomputing),
        (&gpt2, &adafactor),
        (&bf16, &plain),
        (&bf16, &rounding),
        (&half, &scaled),
    ];
    for (index, (case, change)) in cases.into_iter().enumerate() {
        let what = format!("{}, case {index}", case.name);
        let device = Device::cuda(&gpu)?;
        let mut ahead = trainer(case, &device, change)?;
        ahead.step(&Noise)?; // kernels are loaded, memory is there
        let (before, reserved) = (ferrotron_cuda_sim::waits(), device.memory().reserved);
        (0..4).try_for_each(|_| ahead.step_async(&Noise))?;
        assert_eq!(ferrotron_cuda_sim::waits(), before, "{what}");
        // More memory would take a GPU's time.
        assert_eq!(device.memory().reserved, reserved, "{what}: the pool has grown");
        let reports = ahead.drain_reports(&Noise)?;
        // For the numbers of all steps, and whether an index was bad.
        let (waits, reads) = ferrotron_cuda_sim::waits();
        assert_eq!((waits - before.0, reads - before.1), (1, 2), "{what}");

        let mut each = trainer(case, &Device::cuda(&gpu)?, change)?;
        each.step(&Noise)?;
        for (step, found) in reports.iter().enumerate() {
            let want = each.step(&Noise)?;
            let told = |report: &StepReport| {
                let norm = if report.skipped { -1.0 } else { report.grad_norm };
                (report.step, report.loss, norm, report.lr, report.loss_scale, report.tokens)
            };
            assert_eq!(told(found), told(&want), "{what}, step {step}");
        }
        assert!(numbers(&ahead)? == numbers(&each)?, "{what}: other weights");
        assert_eq!(reports.len(), 4);
    }
    Ok(())
}

/// A step whose loss is found late ends the run with the same error, and no later step has changed anything.
#[test]
fn a_step_that_is_lost_is_the_last_however_late_it_is_found() -> Result<()> {
    let test = "a_step_that_is_lost_is_the_last_however_late_it_is_found";
    let Some(gpu) = ferrotron_cuda_sim::gpu(test) else { return Ok(()) };
    let [case, _, bf16] = Case::all();
    let stochastic = |config: &mut TrainerConfig| {
        config.precision.rounding = Rounding::Stochastic { seed: 5 };
    };
    for (case, device) in
        [(&case, &Device::cpu(1)?), (&case, &Device::cuda(&gpu)?), (&bf16, &Device::cuda(&gpu)?)]
    {
        let mut trainer = trainer(case, device, stochastic)?;
        trainer.step_async(&Noise)?;
        trainer.step_async(&Noise)?;
        let norm = trainer.buffers().params().find(|param| param.name() == "norm_f.weight");
        let leaf = norm.expect("the last norm").leaf().clone();
        let fine = leaf.value()?.copy()?;
        leaf.set_value(&fine.mul_scalar(3e38)?)?; // so that logits are infinite
        let before = numbers(&trainer)?;
        let ahead = if device.is_gpu() { 3 } else { 1 };
        let given = (0..ahead).try_for_each(|_| trainer.step_async(&Noise));
        let told = given.and_then(|()| trainer.drain_reports(&Noise)).unwrap_err().to_string();
        assert!(
            told.contains("step 3: loss ") && told.contains("first offender: the gradient of"),
            "{told}"
        );
        assert!(numbers(&trainer)? == before, "{} on {device:?} has changed", case.name);
        let progress = (trainer.progress().step, trainer.progress().consumed_samples);
        assert_eq!((progress, trainer.optimizer().steps()), ((2, 2 * BATCH as u64), 2));
        assert_eq!(trainer.drain_reports(&Noise)?.len(), 2);
        // Nothing of it stays.
        leaf.set_value(&fine)?;
        assert_eq!(trainer.step(&Noise)?.step, 3);
    }
    Ok(())
}

/// Steps that overflow under a dynamic loss scale change nothing, and training goes on.
#[test]
fn steps_that_overflow_are_passed_over_on_a_gpu() -> Result<()> {
    let test = "steps_that_overflow_are_passed_over_on_a_gpu";
    let Some(gpu) = ferrotron_cuda_sim::gpu(test) else { return Ok(()) };
    let case = Case { dtype: DType::F16, ..Case::all()[0].clone() };
    let dynamic = |config: &mut TrainerConfig| {
        config.precision = PrecisionConfig { loss_scale: LossScale::DYNAMIC, ..config.precision };
    };
    let found = [Device::cpu(1)?, Device::cuda(&gpu)?].map(|device| -> Result<_> {
        let mut trainer = trainer(&case, &device, dynamic)?;
        let mut steps = Vec::new();
        for _ in 0..24 {
            let (before, taken) = (numbers(&trainer)?, trainer.optimizer().steps());
            trainer.step_async(&Noise)?;
            let report = trainer.drain_reports(&Noise)?.remove(0);
            assert_eq!(numbers(&trainer)? == before, report.skipped, "{report:?}");
            assert_eq!(trainer.optimizer().steps() - taken, u64::from(!report.skipped));
            steps.push((report.skipped, report.loss_scale));
        }
        Ok(steps)
    });
    let [cpu, gpu] = found.map(Result::unwrap);
    let skipped = cpu.iter().filter(|(skipped, _)| *skipped).count();
    assert!((3..22).contains(&skipped), "{cpu:?}");
    // Where the largest gradient is just below 65504, another order of additions may bring it beyond.
    let there = gpu.iter().filter(|(skipped, _)| *skipped).count();
    assert!(there.abs_diff(skipped) <= 1, "{cpu:?}, on the GPU {gpu:?}");
    Ok(())
}

/// Ranks that each have a GPU, between which NCCL moves tensors, do not wait for theirs either.
#[test]
fn ranks_with_nccl_wait_for_no_gpu() -> Result<()> {
    let test = "ranks_with_nccl_wait_for_no_gpu";
    let Some(gpu) = ferrotron_cuda_sim::stand_in(test) else { return Ok(()) };
    let [case, ..] = Case::all();
    let adafactor = OptimizerConfig::Adafactor(AdafactorConfig::default());
    for (case, tp, pp, sharding, optimizer) in [
        (&case, 2, 1, Sharding::None, adafactor),
        (&case, 1, 2, Sharding::None, OptimizerConfig::ADAMW),
        (&case, 1, 1, Sharding::Optimizer, OptimizerConfig::ADAMW),
        (&half(), 1, 1, Sharding::Optimizer, OptimizerConfig::ADAMW),
    ] {
        let what = format!("{}, tp {tp}, pp {pp}, {sharding:?}", case.name);
        let scaled = case.dtype == DType::F16;
        let loss_scale = if scaled { MOVING } else { LossScale::NONE };
        let ranks = run_threads(2, &WorldConfig::default(), |world| {
            let device = Device::cuda(&GpuConfig { ordinal: world.rank(), ..gpu.clone() })?;
            let mesh = Mesh::new(&world, ParallelDims::new(2, tp, 1, pp)?, SequenceParallel::Off)?;
            let (search, timeout) = (gpu.search.clone(), Duration::from_secs(60));
            let mesh = mesh.with_nccl(&device, &NcclConfig { search, timeout })?;
            let batch_size = BatchSize::new(BatchSizeConfig {
                micro_batch_size: 1,
                data_parallel_size: mesh.layout().size(ferrotron_nn::Axis::Data),
                global_batch_size: Some(BATCH),
                ..BatchSizeConfig::default()
            })?;
            let data_parallel = DataParallelConfig { sharding, ..DataParallelConfig::default() };
            let config = TrainerConfig {
                optimizer,
                parallel: ParallelConfig { data_parallel, ..ParallelConfig::default() },
                precision: PrecisionConfig { loss_scale, ..PrecisionConfig::default() },
                ..TrainerConfig::new(7, LrSchedule::constant(1e-2)?, batch_size)
            };
            let scope = Scope::new(&device, case.dtype, 1234);
            let mut trainer = Trainer::<Gpt>::on_mesh(&scope, &mesh, &case.model, config)?;
            trainer.step(&Noise)?;
            let before = ferrotron_cuda_sim::waits();
            (0..3).try_for_each(|_| trainer.step_async(&Noise))?;
            let after = ferrotron_cuda_sim::waits();
            let losses = trainer.drain_reports(&Noise)?.iter().map(|report| report.loss).collect();
            Ok::<(_, _, Vec<f64>), Error>((before, after, losses))
        });
        let ranks = ranks.into_iter().collect::<Result<Vec<_>>>()?;
        for (rank, (before, after, losses)) in ranks.iter().enumerate() {
            assert_eq!(before, after, "{what}, rank {rank}");
            assert_eq!(*losses, ranks[0].2, "{what}, rank {rank}");
            assert_eq!(losses.len(), 3);
        }
    }
    Ok(())
}
