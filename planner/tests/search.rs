//! The search for layouts: the result of simulating every one of them.

use ferrotron_models::batch_size::{BatchSize, BatchSizeConfig};
use ferrotron_models::gpt::{Gpt, GptConfig, Recompute, SavedActivations};
use ferrotron_models::memory::{DocumentResets, MemoryEstimator, PlannedDevice};
use ferrotron_models::support::{ParallelismCheck, check};
use ferrotron_models::trainer::{ParallelConfig, TrainerConfig};
use ferrotron_nn::Sharding;
use ferrotron_nn::schedule::LrSchedule;
use ferrotron_parallel::data_parallel::DataParallelConfig;
use ferrotron_parallel::mesh::ParallelDims;
use ferrotron_parallel::pipeline::ScheduleKind;
use ferrotron_parallel::tensor_parallel::SequenceParallel;
use ferrotron_planner::search::EXHAUSTIVE;
use ferrotron_planner::{Cluster, Layout, Offload, Recomputation, Space, enough, predict, search};
use ferrotron_tensor::{DType, MemoryKind, Result};

const SEQ_LENGTH: usize = 128;

fn run(layout: &Layout, layers: usize) -> Result<MemoryEstimator<Gpt>> {
    let model = GptConfig::gpt2(512, layers, 512, 4, SEQ_LENGTH);
    let sharding = Sharding::ALL[usize::from(layout.zero_stage)];
    let batch_size = BatchSize::new(BatchSizeConfig {
        micro_batch_size: layout.micro_batch,
        data_parallel_size: layout.data(),
        global_batch_size: Some(layout.global_batch),
        rampup: None,
    })?;
    let parallel = ParallelConfig {
        drain_interval: 1,
        pipeline_schedule: layout.schedule,
        chunks: layout.chunks,
        optimizer_states: match layout.offload.has_states() {
            true => MemoryKind::Host,
            false => MemoryKind::Device,
        },
        saved_activations: SavedActivations {
            offloaded_layers: match layout.offload.has_activations() {
                true => layers / (layout.pipeline * layout.chunks),
                false => 0,
            },
            ..SavedActivations::default()
        },
        data_parallel: DataParallelConfig { sharding, ..DataParallelConfig::default() },
        recompute: match layout.recompute {
            Recomputation::None => Recompute::None,
            Recomputation::Selective => Recompute::SELECTIVE,
            Recomputation::Full => Recompute::FULL,
        },
    };
    let trainer = TrainerConfig::new(1, LrSchedule::constant(1e-4)?, batch_size);
    let run = MemoryEstimator::<Gpt> {
        layout: ParallelDims::new(layout.gpus, layout.tensor, layout.context, layout.pipeline)?,
        sequence_parallel: match layout.sequence_parallel {
            false => SequenceParallel::Off,
            true => SequenceParallel::On,
        },
        trainer: TrainerConfig { parallel, ..trainer },
        dtype: DType::BF16,
        seq_length: SEQ_LENGTH,
        documents: DocumentResets::default(),
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

/// Spaces of at most 2000 layouts: nodes of two sizes, one and several contexts, models of few and more blocks, with host
/// memory and without.
fn spaces() -> [Space; 3] {
    let space = Space {
        gpus: 4,
        gpus_per_node: 4,
        contexts: vec![1, 2],
        layers: 4,
        global_batch: 4,
        offloads: Offload::ALL.to_vec(),
    };
    [
        Space { contexts: vec![1, 2, 4], layers: 2, ..space.clone() },
        Space {
            gpus: 12,
            gpus_per_node: 2,
            contexts: vec![1],
            layers: 6,
            global_batch: 12,
            offloads: vec![Offload::None],
        },
        space,
    ]
}

/// Slow enough that kernels take longer than their launches, so that layouts differ. Host memory is near, so that layouts
/// with something there are among the fastest.
fn cluster(gpus_per_node: usize) -> Cluster {
    let mut cluster = Cluster::named("dgx-a100-80").unwrap();
    cluster.gpus_per_node = gpus_per_node;
    cluster.gpu.launch = 0.0;
    cluster.gpu.host = Some(4e11);
    cluster
}

#[test]
fn the_plan_is_that_of_simulating_every_layout() {
    for space in spaces() {
        compare_with_all(&space);
    }
}

fn compare_with_all(space: &Space) {
    let cluster = cluster(space.gpus_per_node);
    let run = |layout: &Layout| run(layout, space.layers);
    let mut all = Vec::new();
    for layout in space.layouts().unwrap() {
        if let Ok(run) = run(&layout) {
            let found = predict(&run, &cluster, false).unwrap();
            all.push((found.seconds(), layout, found.peak_bytes() as u64));
        }
    }
    assert!(all.len() > 60 && all.len() <= EXHAUSTIVE, "{space:?}: {}", all.len());
    assert!((0..4).all(|stage| all.iter().any(|found| found.1.zero_stage == stage)), "{space:?}");
    let some = |of: &dyn Fn(&Layout) -> bool| all.iter().any(|found| of(&found.1));
    assert!(some(&|layout| layout.schedule.splits_backward()), "{space:?}");
    assert!(some(&|layout| layout.tensor > 1 && !layout.sequence_parallel), "{space:?}");
    for offload in &space.offloads {
        assert!(some(&|layout| layout.offload == *offload), "{space:?}: {offload:?}");
    }
    all.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let mut bytes: Vec<u64> = all.iter().map(|found| found.2).collect();
    bytes.sort_unstable();
    for limit in [bytes[all.len() - 1], bytes[all.len() / 2], bytes[all.len() / 8], bytes[2]] {
        let plan = search(space, &cluster, (limit, 5), run, |_, _| ()).unwrap();
        assert_eq!((plan.layouts, plan.failed, plan.not_compared), (all.len(), 0, 0));
        let want: Vec<_> = all.iter().filter(|found| found.2 <= limit).take(5).collect();
        assert_eq!(plan.best.len(), want.len(), "{limit}");
        for (found, want) in plan.best.iter().zip(want) {
            let seconds = found.prediction.seconds();
            assert!((seconds / want.0 - 1.0).abs() < 1e-12, "{limit}: {found:?} {want:?}");
            assert_eq!(found.prediction.peak_bytes() as u64, want.2, "{limit}");
        }
        // Where everything fits, bounds of time leave layouts out. With two blocks there is no bound of one block.
        if limit == bytes[all.len() - 1] {
            let (simulated, all) = (plan.simulated, all.len());
            assert_eq!(plan.too_large, 0);
            assert!(space.layers <= 2 || simulated < all, "{simulated} of {all}");
        }
    }
    let plan = search(space, &cluster, (bytes[0] - 1, 5), run, |_, _| ()).unwrap();
    assert!(plan.best.is_empty());
    if space.layers > 2 {
        let more = enough(space, &cluster, bytes[0] - 1, run);
        let (layout, few) = more.expect("more GPUs are enough");
        assert!(layout.gpus > space.gpus && few < bytes[0], "{layout:?}");
        let found = predict(&run(&layout).unwrap(), &cluster, false).unwrap();
        assert_eq!(found.peak_bytes() as u64, few);
    }
    let smallest = plan.smallest.unwrap().1;
    // Only some layouts are looked at: too few without bounds of a block, or where many have the same bound.
    let some = space.layers <= 2 || space.offloads.len() > 1;
    assert!(smallest == bytes[0] || (some && smallest > bytes[0]), "{smallest} {}", bytes[0]);
}

/// In a large space host memory is left alone where enough layouts fit without it.
#[test]
fn host_memory_is_not_compared_without_need_in_a_large_space() {
    let space = Space {
        gpus: 8,
        gpus_per_node: 4,
        contexts: vec![1],
        layers: 4,
        global_batch: 32,
        offloads: Offload::ALL.to_vec(),
    };
    let run = |layout: &Layout| run(layout, space.layers);
    let plan = search(&space, &cluster(4), (u64::MAX, 5), run, |_, _| ()).unwrap();
    let without = plan.layouts / 4;
    assert!(plan.layouts > EXHAUSTIVE, "{}", plan.layouts);
    assert_eq!((plan.best.len(), plan.not_compared), (5, plan.layouts - without));
    assert!(plan.best.iter().all(|found| found.layout.offload == Offload::None));
}

#[test]
fn a_layout_whose_dry_step_fails_is_counted_and_named() {
    let [_, _, space] = spaces();
    // A batch of a micro-batch of the model's own: the dry steps of two samples in a micro-batch have too few positions.
    let broken = |layout: &Layout| {
        let run = run(layout, space.layers)?;
        let seq_length = if layout.micro_batch == 2 { 2 * SEQ_LENGTH } else { SEQ_LENGTH };
        Ok(MemoryEstimator::<Gpt> { seq_length, ..run })
    };
    let plan = search(&space, &cluster(4), (u64::MAX, 5), broken, |_, _| ()).unwrap();
    assert!(plan.failed > 0 && plan.best.len() == 5, "{plan:?}");
    let (layout, error) = plan.failure.unwrap();
    assert_eq!(layout.micro_batch, 2);
    assert!(!error.to_string().is_empty());
}

#[test]
fn dry_steps_that_fail_fit_on_no_number_of_gpus() {
    let [_, _, space] = spaces();
    let space = Space { contexts: vec![1], ..space };
    let good = |layout: &Layout| run(layout, space.layers);
    assert!(enough(&space, &cluster(4), u64::MAX, good).is_some());
    let broken = |layout: &Layout| {
        let run = run(layout, space.layers)?;
        Ok(MemoryEstimator::<Gpt> { seq_length: 2 * SEQ_LENGTH, ..run })
    };
    assert!(enough(&space, &cluster(4), u64::MAX, broken).is_none());
}

#[test]
fn a_pipeline_changes_no_time_of_a_gpus_kernel() {
    let layout = |pipeline: usize| Layout {
        gpus: 2 * pipeline,
        tensor: 2,
        context: 1,
        pipeline,
        schedule: ScheduleKind::OneFOneB,
        chunks: 1,
        micro_batch: 1,
        global_batch: 4,
        recompute: Recomputation::None,
        zero_stage: 0,
        sequence_parallel: false,
        offload: Offload::None,
    };
    // Beside calls products are slower, and stages have other calls.
    let mut cluster = cluster(4);
    cluster.gpu.collective_multiprocessors = 0;
    // The first product of the MLP, half of whose 2048 columns are on a rank.
    let seconds = |pipeline: usize| {
        let found = predict(&run(&layout(pipeline), 4).unwrap(), &cluster, false).unwrap();
        let product = found.kernels.iter().find(|kernel| kernel.name.ends_with(" x 1024 x 512"));
        let product = product.unwrap_or_else(|| panic!("{:?}", found.kernels));
        product.seconds / product.calls
    };
    let (whole, stage) = (seconds(1), seconds(2));
    assert!((stage / whole - 1.0).abs() < 1e-12, "{stage} {whole}");
}

#[test]
fn what_does_not_divide_is_refused() {
    let [_, _, space] = spaces();
    let error = Space { gpus: 7, ..space }.layouts().unwrap_err().to_string();
    assert!(error.contains("--global-batch-size: 4 is no multiple"), "{error}");
}
