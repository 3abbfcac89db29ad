//! Runs the instructions of a rank.

pub(super) mod execute;
pub(super) mod weight_versions;
