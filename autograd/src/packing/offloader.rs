//! Moves what is kept for backward to host memory, and brings it back, while others compute: a thread on a CPU, a stream
//! on a GPU.

use ferrotron_tensor::{Device, Error, Result, Tensor, copy_aside};
use std::fmt;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, Weak};
use std::thread::{Builder, JoinHandle};
use tracing::trace_span;

use super::stored::Stored;
use crate::lock;

/// Copies to host memory and fetches ahead, on a device of one kind.
///
/// What was moved stays in the device's memory until it is waited for, or the next is moved. So how much is in use at a time
/// does not depend on how fast copies are.
pub struct Offloader(Way);

enum Way {
    Thread(Worker),
    /// The GPU's own stream of copies: what was given to it last.
    Stream(Mutex<Vec<Weak<Stored>>>),
}

/// A thread of its own. It ends when this is dropped.
struct Worker {
    /// Until it is dropped.
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    /// Says when what was handed over last is in host memory.
    under_way: Mutex<Option<Receiver<Moved>>>,
}

/// The tensors that are in host memory now, as the device has them: whoever waits frees these.
type Moved = Result<Vec<Tensor>>;

enum Job {
    Move(Vec<Move>, Sender<Moved>),
    Fetch(Vec<Weak<Stored>>),
}

/// A tensor to be moved.
pub(super) struct Move {
    pub stored: Arc<Stored>,
    /// Its place, which nobody else holds.
    pub to: Tensor,
}

impl Offloader {
    /// For tensors of `device`, or of one that works like it.
    ///
    /// Errors if the system has no thread for it.
    pub fn start(device: &Device) -> Result<Offloader> {
        match device.is_gpu() {
            true => Ok(Offloader(Way::Stream(Mutex::default()))),
            false => Worker::start().map(|worker| Offloader(Way::Thread(worker))),
        }
    }

    /// Waits until everything that was handed over is in host memory, and frees the device's. On a GPU it is what is
    /// computed from now on that waits.
    ///
    /// Errors if the thread has ended, or the GPU has failed.
    pub fn wait(&self) -> Result<()> {
        match &self.0 {
            Way::Thread(worker) => worker.wait(),
            Way::Stream(under_way) => {
                let moved = std::mem::take(&mut *lock(under_way));
                moved.iter().filter_map(Weak::upgrade).try_for_each(|stored| stored.arrive())
            }
        }
    }

    /// Begins to move tensors. What was handed over before is waited for, so that a disk slower than the computation
    /// does not let it pile up.
    pub(super) fn begin(&self, moves: Vec<Move>) -> Result<()> {
        let _span = trace_span!("offload", name = "move").entered();
        self.wait()?;
        match &self.0 {
            Way::Thread(worker) => worker.begin(moves),
            Way::Stream(under_way) => {
                let (all, pairs): (Vec<_>, Vec<_>) = moves
                    .into_iter()
                    .map(|Move { stored, to }| (stored.clone(), (stored.tensor(), to)))
                    .unzip();
                let lent = copy_aside(pairs)?;
                all.iter().zip(lent).for_each(|(stored, lent)| stored.set_moving(lent));
                *lock(under_way) = all.iter().map(Arc::downgrade).collect();
                Ok(())
            }
        }
    }

    /// Begins to fetch tensors that backward will need soon.
    pub(super) fn fetch(&self, kept: Vec<Weak<Stored>>) -> Result<()> {
        let _span = trace_span!("fetch", name = "ahead").entered();
        match &self.0 {
            Way::Thread(worker) => worker.send(Job::Fetch(kept)),
            Way::Stream(_) => {
                Stored::fetch(&kept.iter().filter_map(Weak::upgrade).collect::<Vec<_>>())
            }
        }
    }
}

impl Worker {
    fn start() -> Result<Worker> {
        let (jobs, queue) = channel();
        let thread = Builder::new().name("ferrotron-offload".into()).spawn(move || work(&queue));
        let refused = |error| Error::memory("offload", format!("cannot start a thread: {error}"));
        let thread = Some(thread.map_err(refused)?);
        Ok(Worker { jobs: Some(jobs), thread, under_way: Mutex::default() })
    }

    fn wait(&self) -> Result<()> {
        let under_way = lock(&self.under_way).take();
        let moved = under_way.map(|under_way| under_way.recv().unwrap_or_else(|_| Err(ended())));
        moved.transpose().map(drop)
    }

    fn begin(&self, moves: Vec<Move>) -> Result<()> {
        let (done, under_way) = channel();
        self.send(Job::Move(moves, done))?;
        *lock(&self.under_way) = Some(under_way);
        Ok(())
    }

    fn send(&self, job: Job) -> Result<()> {
        let jobs = self.jobs.as_ref().ok_or_else(ended)?;
        jobs.send(job).map_err(|_| ended())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.jobs = None; // the end of the queue is that of the thread
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // whoever waited knows of a panic
        }
    }
}

impl fmt::Debug for Offloader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Offloader")
    }
}

impl Move {
    fn run(self) -> Result<Tensor> {
        let Move { stored, mut to } = self;
        let tensor = stored.tensor();
        // Unless backward needs it no more.
        if Arc::strong_count(&stored) > 1 {
            tensor.move_to(&mut to)?;
            stored.put(to);
        }
        Ok(tensor)
    }
}

fn work(queue: &Receiver<Job>) {
    for job in queue {
        match job {
            Job::Move(moves, done) => {
                let moved = moves.into_iter().map(Move::run).collect();
                let _ = done.send(moved); // nobody may be there any more
            }
            Job::Fetch(kept) => {
                kept.iter().filter_map(Weak::upgrade).for_each(|stored| stored.tensor().prefetch());
            }
        }
    }
}

fn ended() -> Error {
    Error::memory("offload", "the thread that moves activations has ended")
}
