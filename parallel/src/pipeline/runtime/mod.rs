//! Runs the instructions of a rank.

pub(super) mod execute;
