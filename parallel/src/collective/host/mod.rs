//! The backend that runs on the processor: worlds of threads and of processes.
//!
//! Every rank has one progress thread. Every group is a task there, which takes the group's calls from a
//! queue and carries them out one after another; groups do not wait for one another. Between each two
//! ranks of a group there is a pipe each way that belongs to this group alone.
//!
//! ```text
//!  Group --call--> queue --> member: agree on headers, run an algorithm --> links --> pipes --> other ranks
//!    ^                         |  timeout, mismatch, a rank that is gone
//!    +---- Work <-- completion +--> board: the world has failed, and why
//! ```

mod board;
mod combine;
mod header;
mod links;
mod local;
mod member;
mod net;
mod pairwise;
mod pipe;
mod progress;
mod queue;
mod ring;
mod rooted;
mod run;
mod shm;
mod silence;
mod tcp;
mod threads;
mod world;

pub use net::{RankConfig, Transport, run_rank_process};
pub use threads::run_threads;
pub use world::{World, WorldConfig};
