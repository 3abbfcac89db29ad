//! The backend that runs on the processor: worlds of threads and of processes.
//!
//! Every rank has one progress thread. Every group is a task there, which takes the group's calls from a
//! queue and carries them out one after another; groups do not wait for one another. Two ranks of a group
//! connect when a call needs a pipe between them, which belongs to this group alone.
//!
//! ```text
//!  Group --call--> queue --> member: agree on headers, run an algorithm --> links --> pipes --> other ranks
//!    ^                         |  timeout, mismatch, a rank that is gone
//!    +---- Work <-- completion +--> board: the world has failed, and why
//! ```

mod algorithms;
mod recent;
mod rendezvous;
mod runtime;
mod silence;
mod transport;

pub use rendezvous::fuzzing;
pub use rendezvous::{Encryption, RankConfig, Transport, run_rank_process};
pub use runtime::threads::run_threads;
pub use runtime::world::{World, WorldConfig};
