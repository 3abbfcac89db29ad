//! One file for each subcommand.

pub(super) mod bench;
pub(super) mod checkpoint;
pub(super) mod completions;
pub(super) mod doctor;
pub(super) mod eval;
pub(super) mod export;
pub(super) mod generate;
pub(super) mod memory;
mod own_file;
pub(super) mod plan;
pub(super) mod report;
pub(super) mod schedule;
#[cfg(feature = "serve")]
pub(super) mod serve;
pub(super) mod simulate;
pub(super) mod tokenize;
pub(super) mod train;
