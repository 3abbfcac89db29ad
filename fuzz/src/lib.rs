//! Readers of files that users give, and of what ranks send each other, as functions of any bytes. Each must return an error or a value, and never panic,
//! hang, or allocate more than the bytes justify.
//!
//! The tests run them on the seeds and on some changes of them, and see panics alone. `scripts/fuzz` runs them under
//! libFuzzer: it alone bounds seconds and allocations.

mod checkpoint;
#[doc(hidden)]
pub mod folder;
mod hugging_face;
mod indexed_dataset;
mod tokenizer;

use ferrotron_parallel::collective::fuzzing;
use ferrotron_planner::Cluster;

/// A reader.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// Name for the command line.
    pub name: &'static str,
    /// Bytes that the reader takes.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Reads bytes, and says whether they were taken.
    pub read: fn(&[u8]) -> bool,
}

/// All readers.
pub const TARGETS: [Target; 9] = [
    Target { name: "checkpoint", seeds: checkpoint::seeds, read: checkpoint::read },
    Target { name: "cluster", seeds: cluster_seeds, read: read_cluster },
    Target {
        name: "control_messages",
        seeds: fuzzing::message_seeds,
        read: fuzzing::read_messages,
    },
    Target { name: "frame", seeds: fuzzing::frame_seeds, read: fuzzing::read_frame },
    Target { name: "header", seeds: fuzzing::header_seeds, read: fuzzing::read_header },
    Target {
        name: "hugging_face_config",
        seeds: hugging_face::config_seeds,
        read: hugging_face::read_config,
    },
    Target {
        name: "hugging_face_weights",
        seeds: hugging_face::weights_seeds,
        read: hugging_face::read_weights,
    },
    Target { name: "indexed_dataset", seeds: indexed_dataset::seeds, read: indexed_dataset::read },
    Target { name: "tokenizer", seeds: tokenizer::seeds, read: tokenizer::read },
];

fn cluster_seeds() -> Vec<Vec<u8>> {
    vec![
        include_bytes!("../../planner/clusters/h100.toml").into(),
        include_bytes!("../../planner/clusters/v100-32-jz.toml").into(),
    ]
}

fn read_cluster(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_ok_and(|text| Cluster::parse("fuzz", text).is_ok())
}

#[cfg(test)]
mod tests;
