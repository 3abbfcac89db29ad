//! The runtime of a rank: its progress thread, the calls of its groups, and the health of the world.

pub(super) mod awake;
pub(super) mod block_on;
pub(super) mod census;
pub(super) mod diagnosis;
pub(super) mod group_task;
pub(super) mod progress;
pub(super) mod queue;
pub(super) mod queued_call;
pub(super) mod rendezvous;
mod routed;
pub(super) mod run;
pub(super) mod run_rank;
pub(super) mod threads;
pub(super) mod watched;
mod wide;
pub(super) mod world;
pub(super) mod world_health;
