//! Algorithms of collectives: ring, rooted and pairwise, and the kernels that reduce.

pub(super) mod combine;
pub(super) mod pairwise;
pub(super) mod ring;
pub(super) mod rooted;
pub(super) mod tree;
