//! Collectives: operations that all ranks of a group carry out together.
//!
//! A [`Group`] is what users hold: the ranks that take part, and one method for each operation. Every method
//! returns [`Work`] at once; [`Work::wait`] gives the result. Calls of a group run one after another, in the
//! order in which they were made, which must be the same on every rank. Different groups do not wait for
//! one another.
//!
//! All ranks get the same bits, and the same call on the same numbers gives the same bits again.
//!
//! Below a group is a [`Collective`], the backend that carries out [`Call`]s on [`Memory`].

mod blocking;
mod call;
mod fake;
mod group;
mod host;
mod memory;
pub mod narrow_sums;
mod nccl;
pub(crate) mod routes;
pub(crate) mod tree;
mod work;

use ferrotron_tensor::Result;

pub use call::{Call, Op, Reduction};
pub use ferrotron_tensor::partition_range;
pub use group::Group;
#[doc(hidden)]
pub use host::fuzzing;
pub use host::{
    Encryption, RankConfig, Transport, World, WorldConfig, run_rank_process, run_threads,
};
pub use memory::{Buffer, Bytes, Memory};
pub use nccl::NcclConfig;
pub(crate) use nccl::NcclGroups;
pub use work::{Completion, Work, waited_during};

/// Carries out the calls of one group.
pub trait Collective: Send + Sync {
    /// The group's name in error messages: "tp", for example.
    fn name(&self) -> &str;

    /// This rank's number within the group.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn size(&self) -> usize;

    /// Queues a call. What `memory` has to hold is told there.
    fn start(&self, call: Call, memory: Memory) -> Work<Memory>;

    /// Carries out a call whose result is needed at once: on the calling thread, where that is faster.
    fn run(&self, call: Call, memory: Memory) -> Result<Memory> {
        self.start(call, memory).wait()
    }

    /// Calls `f`. A backend whose calls wait for each other launches those that it makes as one.
    fn together(&self, f: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        f()
    }

    /// Whether its calls on tensors of a GPU are captured with the rest of the work: see
    /// [`CudaGraph`](ferrotron_tensor::CudaGraph).
    fn is_capturable(&self) -> bool {
        false
    }

    /// Looks after a replay of captured work that the GPU was given last, which has calls of this rank's groups.
    fn watch_replay(&self) -> Result<()> {
        Ok(())
    }

    /// The traffic that this rank has sent so far.
    fn traffic(&self) -> CommVolume;

    /// Another handle of the same group, with a name and counts of its own, if the backend has such: its calls wait in the
    /// same queue.
    fn named(&self, _name: &str) -> Option<std::sync::Arc<dyn Collective>> {
        None
    }

    /// Errors if another rank is known to have failed or left.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Ends the calls of all ranks with this reason, where there is a way to tell them.
    fn fail(&self, _reason: &str) {}
}

/// Calls made and bytes sent by one rank, by operation. Headers do not count.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CommVolume(std::collections::BTreeMap<&'static str, (u64, u64)>);

impl CommVolume {
    /// Calls and bytes of the operation called `name`, such as "all_reduce".
    pub fn calls_and_bytes(&self, name: &str) -> (u64, u64) {
        self.0.get(name).copied().unwrap_or_default()
    }

    /// Bytes of all operations.
    pub fn bytes(&self) -> u64 {
        self.0.values().map(|&(_, bytes)| bytes).sum()
    }

    /// Adds the counts of `other`.
    pub fn add(&mut self, other: &CommVolume) {
        for (&name, &(calls, bytes)) in &other.0 {
            let (own_calls, own_bytes) = self.0.entry(name).or_default();
            *own_calls += calls;
            *own_bytes += bytes;
        }
    }

    /// Counts a call that sent `bytes`.
    pub fn count(&mut self, op: Op, bytes: u64) {
        let (calls, sum) = self.0.entry(op.name()).or_default();
        *calls += 1;
        *sum += bytes;
    }
}

/// Connections of a rank, and its messages about the job, which are no calls.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ControlVolume {
    /// Connections to neighbours in the tree of all ranks.
    pub control_connections: u64,
    /// Connections of groups to other members, made so far.
    pub group_connections: u64,
    /// Messages written to neighbours in the tree, those of others that were passed on included. Heartbeats are apart.
    pub messages: u64,
    /// Bytes of these messages.
    pub bytes: u64,
    /// Heartbeats written to neighbours in the tree.
    pub heartbeats: u64,
}
