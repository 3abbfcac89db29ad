//! Durations of collectives: bytes over the slowest link, plus the latency of the steps.
//!
//! A ring of n ranks sends (n-1)/n of the buffer for a reduce-scatter or an all-gather and twice that for an all-reduce
//! (NVIDIA's nccl-tests, doc/PERFORMANCE.md). Between nodes a group uses the adapters of its ranks on a node; the
//! other groups of the node have the other adapters. Latency grows with the steps of the ring or, for all-reduce,
//! broadcast and reduce, with the logarithm of the number of nodes, whichever is less: NCCL builds rings and trees.
//!
//! A cluster may state the times of collectives between two ranks instead, of one node and of two. Between nodes each rank
//! of a node then takes its share of the buffer around a ring of the nodes.

use crate::cluster::{Cluster, Link};
use crate::curve::Curve;

/// The place of a group's ranks in a cluster.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spread {
    /// Number of ranks.
    pub ranks: usize,
    /// Number of nodes that they are on.
    pub nodes: usize,
}

impl Spread {
    /// The spread of ranks with these global numbers.
    pub fn new(ranks: &[usize], gpus_per_node: usize) -> Spread {
        let mut nodes: Vec<usize> = ranks.iter().map(|rank| rank / gpus_per_node).collect();
        nodes.sort_unstable();
        nodes.dedup();
        Spread { ranks: ranks.len(), nodes: nodes.len() }
    }

    /// Whether calls use the network.
    pub fn leaves_node(&self) -> bool {
        self.nodes > 1
    }
}

/// The duration of a call of the operation named as [`Op::name`](ferrotron_parallel::collective::Op::name) does, on a buffer of `bytes`.
pub fn seconds(operation: &str, bytes: f64, group: Spread, cluster: &Cluster) -> f64 {
    let Spread { ranks, nodes } = group;
    if ranks < 2 {
        return 0.0;
    }
    if let (Some(measured), false) = (cluster.collectives.get(operation), group.leaves_node()) {
        return ring(measured, operation, bytes, ranks);
    }
    let others = (ranks - 1) as f64 / ranks as f64;
    if let (Some(measured), true) =
        (cluster.network_collectives.get(operation), group.leaves_node())
    {
        // No less than the links within a node take for all of it.
        let least = match operation {
            "all_reduce" => 2.0 * others,
            "all_gather" | "reduce_scatter" | "all_to_all" | "gather" | "scatter" => others,
            _ => 0.0,
        };
        let local = ranks.div_ceil(nodes) as f64;
        let inside = if local > 1.0 { least * bytes / cluster.node.bandwidth } else { 0.0 };
        return ring(measured, operation, bytes / local, nodes).max(inside);
    }
    let Link { bandwidth, latency } = link(group, cluster);
    let (volume, passes, has_tree) = match operation {
        "all_reduce" => (2.0 * others, 2.0, true),
        "all_gather" | "reduce_scatter" | "all_to_all" | "gather" | "scatter" => {
            (others, 1.0, false)
        }
        "broadcast" | "reduce" => (1.0, 1.0, true),
        "barrier" => (0.0, 2.0, true),
        _ => return latency + bytes / bandwidth, // between two ranks
    };
    let inside = cluster.node.latency.min(latency);
    let local = (ranks - nodes) as f64 * inside;
    let ring = local + (nodes - 1) as f64 * latency;
    let tree =
        ((ranks.div_ceil(nodes) - 1) as f64 * inside) + (nodes as f64).log2().ceil() * latency;
    let steps = if has_tree { ring.min(tree) } else { ring };
    passes * steps + volume * bytes / bandwidth
}

/// The duration of a call on `bytes` along a ring of so many `places`, from those `measured` between two.
fn ring(measured: &Curve, operation: &str, bytes: f64, places: usize) -> f64 {
    match operation {
        "send" | "recv" | "send_recv" | "broadcast" | "reduce" => measured.seconds(bytes),
        // Each of the n-1 steps of n places passes on 1/n of the bytes, the one step of two a half.
        _ => (places - 1) as f64 * measured.seconds(2.0 * bytes / places as f64),
    }
}

/// The link that limits a group.
fn link(group: Spread, cluster: &Cluster) -> Link {
    if !group.leaves_node() {
        return cluster.node;
    }
    let local = group.ranks.div_ceil(group.nodes) as f64;
    let bandwidth = (cluster.network.bandwidth * local).min(cluster.node.bandwidth);
    Link { bandwidth, ..cluster.network }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_buffers_take_the_time_of_a_ring() {
        let cluster = Cluster::named("dgx-a100-80").unwrap();
        let bytes = 1e12; // so that latency does not count
        for (operation, ranks, factor) in [
            ("all_reduce", 0..8, 2.0 * 7.0 / 8.0),
            ("reduce_scatter", 0..8, 7.0 / 8.0),
            ("all_gather", 0..4, 3.0 / 4.0),
            ("broadcast", 0..8, 1.0),
        ] {
            let ranks: Vec<usize> = ranks.collect();
            let got = seconds(operation, bytes, Spread::new(&ranks, 8), &cluster);
            let want = factor * bytes / cluster.node.bandwidth;
            assert!((got / want - 1.0).abs() < 1e-4, "{operation}: got {got}, want {want}");
        }
    }

    #[test]
    fn stated_times_of_collectives_across_nodes_take_the_place_of_the_link() {
        let text = include_str!("../clusters/dgx-a100-80.toml");
        // 10 us for nothing, and 100 us for each 10^6 bytes: 10 GB/s.
        let table = "[network.collective_us.all_reduce]\n1 = 10\n1000000 = 110\n2000000 = 210\n";
        let cluster = Cluster::parse("own.toml", &format!("{text}\n{table}")).unwrap();
        let time = |operation: &str, ranks: &[usize], bytes: f64| {
            1e6 * seconds(operation, bytes, Spread::new(ranks, 8), &cluster)
        };
        let close = |got: f64, want: f64| {
            assert!((got / want - 1.0).abs() < 1e-4, "got {got} us, want {want} us");
        };
        close(time("all_reduce", &[0, 8], 1e6), 110.0);
        // Three steps of a ring, each with half of a measured buffer's part.
        close(time("all_reduce", &[0, 8, 16, 24], 2e6), 3.0 * 110.0);
        // Two ranks of each node take a half each.
        close(time("all_reduce", &[0, 1, 8, 9], 2e6), 110.0);
        // Other operations and groups of one node have their links.
        let plain = Cluster::named("dgx-a100-80").unwrap();
        for (operation, ranks) in [("all_gather", [0, 8]), ("all_reduce", [0, 1])] {
            let link = 1e6 * seconds(operation, 1e6, Spread::new(&ranks, 8), &plain);
            close(time(operation, &ranks, 1e6), link);
        }
        // A whole node is bound by the links within it.
        let nodes: Vec<usize> = (0..16).collect();
        let inside = 1e6 * 2.0 * 15.0 / 16.0 * 1e12 / plain.node.bandwidth;
        assert!(time("all_reduce", &nodes, 1e12) >= inside);
    }

    #[test]
    fn a_group_uses_the_adapters_of_its_ranks() {
        let cluster = Cluster::named("dgx-a100-80").unwrap();
        let time = |ranks: &[usize]| {
            seconds("all_reduce", 1e12, Spread::new(ranks, 8), &cluster) * ranks.len() as f64
                / (ranks.len() - 1) as f64
        };
        let apart: Vec<usize> = (0..64).step_by(8).collect(); // one on each of 8 nodes
        let pairs: Vec<usize> = (0..64).filter(|rank| rank % 8 < 2).collect();
        assert!((time(&apart) / time(&pairs) - 2.0).abs() < 1e-3);
        // Small buffers: a tree takes the logarithm of the nodes.
        let latency = seconds("all_reduce", 0.0, Spread::new(&apart, 8), &cluster);
        assert!((latency - 2.0 * 3.0 * cluster.network.latency).abs() < 1e-12, "{latency}");
        assert_eq!(seconds("all_reduce", 1.0, Spread::new(&[3], 8), &cluster), 0.0);
    }
}
