//! The queue of calls through which a [`Group`](crate::collective::Group) reaches the progress thread.

use ferrotron_tensor::Result;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tracing::{Span, trace_span};

use crate::collective::host::runtime::progress::ProgressThread;
use crate::collective::host::runtime::world_health::WorldHealth;
use crate::collective::{Call, Collective, CommVolume, Completion, Memory, Work};

/// A call in the queue.
pub struct QueuedCall {
    /// The operation.
    pub call: Call,
    /// Its memory.
    pub memory: Memory,
    /// The channel of the result.
    pub completion: Completion,
    /// Its span in a trace.
    pub span: Span,
}

/// The calls of one group on one rank, on their way to the progress thread.
pub struct HostCollective {
    name: String,
    rank: usize,
    size: usize,
    jobs: UnboundedSender<QueuedCall>,
    traffic: Arc<Mutex<CommVolume>>,
    shared: Arc<WorldHealth>,
    /// Dropped after `jobs`, so that the thread ends when the last group is gone.
    _progress: Arc<ProgressThread>,
}

impl HostCollective {
    /// A queue, and the end where calls come out.
    pub fn new(
        name: &str,
        rank: usize,
        size: usize,
        shared: &Arc<WorldHealth>,
        progress: &Arc<ProgressThread>,
    ) -> (HostCollective, UnboundedReceiver<QueuedCall>) {
        let (jobs, receiver) = unbounded_channel();
        let (name, traffic) = (name.to_string(), Arc::default());
        let (shared, _progress) = (shared.clone(), progress.clone());
        (HostCollective { name, rank, size, jobs, traffic, shared, _progress }, receiver)
    }

    /// The progress thread's counters of what it sends.
    pub fn counter(&self) -> Arc<Mutex<CommVolume>> {
        self.traffic.clone()
    }
}

impl Collective for HostCollective {
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
        let (work, completion) = Work::new();
        let span = trace_span!(
            "collective",
            name = call.op.name(),
            op = %call.op,
            bytes = call.len * call.dtype.size(),
            group = self.name,
            site = %call.site,
        );
        // If the thread has ended, so has the completion, and the work says so.
        let _ = self.jobs.send(QueuedCall { call, memory, completion, span });
        work
    }

    fn traffic(&self) -> CommVolume {
        self.traffic.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn check(&self) -> Result<()> {
        self.shared.check()
    }

    fn fail(&self, reason: &str) {
        self.shared.fail(reason);
    }
}
