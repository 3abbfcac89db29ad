//! An error on one rank in the middle of a step ends all.

use ferrotron_nn::Sharding;
use ferrotron_parallel::collective::{WorldConfig, run_threads};
use ferrotron_parallel::data_parallel::DataParallelConfig;
use ferrotron_parallel::pipeline::ScheduleKind;
use ferrotron_tensor::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use crate::harness::{Plan, Rank};
use crate::toy::Way;

/// Every rank in turn fails at the `at`-th block that it comes to in a direction, in the second step.
fn fail(plan: &Plan, way: Way, at: usize) {
    let size = plan.stages * plan.data;
    for culprit in 0..size {
        let start = Instant::now();
        let results =
            run_threads(size, &WorldConfig { timeout: Duration::from_secs(20) }, |world| {
                let mut rank = Rank::new(&world, plan)?;
                rank.step(0)?;
                if world.rank() == culprit {
                    let count = AtomicUsize::new(0);
                    rank.parts[0].probe = Some(Arc::new(move |found, _| {
                        if found == way && count.fetch_add(1, SeqCst) == at {
                            return Err(Error::value("test", "on purpose"));
                        }
                        Ok(())
                    }));
                }
                rank.step(1)?;
                rank.step(2).map(drop)
            });
        for (rank, result) in results.into_iter().enumerate() {
            let error = result.expect_err("every rank fails").to_string();
            assert!(error.contains("on purpose"), "{plan:?}: rank {rank}: {error}");
            assert!(
                rank == culprit || error.contains(&format!("rank {culprit} ")),
                "{plan:?}: rank {rank}: {error}"
            );
        }
        assert!(start.elapsed() < Duration::from_secs(30), "{plan:?}: {:?}", start.elapsed());
    }
}

#[test]
fn an_error_in_a_pipeline_ends_all_and_names_the_rank() {
    for kind in [ScheduleKind::OneFOneB, ScheduleKind::ZbH1, ScheduleKind::GPipe] {
        let plan = Plan { stages: 2, data: 2, microbatches: 4, kind, ..Plan::default() };
        for way in [Way::Forward, Way::Backward] {
            fail(&plan, way, 9);
        }
    }
}

#[test]
fn an_error_with_sharding_ends_all_and_names_the_rank() {
    for sharding in Sharding::ALL {
        let bucket_numel = (sharding != Sharding::None).then_some(20);
        let config = DataParallelConfig { sharding, bucket_numel, ..DataParallelConfig::default() };
        let plan = Plan { data: 3, microbatches: 2, config, ..Plan::default() };
        for way in [Way::Forward, Way::Backward] {
            fail(&plan, way, 11);
        }
    }
}
