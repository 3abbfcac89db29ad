//! Every schedule and every sharding gives what one rank gives.

use ferrotron_nn::Sharding;
use ferrotron_parallel::data_parallel::DataParallelConfig;
use ferrotron_parallel::pipeline::{PipelineConfig, ScheduleKind, unsupported_reason};

use crate::harness::{Plan, assert_bitwise, assert_close, serial, train};
use crate::toy::{Shape, Tied};

#[test]
fn every_schedule_trains_as_one_rank() {
    let mut layouts = 0;
    for stages in 1..=4 {
        for microbatches in [1, 2, 3, 4, 8, stages + 5] {
            let shape = Shape { blocks: 12, ..Shape::default() };
            let plan = Plan { shape, stages, microbatches, ..Plan::default() };
            let want = serial(&plan).unwrap();
            for kind in ScheduleKind::FLUSHED {
                for chunks in 1..=3 {
                    let plan = Plan { kind, chunks, ..plan };
                    let schedule = PipelineConfig { kind, stages, microbatches, chunks };
                    if unsupported_reason(&schedule).is_some() {
                        continue;
                    }
                    let got = train(&plan);
                    assert_close(&plan, &got, &want);
                    // Each stage adds up its micro-batches in the order of the serial run. Only the table
                    // is a sum of two ends.
                    assert_bitwise(
                        &plan,
                        "gradient",
                        &got.gradients,
                        &want.gradients,
                        &["table.weight"],
                    );
                    layouts += 1;
                }
            }
        }
    }
    // Interleaved where the microbatches are a multiple of the stages.
    assert_eq!(layouts, 96 + 12);
}

#[test]
fn every_sharding_trains_as_one_rank() {
    for data in 1..=4 {
        for microbatches in [1, 2, 3] {
            let plan = Plan { data, microbatches, ..Plan::default() };
            let want = serial(&plan).unwrap();
            for sharding in Sharding::ALL {
                for bucket_numel in [Some(1), Some(10), Some(45), None] {
                    let config = DataParallelConfig {
                        sharding,
                        bucket_numel,
                        ..DataParallelConfig::default()
                    };
                    let plan = Plan { config, ..plan };
                    assert_close(&plan, &train(&plan), &want);
                }
            }
        }
    }
}

/// One stage can run every schedule: several micro-batches in flight, and weight gradients that wait.
#[test]
fn every_schedule_goes_with_every_sharding_on_one_stage() {
    for kind in [ScheduleKind::Naive, ScheduleKind::GPipe, ScheduleKind::ZbH1] {
        let plan = Plan { kind, data: 2, microbatches: 3, ..Plan::default() };
        let want = serial(&plan).unwrap();
        for sharding in Sharding::ALL {
            for bucket_numel in [Some(30), None] {
                let config =
                    DataParallelConfig { sharding, bucket_numel, ..DataParallelConfig::default() };
                let plan = Plan { config, ..plan };
                assert_close(&plan, &train(&plan), &want);
            }
        }
    }
}

#[test]
fn pipelines_go_with_data_parallel_ranks() {
    for (stages, data) in [(2, 2), (2, 3), (3, 2), (4, 2)] {
        let plan = Plan { stages, data, microbatches: stages * 2, ..Plan::default() };
        let want = serial(&plan).unwrap();
        for (kind, chunks) in [
            (ScheduleKind::OneFOneB, 1),
            (ScheduleKind::ZbH1, 1),
            (ScheduleKind::GPipe, 1),
            (ScheduleKind::Interleaved, 2),
        ] {
            for sharding in [Sharding::None, Sharding::Optimizer] {
                for bucket_numel in [Some(30), None] {
                    let config = DataParallelConfig {
                        sharding,
                        bucket_numel,
                        ..DataParallelConfig::default()
                    };
                    let plan = Plan { kind, chunks, config, ..plan };
                    assert_close(&plan, &train(&plan), &want);
                }
            }
        }
    }
}

/// Sums of one micro-batch are made in the same order in every sharding; without clipping nothing else depends on
/// the owners.
#[test]
fn shardings_agree_bitwise() {
    for tied in [Tied::Ends, Tied::Here, Tied::No] {
        for data in 2..=4 {
            let shape = Shape { tied, ..Shape::default() };
            let config =
                DataParallelConfig { bucket_numel: Some(30), ..DataParallelConfig::default() };
            let plan = Plan { shape, data, config, max_norm: 0.0, ..Plan::default() };
            let want = train(&plan);
            for sharding in Sharding::ALL {
                let plan = Plan { config: DataParallelConfig { sharding, ..config }, ..plan };
                let got = train(&plan);
                assert_bitwise(&plan, "gradient", &got.gradients, &want.gradients, &[]);
                assert_bitwise(&plan, "weight", &got.weights, &want.weights, &[]);
                assert_eq!(got.losses, want.losses, "{plan:?}");
            }
        }
    }
}
