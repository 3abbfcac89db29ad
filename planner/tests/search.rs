//! The search for layouts: the result of simulating every one of them.

use ferrotron_models::batch_size::{BatchSize, BatchSizeConfig};
use ferrotron_models::gpt::{Gpt, GptConfig, Recompute};
use ferrotron_models::memory::{MemoryEstimator, PlannedDevice};
use ferrotron_models::support::{ParallelismCheck, check};
use ferrotron_models::trainer::{ParallelConfig, TrainerConfig};
use ferrotron_nn::Sharding;
use ferrotron_nn::schedule::LrSchedule;
use ferrotron_parallel::data_parallel::DataParallelConfig;
use ferrotron_parallel::mesh::ParallelDims;
use ferrotron_parallel::pipeline::ScheduleKind;
use ferrotron_parallel::tensor_parallel::SequenceParallel;
use ferrotron_planner::{Cluster, Layout, Recomputation, Space, predict, search};
use ferrotron_tensor::{DType, Result};

const SEQ_LENGTH: usize = 128;
const LAYERS: usize = 4;

fn run(layout: &Layout) -> Result<MemoryEstimator<Gpt>> {
    let model = GptConfig::gpt2(512, LAYERS, 512, 4, SEQ_LENGTH);
    let sharding = if layout.zero_stage == 0 { Sharding::None } else { Sharding::Optimizer };
    let batch_size = BatchSize::new(BatchSizeConfig {
        micro_batch_size: layout.micro_batch,
        data_parallel_size: layout.data(),
        global_batch_size: Some(layout.global_batch),
        rampup: None,
    })?;
    let parallel = ParallelConfig {
        pipeline_schedule: match layout.chunks {
            1 => ScheduleKind::OneFOneB,
            _ => ScheduleKind::Interleaved,
        },
        chunks: layout.chunks,
        data_parallel: DataParallelConfig { sharding, ..DataParallelConfig::default() },
        recompute: match layout.recompute {
            Recomputation::None => Recompute::None,
            Recomputation::Selective => Recompute::SELECTIVE,
            Recomputation::Full => Recompute::FULL,
        },
        ..ParallelConfig::default()
    };
    let trainer = TrainerConfig::new(1, LrSchedule::constant(1e-4)?, batch_size);
    let run = MemoryEstimator::<Gpt> {
        layout: ParallelDims::new(layout.gpus, layout.tensor, layout.context, layout.pipeline)?,
        sequence_parallel: match layout.tensor {
            1 => SequenceParallel::Off,
            _ => SequenceParallel::On,
        },
        trainer: TrainerConfig { parallel, ..trainer },
        dtype: DType::BF16,
        seq_length: SEQ_LENGTH,
        device: PlannedDevice::Cpu { threads: 1 },
        model,
    };
    check(&ParallelismCheck {
        model: (&run.model).into(),
        layout: run.layout,
        sequence_parallel: run.sequence_parallel,
        parallel: &run.trainer.parallel,
        seq_length: SEQ_LENGTH,
        microbatches: layout.microbatches(),
    })?;
    Ok(run)
}

fn space(gpus: usize) -> Space {
    Space { gpus, gpus_per_node: 4, context: 1, layers: LAYERS, global_batch: 8 }
}

/// Slow enough that kernels take longer than their launches, so that layouts differ.
fn cluster() -> Cluster {
    let mut cluster = Cluster::named("dgx-a100-80").unwrap();
    cluster.gpus_per_node = 4;
    cluster.gpu.launch = 0.0;
    cluster
}

#[test]
fn the_plan_is_that_of_simulating_every_layout() {
    let cluster = cluster();
    let mut all = Vec::new();
    for layout in space(8).layouts().unwrap() {
        if let Ok(run) = run(&layout) {
            let found = predict(&run, &cluster, false).unwrap();
            all.push((found.seconds(), layout, found.peak_bytes() as u64));
        }
    }
    assert!(all.len() > 80 && all.len() <= 200, "{}", all.len());
    all.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let mut bytes: Vec<u64> = all.iter().map(|found| found.2).collect();
    bytes.sort_unstable();
    for limit in [bytes[all.len() - 1], bytes[all.len() / 2], bytes[all.len() / 8], bytes[2]] {
        let plan = search(&space(8), &cluster, (limit, 5), run, |_, _| ()).unwrap();
        assert_eq!(plan.layouts, all.len());
        let want: Vec<_> = all.iter().filter(|found| found.2 <= limit).take(5).collect();
        assert_eq!(plan.best.len(), want.len(), "{limit}");
        for (found, want) in plan.best.iter().zip(want) {
            let seconds = found.prediction.seconds();
            assert!((seconds / want.0 - 1.0).abs() < 1e-12, "{limit}: {found:?} {want:?}");
            assert_eq!(found.prediction.peak_bytes() as u64, want.2, "{limit}");
        }
        assert!(plan.simulated < all.len() / 2, "{} of {}", plan.simulated, all.len());
    }
    let plan = search(&space(8), &cluster, (bytes[0] - 1, 5), run, |_, _| ()).unwrap();
    assert!(plan.best.is_empty());
    assert_eq!(plan.smallest.unwrap().1, bytes[0]);
}

#[test]
fn what_does_not_divide_is_refused() {
    let space = Space { gpus: 7, ..space(7) };
    let error = space.layouts().unwrap_err().to_string();
    assert!(error.contains("--global-batch-size: 8 is no multiple"), "{error}");
}
