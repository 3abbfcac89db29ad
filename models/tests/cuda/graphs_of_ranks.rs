//! Ranks between which NCCL moves tensors capture their steps with its calls, and replay them together.

use super::graphs::Masked;
use super::loss_scale::{MOVING, half};
use super::numbers::numbers;
use super::*;
use ferrotron_cuda::gpu::GpuConfig;
use ferrotron_models::trainer::{ExecutionMode, PrecisionConfig};
use ferrotron_nn::{Axis, LossScale};
use ferrotron_parallel::collective::{NcclConfig, World};
use ferrotron_tensor::Error;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);

/// The layout of two ranks.
#[derive(Debug, Clone, Copy)]
struct Layout {
    tensor: usize,
    context: usize,
    sequence: SequenceParallel,
    sharding: Sharding,
}

const PLAIN: Layout =
    Layout { tensor: 1, context: 1, sequence: SequenceParallel::Off, sharding: Sharding::None };

/// A rank's GPU, and the groups that NCCL carries out on it.
fn mesh(
    world: &World,
    gpu: &GpuConfig,
    layout: Layout,
    timeout: Duration,
) -> Result<(Device, Mesh)> {
    let device = Device::cuda(&GpuConfig { ordinal: world.rank(), ..gpu.clone() })?;
    let mesh =
        Mesh::new(world, ParallelDims::new(2, layout.tensor, layout.context, 1)?, layout.sequence)?;
    let mesh = mesh.with_nccl(&device, &NcclConfig { search: gpu.search.clone(), timeout })?;
    Ok((device, mesh))
}

fn trainer(
    case: &Case,
    (device, mesh): (&Device, &Mesh),
    layout: Layout,
    execution: ExecutionMode,
) -> Result<Trainer<Gpt>> {
    let batch_size = BatchSize::new(BatchSizeConfig {
        micro_batch_size: 1,
        data_parallel_size: mesh.layout().size(Axis::Data),
        global_batch_size: Some(BATCH),
        ..BatchSizeConfig::default()
    })?;
    let data_parallel =
        DataParallelConfig { sharding: layout.sharding, ..DataParallelConfig::default() };
    let loss_scale = if case.dtype == DType::F16 { MOVING } else { LossScale::NONE };
    let config = TrainerConfig {
        parallel: ParallelConfig { data_parallel, ..ParallelConfig::default() },
        precision: PrecisionConfig { loss_scale, ..PrecisionConfig::default() },
        execution,
        ..TrainerConfig::new(7, LrSchedule::constant(1e-2)?, batch_size)
    };
    Trainer::<Gpt>::on_mesh(&Scope::new(device, case.dtype, 1234), mesh, &case.model, config)
}

/// The losses and weights of a rank, and the kernels launched in its last step.
type Found = (Vec<(u64, f64, f64)>, Vec<f64>, u64);

fn train(
    gpu: &GpuConfig,
    case: &Case,
    layout: Layout,
    execution: ExecutionMode,
    (steps, samples): (u64, &(dyn Fn(usize) -> Box<dyn Samples> + Sync)),
) -> Result<Vec<Found>> {
    let ranks = run_threads(2, &WorldConfig::default(), |world| {
        let (device, mesh) = mesh(&world, gpu, layout, TIMEOUT)?;
        let mut trainer = trainer(case, (&device, &mesh), layout, execution)?;
        let samples = &*samples(world.rank());
        let launches = || device.gpu().map_or(0, |gpu| gpu.launches() + gpu.product_launches());
        let (mut told, mut launched) = (Vec::new(), 0);
        for step in 0..steps {
            let before = launches();
            trainer.step_async(samples)?;
            launched = launches() - before;
            if step % 3 == 2 || step + 1 == steps {
                told.extend(trainer.drain_reports(samples)?.iter().map(|report| {
                    let norm = if report.skipped { -1.0 } else { report.grad_norm };
                    (report.step, report.loss, norm)
                }));
            }
        }
        Ok::<Found, Error>((told, numbers(&trainer)?, launched))
    });
    ranks.into_iter().collect()
}

#[test]
fn ranks_replay_their_steps_together() -> Result<()> {
    let Some(gpu) = ferrotron_cuda_sim::stand_in("ranks_replay_their_steps_together") else {
        return Ok(());
    };
    let [gpt2, llama, bf16] = Case::all();
    let sharded = |sharding| Layout { sharding, ..PLAIN };
    let split = |sequence| Layout { tensor: 2, sequence, ..PLAIN };
    type Make<'a> = &'a (dyn Fn(usize) -> Box<dyn Samples> + Sync);
    let noise: Make = &|_| Box::new(Noise);
    let since = 4 * BATCH as u64;
    let masked: Make = &|rank| match rank {
        0 => Box::new(Noise),
        _ => Box::new(Masked { since }),
    };
    for (case, layout, steps, samples) in [
        (&gpt2, PLAIN, 6, noise),
        (&bf16, sharded(Sharding::Optimizer), 6, noise),
        (&llama, sharded(Sharding::Gradients), 6, noise),
        (&llama, sharded(Sharding::Weights), 6, noise),
        (&gpt2, split(SequenceParallel::Off), 6, noise),
        (&bf16, split(SequenceParallel::On), 6, noise),
        (&llama, Layout { context: 2, ..PLAIN }, 6, noise),
        (&half(), sharded(Sharding::Optimizer), 8, noise),
        // The second rank's samples have other numbers of tokens from the fifth step on: both ranks begin anew.
        (&half(), PLAIN, 8, masked),
    ] {
        let what = format!("{}, {layout:?}", case.name);
        let run = |execution| train(&gpu, case, layout, execution, (steps, samples));
        let (want, got) = (run(ExecutionMode::Eager)?, run(ExecutionMode::CudaGraph)?);
        for (rank, (want, got)) in want.iter().zip(&got).enumerate() {
            assert_eq!(got.0, want.0, "{what}, rank {rank}");
            assert!(got.1 == want.1, "{what}, rank {rank}: other weights");
            // The optimizer's numbers and the step of random numbers, beside the graph.
            assert!(got.2 <= 2, "{what}, rank {rank}: {} launches, {} without", got.2, want.2);
            assert!(want.2 > 50, "{what}, rank {rank}: {}", want.2);
        }
    }
    Ok(())
}

/// Without calls on the host, a rank that leaves is missed in a replay.
#[test]
fn a_replay_that_a_rank_does_not_join_is_an_error() -> Result<()> {
    let test = "a_replay_that_a_rank_does_not_join_is_an_error";
    let Some(gpu) = ferrotron_cuda_sim::stand_in(test) else { return Ok(()) };
    let [case, ..] = Case::all();
    let layout = Layout { tensor: 2, ..PLAIN };
    let ranks = run_threads(2, &WorldConfig::default(), |world| {
        let (device, mesh) = mesh(&world, &gpu, layout, Duration::from_secs(2))?;
        let mut trainer = trainer(&case, (&device, &mesh), layout, ExecutionMode::CudaGraph)?;
        (0..4).try_for_each(|_| trainer.step_async(&Noise))?;
        trainer.drain_reports(&Noise)?;
        if world.rank() == 1 {
            return Ok::<_, Error>(None);
        }
        let steps = (0..3).try_for_each(|_| trainer.step_async(&Noise));
        Ok(steps.and_then(|()| trainer.drain_reports(&Noise)).err().map(|told| told.to_string()))
    });
    let [first, second] = ranks.try_into().expect("two ranks");
    assert_eq!(second?, None);
    let told = first?.expect("a replay without the other rank");
    let late = "of group world (a replay of captured calls) did not end within 2s";
    assert!(told.contains(late), "{told}");
    Ok(())
}

#[test]
fn ranks_without_nccl_and_pipelines_capture_nothing() -> Result<()> {
    let test = "ranks_without_nccl_and_pipelines_capture_nothing";
    let Some(gpu) = ferrotron_cuda_sim::stand_in(test) else { return Ok(()) };
    let [case, ..] = Case::all();
    let ranks = run_threads(2, &WorldConfig::default(), |world| {
        let told = |pipeline: usize| {
            let dims = ParallelDims::new(2, 1, 1, pipeline)?;
            let mesh = Mesh::new(&world, dims, SequenceParallel::Off)?;
            let device = Device::cuda(&GpuConfig { ordinal: world.rank(), ..gpu.clone() })?;
            let made = trainer(&case, (&device, &mesh), PLAIN, ExecutionMode::CudaGraph);
            Ok::<_, Error>(made.err().expect("it is refused").to_string())
        };
        Ok::<_, Error>([told(1)?, told(2)?])
    });
    for told in ranks {
        let [host, pipeline] = told?;
        assert!(host.starts_with("enable-cuda-graph: captures what NCCL sends"), "{host}");
        let refused = "enable-cuda-graph: does not go with a pipeline of 2 stages";
        assert!(pipeline.starts_with(refused), "{pipeline}");
    }
    Ok(())
}
