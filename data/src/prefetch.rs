//! Reads the next samples on a thread of its own, while a step computes.
//!
//! A trainer takes the batches of a step by [`Samples::batch`] and then announces those of the next one by
//! [`Samples::prefetch`]. The thread reads them in that order and holds them, at most one step's, until they are taken. A
//! batch that was not announced is read at once by the caller, so that batches are the same with and without a thread.

use crate::{Batch, Samples};
use ferrotron_tensor::{Error, Result};
use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// First sample and number of samples of a batch.
type Request = (u64, usize);

/// Samples that a thread reads ahead.
///
/// ```
/// use ferrotron_data::{Batch, GeneratedSamples, Prefetch, Samples};
/// use std::sync::Arc;
/// let numbers = GeneratedSamples::new(1, 100, |first, n| {
///     let x: Vec<f32> = (0..n as u64).map(|i| (first + i) as f32).collect();
///     Batch::new(first, n, 1).with("x", x, &[n, 1])
/// });
/// let samples = Prefetch::new(Arc::new(numbers))?;
/// samples.prefetch(&[(8, 2), (10, 2)]);
/// assert_eq!(samples.batch(8, 2)?.get::<f32>("x")?, [8.0, 9.0]);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub struct Prefetch {
    samples: Arc<dyn Samples>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    queue: Mutex<Queue>,
    /// Signalled when the queue changes.
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    /// Announced batches in order: those that are read, the one that is being read, and those that wait.
    entries: VecDeque<(Request, State)>,
    ends: bool,
}

enum State {
    Waiting,
    Reading,
    Ready(Result<Batch>),
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, queue: MutexGuard<'a, Queue>) -> MutexGuard<'a, Queue> {
        self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner)
    }
}

impl Prefetch {
    /// Starts a thread that reads `samples`.
    ///
    /// # Errors
    /// The system starts no more threads.
    pub fn new(samples: Arc<dyn Samples>) -> Result<Prefetch> {
        let shared = Arc::new(Shared { queue: Mutex::default(), changed: Condvar::new() });
        let (source, own) = (samples.clone(), shared.clone());
        let thread = std::thread::Builder::new()
            .name("data".into())
            .spawn(move || read_ahead(&*source, &own))
            .map_err(|error| Error::io("data", format!("cannot start a thread: {error}")))?;
        Ok(Prefetch { samples, shared, thread: Some(thread) })
    }
}

/// Reads what is announced until the queue ends.
fn read_ahead(samples: &dyn Samples, shared: &Shared) {
    let mut queue = shared.lock();
    while !queue.ends {
        let next = queue.entries.iter_mut().find(|entry| matches!(entry.1, State::Waiting));
        let Some((request, state)) = next else {
            queue = shared.wait(queue);
            continue;
        };
        let request = *request;
        *state = State::Reading;
        drop(queue);
        let batch = read(samples, request);
        queue = shared.lock();
        // It may have been given up in the meantime.
        let entry = queue
            .entries
            .iter_mut()
            .find(|entry| entry.0 == request && matches!(entry.1, State::Reading));
        if let Some(entry) = entry {
            entry.1 = State::Ready(batch);
        }
        shared.changed.notify_all();
    }
}

/// Reads a batch; a panic becomes an error.
fn read(samples: &dyn Samples, (first, count): Request) -> Result<Batch> {
    let words = |panic: Box<dyn Any + Send>| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        let text = text.unwrap_or("for an unknown reason").to_string();
        let message =
            format!("reading the samples {first} to {} panicked: {text}", first + count as u64 - 1);
        Err(Error::value("data", message))
    };
    catch_unwind(AssertUnwindSafe(|| samples.batch(first, count))).unwrap_or_else(words)
}

impl Samples for Prefetch {
    /// Waits for the batch if the thread has not read it yet.
    ///
    /// # Errors
    /// The error of reading the batch.
    fn batch(&self, first_sample: u64, micro_batch: usize) -> Result<Batch> {
        let request = (first_sample, micro_batch);
        let mut queue = self.shared.lock();
        while let Some(place) = queue.entries.iter().position(|entry| entry.0 == request) {
            match queue.entries.remove(place) {
                Some((_, State::Ready(batch))) => return batch,
                // Nobody has begun: the caller is as fast.
                Some((_, State::Waiting)) | None => break,
                Some(entry) => queue.entries.insert(place, entry),
            }
            queue = self.shared.wait(queue);
        }
        drop(queue);
        self.samples.batch(first_sample, micro_batch)
    }

    fn order_state(&self, sample: u64) -> Option<Vec<u64>> {
        self.samples.order_state(sample)
    }

    fn resume_order(&self, state: &[u64]) {
        self.samples.resume_order(state);
    }

    fn seq_length(&self) -> usize {
        self.samples.seq_length()
    }

    /// Replaces what was announced before and is not taken.
    fn prefetch(&self, batches: &[(u64, usize)]) {
        let mut queue = self.shared.lock();
        queue.entries.retain(|entry| batches.contains(&entry.0));
        for request in batches {
            if !queue.entries.iter().any(|entry| entry.0 == *request) {
                queue.entries.push_back((*request, State::Waiting));
            }
        }
        self.shared.changed.notify_all();
    }
}

impl Drop for Prefetch {
    fn drop(&mut self) {
        self.shared.lock().ends = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic of the samples has been caught: the thread has none of its own.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GeneratedSamples;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::{Duration, Instant};

    /// Numbers whose reading takes `pause`, fails at sample 100 and panics at sample 200.
    fn slow(pause: Duration, reads: Arc<AtomicUsize>) -> Prefetch {
        let numbers = move |first: u64, n: usize| {
            std::thread::sleep(pause);
            reads.fetch_add(1, Ordering::Relaxed);
            assert_ne!(first, 200, "two hundred");
            if first == 100 {
                return Err(Error::io("data", "cannot read 'shard.bin'"));
            }
            let x: Vec<f32> = (0..n as u64).map(|i| (first + i) as f32).collect();
            Batch::new(first, n, 1).with("x", x, &[n, 1])
        };
        Prefetch::new(Arc::new(GeneratedSamples::new(1, 1000, numbers))).unwrap()
    }

    fn x(samples: &Prefetch, first: u64) -> Vec<f32> {
        samples.batch(first, 2).unwrap().get::<f32>("x").unwrap().to_vec()
    }

    #[test]
    fn a_step_does_not_wait_for_a_slow_file() {
        let pause = Duration::from_millis(30);
        let samples = slow(pause, Arc::default());
        samples.prefetch(&[(0, 2), (2, 2)]);
        let mut waited = Duration::ZERO;
        for step in 0..6_u64 {
            // A step computes for longer than its two batches take to read.
            std::thread::sleep(4 * pause);
            let started = Instant::now();
            let found = [x(&samples, 4 * step), x(&samples, 4 * step + 2)].concat();
            waited += started.elapsed();
            let want: Vec<f32> = (4 * step..4 * step + 4).map(|i| i as f32).collect();
            assert_eq!(found, want);
            samples.prefetch(&[(4 * step + 4, 2), (4 * step + 6, 2)]);
        }
        // Without the thread, 360 ms.
        assert!(waited < 4 * pause, "{waited:?}");
    }

    #[test]
    fn what_was_not_announced_is_read_by_the_caller() {
        let reads = Arc::new(AtomicUsize::new(0));
        let samples = slow(Duration::ZERO, reads.clone());
        assert_eq!(x(&samples, 7), [7.0, 8.0]);
        samples.prefetch(&[(0, 2), (2, 2)]);
        assert_eq!(x(&samples, 2), [2.0, 3.0]);
        // A rewound run announces other samples, and what it does not take is given up.
        samples.prefetch(&[(50, 2)]);
        assert_eq!((x(&samples, 50), x(&samples, 0)), (vec![50.0, 51.0], vec![0.0, 1.0]));
        assert!(samples.shared.lock().entries.is_empty());
    }

    #[test]
    fn a_failure_is_told_when_its_batch_is_taken() {
        let samples = slow(Duration::ZERO, Arc::default());
        samples.prefetch(&[(0, 2), (100, 2), (200, 2), (4, 2)]);
        assert_eq!(x(&samples, 0), [0.0, 1.0]);
        let error = samples.batch(100, 2).unwrap_err().to_string();
        assert_eq!(error, "data: cannot read 'shard.bin'");
        while !matches!(samples.shared.lock().entries.back(), Some((_, State::Ready(_)))) {
            std::thread::yield_now();
        }
        let error = samples.batch(200, 2).unwrap_err().to_string();
        assert!(
            error.contains("reading the samples 200 to 201 panicked")
                && error.contains("two hundred"),
            "{error}"
        );
        assert_eq!(x(&samples, 4), [4.0, 5.0], "the thread goes on");
    }
}
