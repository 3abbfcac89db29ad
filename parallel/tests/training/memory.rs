//! Memory between steps, and its maximum during one.

use ferrotron_nn::{Axis, Bias, Sharding};
use ferrotron_parallel::data_parallel::DataParallelConfig;
use ferrotron_tensor::{Category, DType};

use crate::harness::{Plan, Rank, ranks};
use crate::toy::{Recompute, Shape, Tied};

fn plan(sharding: Sharding, bucket_numel: Option<usize>) -> Plan {
    let shape = Shape {
        blocks: 6,
        width: 32,
        vocab: 50,
        tied: Tied::No,
        bias: Bias::No,
        dtype: DType::F32,
        recompute: Recompute::None,
    };
    let config = DataParallelConfig { sharding, bucket_numel, ..DataParallelConfig::default() };
    Plan { shape, data: 4, microbatches: 2, config, ..Plan::default() }
}

/// Elements of the largest two buckets that are neighbours on a line, over all lines.
fn two_buckets(rank: &Rank) -> usize {
    let groups = rank.parallel.buffers().groups();
    let mut lines: Vec<(_, Vec<usize>)> = Vec::new();
    for group in groups {
        match lines.iter_mut().find(|(decay, _)| *decay == group.decay) {
            Some((_, line)) => line.push(group.numel()),
            None => lines.push((group.decay, vec![group.numel()])),
        }
    }
    let most = |line: &Vec<usize>| match line.len() {
        1 => line[0],
        _ => line.windows(2).map(|pair| pair[0] + pair[1]).max().unwrap_or(0),
    };
    lines.iter().map(|(_, line)| most(line)).sum()
}

/// f32 weights, gradients and two moments take 4 + 4 + 8 bytes a parameter. Each is divided by the ranks of its stage
/// of ZeRO and rounded to whole elements for each bucket.
#[test]
fn a_parameter_takes_sixteen_bytes_before_sharding() {
    for sharding in Sharding::ALL {
        for bucket_numel in [Some(1), Some(2000), None] {
            let plan = plan(sharding, bucket_numel);
            for (rank, (memory, numel, buckets)) in ranks(&plan, |mut rank| {
                for step in 0..2 {
                    rank.step(step)?;
                }
                let buffers = rank.parallel.buffers();
                Ok((rank.device.memory(), buffers.numel(), buffers.groups().len()))
            })
            .into_iter()
            .enumerate()
            {
                assert_eq!(numel, 50 * 32 * 2 + 6 * (32 * 32 + 32) + 32);
                for (category, bytes, sharded) in [
                    (Category::Weights, 4, sharding >= Sharding::Weights),
                    (Category::Gradients, 4, sharding >= Sharding::Gradients),
                    (Category::Optimizer, 8, sharding >= Sharding::Optimizer),
                ] {
                    let found = memory.bytes(category);
                    let at = format!("{plan:?}, rank {rank}: {category:?}: {found} bytes");
                    if sharded {
                        // Parts differ by one element at most.
                        assert!(found.abs_diff(numel * bytes / 4) <= buckets * bytes, "{at}");
                    } else {
                        assert_eq!(found, numel * bytes, "{at}");
                    }
                }
                assert_eq!(memory.bytes(Category::Communication), 0, "{plan:?}, rank {rank}");
            }
        }
    }
}

/// On a CPU a bucket's gradients have memory from the first one of a step on, and until the next step.
#[test]
fn gradients_of_a_bucket_are_allocated_by_the_first_one() {
    for (microbatches, data) in [(1, 1), (2, 1), (1, 2)] {
        let plan = Plan { data, microbatches, ..plan(Sharding::None, Some(1000)) };
        for (numel, smallest, found) in ranks(&plan, |mut rank| {
            let bytes = |rank: &Rank| rank.device.memory().bytes(Category::Gradients);
            rank.step(0)?;
            let behind = bytes(&rank);
            rank.parallel.begin_step(1);
            let begun = bytes(&rank);
            let groups = rank.parallel.buffers().groups();
            let (group, leaf) = (&groups[0], groups[0].params[0].leaf());
            leaf.accumulate_with(|gradient, _| gradient.zero_fill())?;
            let first = bytes(&rank);
            let (numel, smallest) = (rank.parallel.buffers().numel(), group.numel());
            rank.step(1)?;
            Ok((numel, smallest, [behind, begun, first, bytes(&rank)]))
        }) {
            assert_eq!(found, [4 * numel, 0, 4 * smallest, 4 * numel], "{plan:?}");
        }
    }
}

/// Most bytes of whole buckets in the second step, with the elements of two buckets, of each rank.
fn whole_buckets(plan: &Plan) -> Vec<(usize, usize)> {
    ranks(plan, |mut rank| {
        rank.step(0)?;
        rank.device.reset_memory_peaks();
        rank.step(1)?;
        let memory = rank.device.memory();
        Ok((memory.peak_by_category[Category::Communication as usize], two_buckets(&rank)))
    })
}

/// Recomputed blocks need no more of them.
#[test]
fn at_most_two_buckets_of_a_line_are_whole() {
    for (sharding, recompute) in [
        (Sharding::Gradients, Recompute::None),
        (Sharding::Weights, Recompute::None),
        (Sharding::Weights, Recompute::Blocks),
    ] {
        let plan = |bucket_numel| {
            let plan = plan(sharding, bucket_numel);
            Plan { shape: Shape { recompute, ..plan.shape }, ..plan }
        };
        let all = whole_buckets(&plan(None));
        for bucket_numel in [Some(1), Some(1000), Some(2000)] {
            let plan = plan(bucket_numel);
            for (rank, (found, two)) in whole_buckets(&plan).into_iter().enumerate() {
                let kinds = if sharding == Sharding::Weights { 2 } else { 1 }; // gradients, weights
                let at = format!("{plan:?}, rank {rank}: {found} bytes");
                assert!(found <= 4 * kinds * two, "{at}, {two} elements");
                let (all, least) = (all[rank].0, 4 * two / 2);
                assert!((least..all).contains(&found), "{at}, {least} to {all}");
            }
        }
    }
}

/// A recomputed block saves only its input for backward.
#[test]
fn recomputed_blocks_keep_their_input() {
    let saved = |recompute| {
        let plan = plan(Sharding::Weights, Some(1000));
        let plan = Plan { shape: Shape { recompute, ..plan.shape }, ..plan };
        ranks(&plan, |mut rank| {
            rank.step(0)?;
            Ok(rank.device.memory().peak_by_category[Category::Saved as usize])
        })
    };
    for (all, inputs) in saved(Recompute::None).into_iter().zip(saved(Recompute::Blocks)) {
        assert!(inputs < all, "{inputs} bytes, {all} without");
    }
}

/// Every stage has the bytes of its own parameters.
#[test]
fn stages_hold_their_own_parameters() {
    let plan = Plan { stages: 3, data: 2, ..plan(Sharding::Optimizer, None) };
    for (stage, numel, memory) in ranks(&plan, |mut rank| {
        rank.step(0)?;
        let stage = rank.mesh.axis(Axis::Pipeline).rank();
        Ok((stage, rank.parallel.buffers().numel(), rank.device.memory()))
    }) {
        let block = 32 * 32 + 32;
        let ends = [50 * 32, 0, 50 * 32 + 32];
        assert_eq!(numel, 2 * block + ends[stage]);
        assert_eq!(memory.bytes(Category::Weights), 4 * numel);
        assert_eq!(memory.bytes(Category::Gradients), 4 * numel);
        assert!(memory.bytes(Category::Optimizer).abs_diff(4 * numel) <= 2 * 8);
    }
}
