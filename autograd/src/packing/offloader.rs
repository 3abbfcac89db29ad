//! A thread that moves what is kept for backward to host memory while others compute.

use ferrotron_tensor::{Error, Result, Tensor};
use std::fmt;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Builder, JoinHandle};

use super::stored::Stored;
use crate::{KeptTensor, lock};

/// A thread of its own for copies to host memory and for fetching ahead. It ends when this is dropped.
pub struct Offloader {
    /// Until it is dropped.
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    /// Says when what was handed over last is in host memory.
    under_way: Mutex<Option<Receiver<Moved>>>,
}

/// The tensors that are in host memory now, as the device has them: whoever waits frees these. So how much is in use
/// at a time does not depend on how fast the thread is.
type Moved = Result<Vec<Tensor>>;

enum Job {
    Move(Vec<Move>, Sender<Moved>),
    Fetch(Vec<KeptTensor>),
}

/// A tensor to be moved.
pub(super) struct Move {
    pub kept: KeptTensor,
    pub from: Stored,
    /// Its place, which nobody else holds.
    pub to: Tensor,
}

impl Move {
    fn run(self) -> Result<Tensor> {
        let Move { kept, from, mut to } = self;
        let tensor = from.tensor.clone();
        if kept.is_kept() {
            tensor.move_to(&mut to)?;
            kept.replace(from.moved(to));
        }
        Ok(tensor)
    }
}

impl Offloader {
    /// Starts the thread.
    ///
    /// Errors if the system has none.
    pub fn start() -> Result<Offloader> {
        let (jobs, queue) = channel();
        let thread = Builder::new().name("ferrotron-offload".into()).spawn(move || work(&queue));
        let refused = |error| Error::memory("offload", format!("cannot start a thread: {error}"));
        let thread = Some(thread.map_err(refused)?);
        Ok(Offloader { jobs: Some(jobs), thread, under_way: Mutex::default() })
    }

    /// Waits until everything that was handed over is in host memory, and frees the device's.
    ///
    /// Errors if the thread has ended.
    pub fn wait(&self) -> Result<()> {
        let under_way = lock(&self.under_way).take();
        let moved = under_way.map(|under_way| under_way.recv().unwrap_or_else(|_| Err(ended())));
        moved.transpose().map(drop)
    }

    /// Begins to move tensors. What was handed over before is waited for, so that a disk slower than the computation
    /// does not let it pile up.
    pub(super) fn begin(&self, moves: Vec<Move>) -> Result<()> {
        self.wait()?;
        let (done, under_way) = channel();
        self.send(Job::Move(moves, done))?;
        *lock(&self.under_way) = Some(under_way);
        Ok(())
    }

    /// Begins to fetch tensors that backward will need soon.
    pub(super) fn fetch(&self, kept: Vec<KeptTensor>) -> Result<()> {
        self.send(Job::Fetch(kept))
    }

    fn send(&self, job: Job) -> Result<()> {
        let jobs = self.jobs.as_ref().ok_or_else(ended)?;
        jobs.send(job).map_err(|_| ended())
    }
}

impl Drop for Offloader {
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

fn work(queue: &Receiver<Job>) {
    for job in queue {
        match job {
            Job::Move(moves, done) => {
                let moved = moves.into_iter().map(Move::run).collect();
                let _ = done.send(moved); // nobody may be there any more
            }
            Job::Fetch(kept) => kept.iter().for_each(KeptTensor::prefetch),
        }
    }
}

fn ended() -> Error {
    Error::memory("offload", "the thread that moves activations has ended")
}
