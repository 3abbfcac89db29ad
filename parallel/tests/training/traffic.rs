//! Bytes that are sent, and when.

use ferrotron_nn::{AdafactorConfig, Axis, Bias, OptimizerConfig, Sharding};
use ferrotron_parallel::data_parallel::{DataParallelConfig, ExpectedTraffic};
use ferrotron_parallel::pipeline::ScheduleKind;
use ferrotron_tensor::{Error, Result};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::harness::{Plan, Rank, assert_close, ranks, serial, train};
use crate::toy::{Recompute, Shape, Tied, Way};

/// Bytes sent so far for gradients and weights; the scalar of the norm is an all-reduce.
fn sent(rank: &Rank) -> ExpectedTraffic {
    let batch = rank.mesh.dp_cp().traffic();
    let DataParallelConfig { sharding, optimizer, .. } = rank.plan.config;
    let ops = match (sharding, optimizer.updates_whole_tensors()) {
        (Sharding::None, _) => vec!["all_reduce"],
        (_, false) => vec!["reduce_scatter", "all_gather"],
        (_, true) => vec!["reduce", "broadcast"],
    };
    ExpectedTraffic {
        batch: ops.iter().map(|op| batch.calls_and_bytes(op).1).sum(),
        holders: rank.mesh.stages().embedding_group.traffic().bytes(),
    }
}

/// Bytes of all ranks in three steps, after asserting that each sent what was expected of it.
fn counted(plan: &Plan) -> u64 {
    let found = ranks(plan, |mut rank| {
        let steps = rank.plan.steps;
        for step in 0..steps {
            rank.step(step)?;
        }
        rank.parallel.wait_for_weights()?; // whole calls are counted
        let wanted = rank.expected_traffic(steps)?;
        if rank.plan.stages == 1 {
            assert_eq!(rank.parallel.expected_traffic(rank.plan.microbatches, steps), wanted);
        }
        Ok((sent(&rank), wanted))
    });
    for (rank, (sent, wanted)) in found.iter().enumerate() {
        assert_eq!(sent, wanted, "{plan:?}: rank {rank}");
    }
    found.iter().map(|(sent, _)| sent.batch).sum()
}

/// Elements of all flat buffers: those of the parameters, and fewer than one for each rank in each bucket.
fn padded_elements(plan: &Plan, elements: usize) -> usize {
    let found = ranks(plan, |rank| {
        let groups = rank.parallel.buffers().groups();
        assert!(groups.iter().all(|group| group.padded_numel() - group.numel() < plan.data));
        assert_eq!(groups.iter().map(|group| group.numel()).sum::<usize>(), elements);
        Ok(groups.iter().map(|group| group.padded_numel()).sum())
    });
    found[0]
}

/// (2, 2, m + 1) Psi (N - 1) over all N ranks.
#[test]
fn bytes_are_those_of_the_formula() {
    for data in 1..=4 {
        for microbatches in [1, 3] {
            for bucket_numel in [Some(1), Some(30), None] {
                let adafactor = OptimizerConfig::Adafactor(AdafactorConfig::default());
                let kinds = Sharding::ALL[..3].iter().map(|kind| (kind, OptimizerConfig::ADAMW));
                let whole = Sharding::ALL[1..3].iter().map(|kind| (kind, adafactor));
                for (sharding, optimizer) in kinds.chain(whole) {
                    let config = DataParallelConfig {
                        sharding: *sharding,
                        optimizer,
                        bucket_numel,
                        ..DataParallelConfig::default()
                    };
                    let plan = Plan { data, microbatches, config, ..Plan::default() };
                    let psi = padded_elements(&plan, 7 * 4 + 8 * (4 + 4 + 16 + 4) + 4);
                    let times = match sharding {
                        Sharding::Gradients => microbatches + 1,
                        _ => 2,
                    };
                    let want = 8 * psi * times * (data - 1) * plan.steps;
                    assert_eq!(counted(&plan), want as u64, "{plan:?}");
                }
            }
        }
    }
}

/// 3 m Psi (N - 1) less what stays at the turns, for lines of known buckets.
#[test]
fn sharded_weights_send_three_times_less_the_turns() {
    let (data, blocks) = (3, 4);
    // Forward order: table, linears, head; and norms. One parameter a bucket, or two.
    let matrices = [28, 16, 16, 16, 16, 28];
    let norms = [4, 4, 4, 4, 4];
    let lines = [
        (1, vec![matrices.to_vec(), norms.to_vec()]),
        // From the end: (head, linear 3), ..
        (30, vec![vec![28 + 16, 16 + 16, 16 + 28], vec![20]]),
        (usize::MAX, vec![vec![120], vec![20]]),
    ];
    for microbatches in 1..=3 {
        for (bucket_numel, lines) in &lines {
            let shape = Shape { blocks, bias: Bias::No, tied: Tied::No, ..Shape::default() };
            let config = DataParallelConfig {
                sharding: Sharding::Weights,
                bucket_numel: Some(*bucket_numel),
                ..DataParallelConfig::default()
            };
            let plan = Plan { shape, data, microbatches, config, ..Plan::default() };
            let padded = |line: &Vec<usize>| -> Vec<usize> {
                line.iter().map(|bucket| bucket.next_multiple_of(data)).collect()
            };
            let lines: Vec<Vec<usize>> = lines.iter().map(padded).collect();
            let mut elements = lines.concat().iter().sum::<usize>() * microbatches;
            for line in &lines {
                let n = line.len();
                let (first, last) = match n {
                    1 => (line[0], line[0]),
                    _ => (line[0] + line[1], line[n - 2] + line[n - 1]),
                };
                let whole: usize = line.iter().sum();
                elements +=
                    2 * microbatches * whole - microbatches * last - (microbatches - 1) * first;
            }
            let want = 8 * elements * (data - 1) * plan.steps;
            assert_eq!(counted(&plan), want as u64, "{plan:?}");
        }
    }
}

/// A block that runs forward again reads its weights again.
#[test]
fn recomputed_weights_are_counted() {
    for bucket_numel in [Some(1), Some(5), Some(20), Some(30), Some(70), None] {
        for (microbatches, bias) in [(1, Bias::No), (2, Bias::Yes), (3, Bias::No)] {
            for tied in [Tied::Here, Tied::No] {
                let bytes = |recompute| {
                    let shape = Shape { bias, tied, recompute, ..Shape::default() };
                    let config = DataParallelConfig {
                        sharding: Sharding::Weights,
                        bucket_numel,
                        ..DataParallelConfig::default()
                    };
                    let plan = Plan { shape, data: 2, microbatches, config, ..Plan::default() };
                    assert_close(&plan, &train(&plan), &serial(&plan).unwrap());
                    counted(&plan)
                };
                let (kept, again) = (bytes(Recompute::None), bytes(Recompute::Blocks));
                // Norm and biases of a block in three buckets: it is walked along once more.
                let longer = bucket_numel == Some(1) && matches!(bias, Bias::Yes);
                let at = format!("{bucket_numel:?} {bias:?}: {again} bytes, {kept} without");
                assert!(again >= kept && (!longer || again > kept), "{at}");
            }
        }
    }
}

/// A matrix that is used at both ends of the model costs extra gathers, which are known too.
#[test]
fn tied_weights_are_counted() {
    for bucket_numel in [Some(1), Some(30), Some(70), None] {
        for microbatches in 1..=3 {
            let mut bytes = Vec::new();
            for tied in [Tied::Here, Tied::Ends] {
                let shape = Shape { bias: Bias::No, tied, ..Shape::default() };
                let config = DataParallelConfig {
                    sharding: Sharding::Weights,
                    bucket_numel,
                    ..DataParallelConfig::default()
                };
                let plan = Plan { shape, data: 2, microbatches, config, ..Plan::default() };
                bytes.push(counted(&plan));
            }
            // On a line of its own it is gathered once a step.
            assert!(bucket_numel != Some(1) || bytes[0] > bytes[1], "{bytes:?}");
        }
    }
    for (stages, sharding) in [(2, Sharding::None), (3, Sharding::Optimizer)] {
        let config = DataParallelConfig { sharding, ..DataParallelConfig::default() };
        let plan = Plan { stages, data: 2, microbatches: 3, config, ..Plan::default() };
        counted(&plan);
        let holders = ranks(&plan, |rank| Ok(rank.parallel.expected_traffic(3, 1).holders));
        let table = 8 * 28; // half of it is sent to be reduced, half to be gathered
        let last = stages - 1;
        for (rank, found) in holders.into_iter().enumerate() {
            let stage = rank / 2;
            assert_eq!(found, if stage == 0 || stage == last { table } else { 0 }, "rank {rank}");
        }
    }
}

/// In a pipeline each micro-batch's gradients are reduced when its backward has passed a chunk, while others are between
/// forward and backward. In f64 the training is that of one process, and the bytes are known.
#[test]
fn sharded_gradients_and_weights_go_with_pipelines() {
    let kinds = [
        (ScheduleKind::Naive, 2, 1, 2),
        (ScheduleKind::GPipe, 2, 1, 3),
        (ScheduleKind::OneFOneB, 2, 1, 3),
        (ScheduleKind::OneFOneB, 3, 1, 4),
        (ScheduleKind::Interleaved, 2, 2, 4),
        (ScheduleKind::Interleaved, 2, 4, 2),
    ];
    for (kind, stages, chunks, microbatches) in kinds {
        for (sharding, recompute) in [
            (Sharding::Gradients, Recompute::None),
            (Sharding::Weights, Recompute::None),
            (Sharding::Weights, Recompute::Blocks),
        ] {
            for bucket_numel in [Some(1), Some(30), None] {
                let config =
                    DataParallelConfig { sharding, bucket_numel, ..DataParallelConfig::default() };
                let shape = Shape { recompute, bias: Bias::No, ..Shape::default() };
                let plan = Plan {
                    shape,
                    data: 2,
                    stages,
                    kind,
                    chunks,
                    microbatches,
                    config,
                    ..Plan::default()
                };
                assert_close(&plan, &train(&plan), &serial(&plan).unwrap());
                counted(&plan);
            }
        }
    }
}

/// A bias is not read in backward, but passed by.
#[test]
fn biases_alone_are_counted() {
    for bucket_numel in [1, 5, 30] {
        let config = DataParallelConfig {
            sharding: Sharding::Weights,
            bucket_numel: Some(bucket_numel),
            ..DataParallelConfig::default()
        };
        counted(&Plan { data: 2, microbatches: 2, config, ..Plan::default() });
    }
}

/// Waits until an operation of the batch was carried out `calls` times.
fn wait_for(
    rank: &Rank,
    op: &'static str,
    calls: u64,
) -> Arc<dyn Fn() -> Result<()> + Send + Sync> {
    let batch = rank.mesh.dp_cp().clone();
    Arc::new(move || {
        let start = Instant::now();
        while batch.traffic().calls_and_bytes(op).0 < calls {
            if start.elapsed() > Duration::from_secs(40) {
                let found = batch.traffic().calls_and_bytes(op).0;
                let message = format!("{found} calls of {op} where {calls} should be done");
                return Err(Error::communication("overlap", message));
            }
            std::thread::yield_now();
        }
        Ok(())
    })
}

#[test]
fn gradients_are_reduced_while_backward_goes_on() {
    for sharding in Sharding::ALL {
        let config = DataParallelConfig {
            sharding,
            bucket_numel: Some(20),
            ..DataParallelConfig::default()
        };
        let plan = Plan { data: 2, config, ..Plan::default() };
        ranks(&plan, |mut rank| {
            let op = if sharding == Sharding::None { "all_reduce" } else { "reduce_scatter" };
            // The linears of blocks 1 to 7, with 20 elements or more in each two, and norms with biases.
            let waits: Vec<_> = (0..8).map(|block| wait_for(&rank, op, (7 - block) / 2)).collect();
            rank.parts[0].probe = Some(Arc::new(move |way, block| match way {
                Way::Forward => Ok(()),
                Way::Backward => waits[block](),
            }));
            rank.step(0).map(drop)
        });
    }
}

#[test]
fn the_next_weights_are_gathered_while_the_last_are_in_use() {
    let blocks = 5;
    let shape = Shape { blocks, bias: Bias::No, tied: Tied::No, ..Shape::default() };
    let config = DataParallelConfig {
        sharding: Sharding::Weights,
        bucket_numel: Some(1),
        ..DataParallelConfig::default()
    };
    let plan = Plan { shape, data: 2, config, ..Plan::default() };
    ranks(&plan, |mut rank| {
        // Before block i asks for its linear and its norm they are here: with the table, i + 1 each.
        let ahead = |i: usize| if i == 0 { 2 } else { 2 * i + 3 };
        let forward: Vec<_> =
            (0..blocks).map(|i| wait_for(&rank, "all_gather", ahead(i) as u64)).collect();
        // On the way back the head, the last norm and what is before them stayed here.
        let all = 2 * blocks + 3;
        let behind = |i: usize| if i == 0 { 2 * blocks - 1 } else { 2 * (blocks - i) };
        let backward: Vec<_> =
            (0..blocks).map(|i| wait_for(&rank, "all_gather", (all + behind(i)) as u64)).collect();
        rank.parts[0].probe = Some(Arc::new(move |way, block| match way {
            Way::Forward => forward[block](),
            Way::Backward => backward[block](),
        }));
        rank.step(0).map(drop)
    });
}

/// Each rank along the tensor axis sends its part of an activation, and the receivers gather.
#[test]
fn activations_are_scattered_along_the_tensor_axis() {
    let sent = |tensor: usize| {
        let plan = Plan { stages: 3, tensor, microbatches: 4, ..Plan::default() };
        ranks(&plan, |mut rank| {
            rank.step(0)?;
            let stages = rank.mesh.stages();
            let bytes = [&stages.forward_out, &stages.backward_out].map(|g| g.traffic().bytes());
            Ok((rank.mesh.axis(Axis::Pipeline).rank(), bytes))
        })
    };
    let activation = 3 * 4 * 8; // tokens, width, bytes
    for tensor in [1, 2] {
        for (stage, [forward, backward]) in sent(tensor) {
            let want = 4 * activation / tensor as u64;
            assert_eq!(forward, if stage < 2 { want } else { 0 }, "tp {tensor}, stage {stage}");
            assert_eq!(backward, if stage > 0 { want } else { 0 }, "tp {tensor}, stage {stage}");
        }
    }
}
