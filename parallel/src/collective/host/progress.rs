//! The progress thread of a rank: carries out the calls of all its groups, while the rank computes.

use ferrotron_tensor::{Error, Result};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::thread::JoinHandle;
use tokio::runtime::Builder;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::{JoinSet, LocalSet};

use super::board::Shared;

/// Makes a task on the progress thread.
type Spawn = Box<dyn FnOnce() -> Pin<Box<dyn Future<Output = ()>>> + Send>;

/// The progress thread. It ends when this is dropped and all tasks are done.
pub struct ProgressThread {
    /// Closed before the thread is joined.
    spawns: Option<UnboundedSender<Spawn>>,
    thread: Option<JoinHandle<()>>,
}

impl ProgressThread {
    /// Starts the progress thread of rank `rank`.
    pub fn start(rank: usize, shared: Arc<Shared>) -> Result<ProgressThread> {
        let failed = |error| Error::communication("world", format!("no progress thread: {error}"));
        let (spawns, receiver) = unbounded_channel();
        let runtime = Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let thread = std::thread::Builder::new()
            .name(format!("collectives of rank {rank}"))
            .spawn(move || LocalSet::new().block_on(&runtime, drive(rank, shared, receiver)))
            .map_err(failed)?;
        Ok(ProgressThread { spawns: Some(spawns), thread: Some(thread) })
    }

    /// Runs a task on the thread.
    pub fn spawn<F: Future<Output = ()> + 'static>(
        &self,
        task: impl FnOnce() -> F + Send + 'static,
    ) {
        if let Some(spawns) = &self.spawns {
            // A thread that has ended drops the task, whose callers then hear that it is gone.
            let _ = spawns.send(Box::new(|| Box::pin(task())));
        }
    }
}

impl Drop for ProgressThread {
    fn drop(&mut self) {
        self.spawns = None;
        // What a task drops may hold the last handle: a thread cannot wait for itself.
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

/// Runs tasks until there are none and there will be none.
async fn drive(rank: usize, shared: Arc<Shared>, mut spawns: UnboundedReceiver<Spawn>) {
    let mut tasks = JoinSet::new();
    let mut open = true;
    while open || !tasks.is_empty() {
        tokio::select! {
            spawn = spawns.recv(), if open => match spawn {
                Some(spawn) => { tasks.spawn_local(spawn()); }
                None => open = false,
            },
            Some(ended) = tasks.join_next(), if !tasks.is_empty() => {
                if let Err(panic) = ended {
                    shared.fail(&format!("the progress thread of rank {rank} panicked: {panic}"));
                }
            }
        }
    }
}
