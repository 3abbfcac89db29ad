//! Reads and encodes batches on threads, and gives them back in their order.

use super::config::{AREA, MAX_DOCUMENT};
use super::encode::{Encoded, Encoder, Tokens};
use super::reader::{InputBatch, Position, Reader};
use ferrotron_tensor::{Error, Result};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// Time between two looks at the flag of a caller who may want to stop.
const LOOK: Duration = Duration::from_millis(50);

/// Batches on their way, from the reader through the workers. The threads end when it is dropped, or behind the batch
/// that they are at.
pub struct Pipeline {
    ordered: Receiver<Result<Option<Pending>>>,
    /// The batch of which parts were given out.
    current: Option<Pending>,
    budget: Arc<Budget>,
}

/// A batch that some worker has or will get.
struct Pending {
    next: Position,
    read: u64,
    held: usize,
    encoded: Receiver<Result<Encoded>>,
}

/// A part of a batch that is encoded.
pub struct Finished {
    pub columns: Vec<Tokens>,
    /// If the batch ends with it.
    pub end: Option<BatchEnd>,
}

/// The end of a batch.
pub struct BatchEnd {
    pub next: Position,
    pub read: u64,
    pub skipped: u64,
}

type Job = (InputBatch, SyncSender<Result<Encoded>>);

impl Pipeline {
    /// Starts the reader and so many workers.
    pub fn start(reader: Reader, encoder: Encoder, workers: usize) -> Pipeline {
        let (jobs, taken) = sync_channel(workers);
        let (in_order, ordered) = sync_channel(2 * workers + 2);
        let budget = Arc::new(Budget::default());
        let (taken, encoder) = (Arc::new(Mutex::new(taken)), Arc::new(encoder));
        for _ in 0..workers {
            let (taken, encoder) = (taken.clone(), encoder.clone());
            std::thread::spawn(move || work(&taken, &encoder));
        }
        let limit = budget.clone();
        std::thread::spawn(move || read(reader, &limit, &jobs, &in_order));
        Pipeline { ordered, current: None, budget }
    }

    /// The next part of the next batch; none at the end of the input, or if `stop` is set.
    ///
    /// # Errors
    /// Those of the reader and of the workers, in the order of the input.
    pub fn next(&mut self, stop: &AtomicBool) -> Result<Option<Finished>> {
        let ended = || Error::io(AREA, "a thread ended without an answer");
        let pending = match self.current.take() {
            Some(pending) => pending,
            None => {
                let Some(pending) = wait(&self.ordered, stop) else { return Ok(None) };
                let Some(pending) = pending.ok_or_else(ended)?? else { return Ok(None) };
                pending
            }
        };
        let Some(encoded) = wait(&pending.encoded, stop) else { return Ok(None) };
        let Encoded { columns, end } = encoded.ok_or_else(ended)??;
        let Pending { next, read, held, .. } = pending;
        let end = end.map(|skipped| BatchEnd { next, read, skipped });
        match &end {
            Some(_) => self.budget.give_back(held),
            None => self.current = Some(pending),
        }
        Ok(Some(Finished { columns, end }))
    }
}

impl Drop for Pipeline {
    fn drop(&mut self) {
        self.budget.close();
    }
}

/// Waits for the next value of a channel: the value, or `Some(None)` if it is closed; `None` if `stop` is set first.
fn wait<T>(channel: &Receiver<T>, stop: &AtomicBool) -> Option<Option<T>> {
    loop {
        if stop.load(Relaxed) {
            return None;
        }
        match channel.recv_timeout(LOOK) {
            Ok(value) => return Some(Some(value)),
            Err(RecvTimeoutError::Disconnected) => return Some(None),
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}

fn read(
    mut reader: Reader,
    budget: &Budget,
    jobs: &SyncSender<Job>,
    in_order: &SyncSender<Result<Option<Pending>>>,
) {
    while budget.wait_for_room() {
        let batch = match reader.next_batch() {
            Ok(Some(batch)) => batch,
            end => {
                let _ = in_order.send(end.map(|_| None));
                return;
            }
        };
        let held = batch.payload.bytes();
        let (reply, encoded) = sync_channel(1);
        let pending = Pending { next: batch.next, read: batch.read, held, encoded };
        let goes_on = budget.take(held)
            && in_order.send(Ok(Some(pending))).is_ok()
            && jobs.send((batch, reply)).is_ok();
        if !goes_on {
            return;
        }
    }
}

fn work(jobs: &Mutex<Receiver<Job>>, encoder: &Encoder) {
    loop {
        let Ok(job) = jobs.lock().map(|jobs| jobs.recv()) else { return };
        let Ok((batch, reply)) = job else { return };
        // Nobody waits for it once the pipeline is dropped.
        let mut is_wanted = true;
        let encoded = encoder.encode(&batch, &mut |part| {
            is_wanted = reply.send(Ok(part)).is_ok();
            is_wanted
        });
        if let Err(error) = encoded {
            is_wanted &= reply.send(Err(error)).is_ok();
        }
        if !is_wanted {
            return;
        }
    }
}

/// Bounds the bytes of batches on their way. One batch is always let through.
#[derive(Default)]
struct Budget {
    held: Mutex<Held>,
    changed: Condvar,
}

#[derive(Default)]
struct Held {
    bytes: usize,
    is_closed: bool,
}

impl Budget {
    /// Waits until there is room for so many bytes. False if nobody needs them any more.
    fn take(&self, bytes: usize) -> bool {
        let held = self.held.lock().expect("no holder panics");
        let has_no_room = |held: &mut Held| {
            !held.is_closed && held.bytes > 0 && held.bytes + bytes > MAX_DOCUMENT
        };
        let mut held = self.changed.wait_while(held, has_no_room).expect("no holder panics");
        held.bytes += bytes;
        !held.is_closed
    }

    /// Waits until no large batch is on its way, so that no other one is read meanwhile. False if nobody needs more.
    fn wait_for_room(&self) -> bool {
        let held = self.held.lock().expect("no holder panics");
        let is_full = |held: &mut Held| !held.is_closed && held.bytes > MAX_DOCUMENT / 2;
        let held = self.changed.wait_while(held, is_full).expect("no holder panics");
        !held.is_closed
    }

    fn give_back(&self, bytes: usize) {
        self.held.lock().expect("no holder panics").bytes -= bytes;
        self.changed.notify_all();
    }

    fn close(&self) {
        self.held.lock().expect("no holder panics").is_closed = true;
        self.changed.notify_all();
    }
}
