//! The progress thread of a rank: carries out the calls of all its groups, while the rank computes.

use ferrotron_tensor::{Error, Result};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::runtime::{Builder, EnterGuard, Handle};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::{JoinSet, LocalSet};

use crate::collective::host::runtime::world_health::WorldHealth;

/// Makes a task on the progress thread.
type Spawn = Box<dyn FnOnce() -> Pin<Box<dyn Future<Output = ()>>> + Send>;

/// Time that the thread waits at its end for copies that a device does not finish.
const BLOCKED: Duration = Duration::from_secs(5);

/// A request to the progress thread.
enum TaskRequest {
    /// Runs it to its end before the thread ends.
    Finish(Spawn),
    /// Runs it as long as there is something else to do.
    Serve(Spawn),
    /// Runs it when all else is finished.
    AtEnd(Spawn),
}

/// The progress thread. It ends when this is dropped and all tasks are done.
pub struct ProgressThread {
    /// Closed before the thread is joined.
    orders: Option<UnboundedSender<TaskRequest>>,
    thread: Option<JoinHandle<()>>,
    runtime: Handle,
}

impl ProgressThread {
    /// Starts the progress thread of rank `rank`.
    pub fn start(rank: usize, shared: Arc<WorldHealth>) -> Result<ProgressThread> {
        let failed = |error| Error::communication("world", format!("no progress thread: {error}"));
        let (orders, receiver) = unbounded_channel();
        let runtime = Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let handle = runtime.handle().clone();
        let thread = std::thread::Builder::new()
            .name(format!("collectives of rank {rank}"))
            .spawn(move || {
                LocalSet::new().block_on(&runtime, drive(rank, shared, receiver));
                runtime.shutdown_timeout(BLOCKED);
            })
            .map_err(failed)?;
        Ok(ProgressThread { orders: Some(orders), thread: Some(thread), runtime: handle })
    }

    /// Lets this thread wait for the timers and sockets of the progress thread while the result lives.
    pub fn enter(&self) -> EnterGuard<'_> {
        self.runtime.enter()
    }

    /// Runs a task to its end before the thread ends.
    pub fn finish<F: Future<Output = ()> + 'static>(
        &self,
        task: impl FnOnce() -> F + Send + 'static,
    ) {
        self.order(TaskRequest::Finish(Box::new(|| Box::pin(task()))));
    }

    /// Runs a task that the thread does not wait for when it ends.
    pub fn serve<F: Future<Output = ()> + 'static>(
        &self,
        task: impl FnOnce() -> F + Send + 'static,
    ) {
        self.order(TaskRequest::Serve(Box::new(|| Box::pin(task()))));
    }

    /// Runs a task when all others are finished, before the thread ends.
    pub fn at_end<F: Future<Output = ()> + 'static>(
        &self,
        task: impl FnOnce() -> F + Send + 'static,
    ) {
        self.order(TaskRequest::AtEnd(Box::new(|| Box::pin(task()))));
    }

    fn order(&self, order: TaskRequest) {
        if let Some(orders) = &self.orders {
            // A thread that has ended drops the task, whose callers then hear that it is gone.
            let _ = orders.send(order);
        }
    }
}

impl Drop for ProgressThread {
    fn drop(&mut self) {
        self.orders = None;
        // What a task drops may hold the last handle: a thread cannot wait for itself.
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

/// Runs tasks until there are none and there will be none.
async fn drive(rank: usize, shared: Arc<WorldHealth>, mut orders: UnboundedReceiver<TaskRequest>) {
    let mut tasks = JoinSet::new();
    let mut last = None;
    let mut open = true;
    while open || !tasks.is_empty() {
        tokio::select! {
            order = orders.recv(), if open => match order {
                Some(TaskRequest::Finish(task)) => { tasks.spawn_local(task()); }
                Some(TaskRequest::Serve(task)) => { tokio::task::spawn_local(task()); }
                Some(TaskRequest::AtEnd(task)) => last = Some(task),
                None => open = false,
            },
            Some(ended) = tasks.join_next(), if !tasks.is_empty() => {
                if let Err(panic) = ended {
                    shared.fail(&format!("the progress thread of rank {rank} panicked: {panic}"));
                }
            }
        }
    }
    if let Some(last) = last {
        last().await;
    }
}
