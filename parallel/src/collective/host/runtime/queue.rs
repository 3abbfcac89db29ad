//! The calls of a [`Group`](crate::collective::Group): in a queue to the progress thread, or carried out by their caller.

use ferrotron_tensor::Result;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::Mutex as AsyncMutex;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tracing::{Instrument, Span, trace_span};

use crate::collective::host::runtime::block_on::block_on;
use crate::collective::host::runtime::group_task::GroupTask;
use crate::collective::host::runtime::progress::ProgressThread;
use crate::collective::host::runtime::queued_call::QueuedCall;
use crate::collective::host::runtime::world_health::WorldHealth;
use crate::collective::{Call, Collective, CommVolume, Memory, Work};

/// One group on one rank, by one of its names.
pub struct HostCollective {
    name: Arc<str>,
    traffic: Arc<Mutex<CommVolume>>,
    queue: Arc<Queue>,
}

/// The calls of a group, by all of its names.
struct Queue {
    rank: usize,
    size: usize,
    jobs: UnboundedSender<QueuedCall>,
    /// One handle, and one of each call that is queued or under way.
    queued: Arc<()>,
    /// Carries the calls out.
    task: Arc<AsyncMutex<GroupTask>>,
    shared: Arc<WorldHealth>,
    /// Dropped after `jobs`, so that the thread ends when the last group is gone.
    progress: Arc<ProgressThread>,
}

impl HostCollective {
    /// The group of `member`, by the name and with the counters that it has.
    pub fn new(member: GroupTask, progress: &Arc<ProgressThread>) -> HostCollective {
        let (jobs, receiver) = unbounded_channel();
        let (rank, size) = (member.links.rank, member.links.size());
        let (name, traffic) = (member.name.clone(), member.traffic.clone());
        let shared = member.shared.clone();
        let task = Arc::new(AsyncMutex::new(member));
        let served = task.clone();
        progress.finish(move || GroupTask::serve(served, receiver));
        let (queued, progress) = (Arc::default(), progress.clone());
        let queue = Arc::new(Queue { rank, size, jobs, queued, task, shared, progress });
        HostCollective { name, traffic, queue }
    }

    /// The span of a call in a trace.
    fn span(&self, call: &Call) -> Span {
        trace_span!(
            "collective",
            name = call.op.name(),
            op = %call.op,
            bytes = call.len * call.dtype.size(),
            group = &*self.name,
            site = %call.site,
        )
    }
}

impl Collective for HostCollective {
    fn name(&self) -> &str {
        &self.name
    }

    fn rank(&self) -> usize {
        self.queue.rank
    }

    fn size(&self) -> usize {
        self.queue.size
    }

    fn start(&self, call: Call, memory: Memory) -> Work<Memory> {
        let (work, completion) = Work::new();
        let (name, traffic) = (self.name.clone(), self.traffic.clone());
        let (span, queued) = (self.span(&call), self.queue.queued.clone());
        let queued = QueuedCall { call, memory, completion, span, name, traffic, queued };
        // If the thread has ended, so has the completion, and the work says so.
        let _ = self.queue.jobs.send(queued);
        work
    }

    fn run(&self, call: Call, mut memory: Memory) -> Result<Memory> {
        // Calls end in the order in which they were made. The progress thread makes pipes, and looks after sockets.
        let is_idle = Arc::strong_count(&self.queue.queued) == 1;
        let member = is_idle.then(|| self.queue.task.try_lock().ok()).flatten();
        let Some(mut member) = member.filter(|member| member.is_near(&call)) else {
            return self.start(call, memory).wait();
        };
        (member.name, member.traffic) = (self.name.clone(), self.traffic.clone());
        let _wait = trace_span!("wait").entered();
        let _runtime = self.queue.progress.enter();
        let span = self.span(&call);
        block_on(member.carry_out(&call, &mut memory).instrument(span)).map(|()| memory)
    }

    fn traffic(&self) -> CommVolume {
        self.traffic.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn named(&self, name: &str) -> Option<Arc<dyn Collective>> {
        let (name, queue) = (Arc::from(name), self.queue.clone());
        Some(Arc::new(HostCollective { name, traffic: Arc::default(), queue }))
    }

    fn check(&self) -> Result<()> {
        self.queue.shared.check()
    }

    fn fail(&self, reason: &str) {
        self.queue.shared.fail(reason);
    }
}
