//! Connections and messages of the ranks' meeting, of groups and of calls, against the table in docs/collectives.md.

use ferrotron_parallel::collective::{
    ControlVolume, Group, RankConfig, Reduction, Transport, World, run_rank_process,
};
use ferrotron_tensor::{DType, Result};
use std::sync::Barrier;
use std::thread::{scope, sleep};
use std::time::Duration;

use crate::values::make;
use crate::worlds::{TIMEOUT, all, rank_config};

/// Returns the counts of a rank when all ranks are idle.
fn settled(world: &World, together: &Barrier) -> ControlVolume {
    together.wait();
    sleep(Duration::from_millis(300));
    // Heartbeats go on while ranks are idle.
    let counted = ControlVolume { heartbeats: 0, ..world.control_traffic() };
    together.wait();
    counted
}

fn calls(group: &Group) -> Result<()> {
    let x = make(DType::F32, &[100], |_| 1.0)?;
    group.all_reduce(x, Reduction::Sum)?.wait()?;
    group.barrier().wait()
}

/// Counts of every rank behind the meeting, the making of groups, the first calls, and later ones.
fn counted(size: usize) -> Vec<[ControlVolume; 4]> {
    let first = rank_config(0, size, TIMEOUT, Transport::Tcp);
    let together = Barrier::new(size);
    let rank = |world: World| {
        let met = settled(&world, &together);
        let pairs: Vec<usize> =
            all(&world).into_iter().filter(|other| other / 2 == world.rank() / 2).collect();
        let groups = [world.group("world", &all(&world))?, world.group("pairs", &pairs)?];
        let made = settled(&world, &together);
        groups.iter().try_for_each(calls)?;
        let connected = settled(&world, &together);
        for _ in 0..5 {
            groups.iter().try_for_each(calls)?;
        }
        Ok([met, made, connected, settled(&world, &together)])
    };
    scope(|scope| {
        let run = |number| {
            let config = RankConfig { rank: number, ..first.clone() };
            let rank = &rank;
            scope.spawn(move || run_rank_process(&config, rank))
        };
        let threads: Vec<_> = (0..size).map(run).collect();
        threads.into_iter().map(|thread| thread.join().unwrap().unwrap()).collect()
    })
}

#[test]
fn connections_and_messages_are_those_of_the_table() {
    for (size, levels) in [(4, 1), (22, 3), (64, 3)] {
        let ranks = counted(size);
        for (rank, &[met, made, connected, later]) in ranks.iter().enumerate() {
            let children =
                (4 * rank + 1..4 * rank + 5).filter(|&child| child < size).count() as u64;
            let above = u64::from(rank > 0);
            assert_eq!(met.control_connections, children + above, "rank {rank} of {size}");
            assert_eq!(met.group_connections, 0);
            // All below are here, and welcome.
            assert_eq!(met.messages, above + children, "rank {rank} of {size}");
            assert!(met.bytes <= 50 * met.messages, "rank {rank} of {size}: {met:?}");
            assert_eq!(made, met, "a group costs nothing until its first call");
            assert_eq!(later, connected, "calls among ranks that are connected need no messages");
        }
        let sum =
            |of: fn(&ControlVolume) -> u64| -> u64 { ranks.iter().map(|rank| of(&rank[2])).sum() };
        let size = size as u64;
        let (ring, tree, pairs) = (size, size - 1, size / 2);
        let connections = match size {
            ..=16 => size * (size - 1) / 2 + pairs,
            // Rank 1 is the next of rank 0 and its child.
            _ => ring + tree - 1 + pairs,
        };
        assert_eq!(sum(|rank| rank.group_connections), 2 * connections, "{size} ranks");
        // Either end may ask where the other listens.
        let asked = sum(|rank| rank.messages) - 2 * (size - 1);
        assert!(asked <= 2 * 2 * levels * connections, "{asked} messages of {size} ranks");
        assert!(sum(|rank| rank.bytes) <= 120 * sum(|rank| rank.messages));
    }
}
