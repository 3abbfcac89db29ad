//! Collectives without others: for a rank whose memory or time is predicted.
//!
//! Each call is announced by an event of the `tracing` crate, and so is each wait for one. `ferrotron-planner` predicts
//! the time of a step from these.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use tracing::trace;

use super::{Call, Collective, CommVolume, Memory, Work};

/// One rank's end of a group that has no other members.
pub(super) struct Fake {
    name: Arc<str>,
    rank: usize,
    size: usize,
    /// Calls so far.
    calls: AtomicU64,
}

impl Fake {
    pub fn new(name: &str, rank: usize, size: usize) -> Fake {
        Fake { name: name.into(), rank, size, calls: AtomicU64::new(0) }
    }
}

impl Collective for Fake {
    fn name(&self) -> &str {
        &self.name
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn start(&self, call: Call, memory: Memory) -> Work<Memory> {
        let number = self.calls.fetch_add(1, Relaxed);
        let (group, bytes) = (&*self.name, call.len * call.dtype.size());
        trace!(name: "call", group, number, operation = call.op.name(), bytes);
        let group = self.name.clone();
        // Done when it is waited for, and no sooner: who asks before is as late as may be.
        Work::from_fn(move || {
            trace!(name: "awaited", group = &*group, number);
            Ok(memory)
        })
    }

    fn named(&self, name: &str) -> Option<Arc<dyn Collective>> {
        Some(Arc::new(Fake::new(name, self.rank, self.size)))
    }

    fn traffic(&self) -> CommVolume {
        CommVolume::default()
    }
}
