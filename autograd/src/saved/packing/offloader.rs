//! Offloads saved activations to host memory and prefetches them, overlapped with compute: with a thread on a CPU,
//! with the copy stream on a GPU.

use ferrotron_tensor::{Device, Error, Result, Tensor, copy_async};
use std::fmt;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, Weak};
use std::thread::{Builder, JoinHandle};
use tracing::trace_span;

use super::stored::StoredActivation;
use crate::lock;

/// Copies to and from host memory, on one kind of device.
///
/// Offloaded tensors stay in device memory until the next offload or [`Offloader::wait`]. Memory use therefore does
/// not depend on the speed of copies.
pub struct Offloader(Way);

enum Way {
    Thread(Worker),
    /// The GPU's copy stream, with the most recently enqueued tensors.
    Stream(Mutex<Vec<Weak<StoredActivation>>>),
}

/// A worker thread, which ends when this is dropped.
struct Worker {
    /// `None` once dropped.
    jobs: Option<Sender<OffloadRequest>>,
    thread: Option<JoinHandle<()>>,
    /// Receives the completion of the last batch of moves.
    under_way: Mutex<Option<Receiver<Moved>>>,
    /// Each closes when the worker has let go of a batch to be fetched.
    fetching: Mutex<Vec<Receiver<()>>>,
}

/// The device tensors of a completed batch; the receiver frees them.
type Moved = Result<Vec<Tensor>>;

enum OffloadRequest {
    Move(Vec<Move>, Sender<Moved>),
    /// The sender is dropped behind the last of the tensors.
    Fetch(Vec<Weak<StoredActivation>>, Sender<()>),
}

/// A tensor to offload.
pub(super) struct Move {
    pub stored: Arc<StoredActivation>,
    /// Its destination, which has no other holder.
    pub to: Tensor,
}

impl Offloader {
    /// Creates an offloader for tensors of `device`, or of a device of the same kind.
    ///
    /// Errors if the thread cannot be started.
    pub fn start(device: &Device) -> Result<Offloader> {
        match device.is_gpu() {
            true => Ok(Offloader(Way::Stream(Mutex::default()))),
            false => Worker::start().map(|worker| Offloader(Way::Thread(worker))),
        }
    }

    /// Waits until all enqueued tensors are in host memory, and frees their device memory. On a GPU, the compute
    /// stream waits instead of the host.
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

    /// Waits until the worker thread has let go of all tensors that it was told to prefetch. Which of them are in memory
    /// then does not depend on its speed.
    pub(super) fn finish_fetches(&self) {
        if let Way::Thread(worker) = &self.0 {
            std::mem::take(&mut *lock(&worker.fetching)).into_iter().for_each(|fetched| {
                let _ = fetched.recv(); // nothing is ever sent
            });
        }
    }

    /// Starts offloading tensors after waiting for the previous batch, so that a slow disk does not accumulate device
    /// memory.
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
                let lent = copy_async(pairs)?;
                all.iter().zip(lent).for_each(|(stored, lent)| stored.set_moving(lent));
                *lock(under_way) = all.iter().map(Arc::downgrade).collect();
                Ok(())
            }
        }
    }

    /// Starts prefetching tensors that backward will need soon.
    pub(super) fn fetch(&self, kept: Vec<Weak<StoredActivation>>) -> Result<()> {
        let _span = trace_span!("fetch", name = "ahead").entered();
        match &self.0 {
            Way::Thread(worker) => {
                let (open, fetched) = channel();
                worker.send(OffloadRequest::Fetch(kept, open))?;
                lock(&worker.fetching).push(fetched);
                Ok(())
            }
            Way::Stream(_) => {
                StoredActivation::fetch(&kept.iter().filter_map(Weak::upgrade).collect::<Vec<_>>())
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
        let (under_way, fetching) = Default::default();
        Ok(Worker { jobs: Some(jobs), thread, under_way, fetching })
    }

    fn wait(&self) -> Result<()> {
        let under_way = lock(&self.under_way).take();
        let moved = under_way.map(|under_way| under_way.recv().unwrap_or_else(|_| Err(ended())));
        moved.transpose().map(drop)
    }

    fn begin(&self, moves: Vec<Move>) -> Result<()> {
        let (done, under_way) = channel();
        self.send(OffloadRequest::Move(moves, done))?;
        *lock(&self.under_way) = Some(under_way);
        Ok(())
    }

    fn send(&self, job: OffloadRequest) -> Result<()> {
        let jobs = self.jobs.as_ref().ok_or_else(ended)?;
        jobs.send(job).map_err(|_| ended())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.jobs = None; // closing the queue ends the thread
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // a panic was already reported to the caller that waited
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
        // Skipped if backward no longer needs the tensor.
        if Arc::strong_count(&stored) > 1 {
            tensor.move_to(&mut to)?;
            stored.put(to);
        }
        Ok(tensor)
    }
}

fn work(queue: &Receiver<OffloadRequest>) {
    for job in queue {
        match job {
            OffloadRequest::Move(moves, done) => {
                let moved = moves.into_iter().map(Move::run).collect();
                let _ = done.send(moved); // the receiver may have been dropped
            }
            OffloadRequest::Fetch(kept, open) => {
                kept.iter().filter_map(Weak::upgrade).for_each(|stored| stored.tensor().prefetch());
                drop(open);
            }
        }
    }
}

fn ended() -> Error {
    Error::memory("offload", "the thread that moves activations has ended")
}
