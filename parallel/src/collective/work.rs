//! A call that is under way.

use ferrotron_tensor::{Error, Result};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, TryRecvError, channel};
use std::thread::yield_now;
use std::time::{Duration, Instant};
use tracing::trace_span;

use super::Memory;

/// Time for which a thread that waits for the other one of its rank polls before it sleeps. Waking takes longer than
/// many calls; polling any longer would take a core from working threads.
const SPIN_TIME: Duration = Duration::from_micros(30);

/// Time of a yield in which another thread has run on this core. More threads than cores are awake then, and one that
/// polls only takes turns from them.
const TURN: Duration = Duration::from_micros(5);

/// Polling before a thread sleeps.
pub struct Polling {
    until: Instant,
}

impl Polling {
    /// Polling from now on.
    pub fn start() -> Polling {
        Polling { until: Instant::now() + SPIN_TIME }
    }

    /// Yields to threads that compute. Returns whether to look again.
    pub fn pause(&self) -> bool {
        yield_briefly() && Instant::now() < self.until
    }
}

/// Yields to threads that compute. Returns whether none has run meanwhile.
pub fn yield_briefly() -> bool {
    let before = Instant::now();
    yield_now();
    before.elapsed() < TURN
}

thread_local! {
    /// The time for which this thread has waited in calls.
    static WAITED: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

/// Returns what `f` returns, and the time for which it has waited in collectives: in [`Work::wait`] and in the calls of
/// [`Group::blocking`](super::Group::blocking), on this thread. Calls on tensors of a GPU by NCCL are waited for by the GPU, and
/// take none.
///
/// ```
/// use ferrotron_parallel::collective::{Work, waited_during};
/// use std::time::Duration;
/// let call = Work::from_fn(|| Ok(std::thread::sleep(Duration::from_millis(2))));
/// let (result, waited) = waited_during(|| call.wait());
/// assert!(result.is_ok() && waited >= Duration::from_millis(2));
/// ```
pub fn waited_during<R>(f: impl FnOnce() -> R) -> (R, Duration) {
    let before = WAITED.get();
    let result = f();
    (result, WAITED.get() - before)
}

/// Adds the time that `wait` takes to what this thread has waited.
pub(super) fn waiting<R>(wait: impl FnOnce() -> R) -> R {
    let (before, started) = (WAITED.get(), Instant::now());
    let result = wait();
    // What waits within it has counted itself.
    WAITED.set(before + started.elapsed());
    result
}

/// A call that is under way. It owns its memory; [`Work::wait`] gives the result. Work that is not waited
/// for runs to its end all the same.
#[must_use = "a collective's result, and its error, come from `wait`"]
pub struct Work<T> {
    wait: Box<dyn FnOnce() -> Result<T> + Send>,
    /// Set when the call has ended; none if there was nothing to wait for.
    done: Option<Arc<AtomicBool>>,
}

/// The other end of a [`Work`], for the backend that carries the call out.
pub struct Completion {
    sender: Sender<Result<Memory>>,
    done: Arc<AtomicBool>,
}

impl Completion {
    /// Hands over what the call left behind.
    pub fn complete(self, result: Result<Memory>) {
        // The caller may have dropped its `Work`.
        let _ = self.sender.send(result);
        self.done.store(true, Ordering::Release);
    }
}

impl Work<Memory> {
    /// Work and the end at which it is completed.
    pub fn new() -> (Work<Memory>, Completion) {
        let (sender, receiver) = channel();
        let gone = |_| Error::communication("collective", "the rank's progress thread has ended");
        let wait = move || {
            let _span = trace_span!("wait").entered();
            let polling = Polling::start();
            let mut polls = true;
            while polls {
                match receiver.try_recv() {
                    Ok(result) => return result,
                    Err(TryRecvError::Empty) => polls = polling.pause(),
                    Err(TryRecvError::Disconnected) => break,
                }
            }
            receiver.recv().map_err(gone)?
        };
        let done = Arc::new(AtomicBool::new(false));
        let work = Work { wait: Box::new(wait), done: Some(done.clone()) };
        (work, Completion { sender, done })
    }
}

impl<T: Send + 'static> Work<T> {
    /// Work that is done already.
    pub fn ready(value: T) -> Work<T> {
        Work::ended(Ok(value))
    }

    /// Work that has ended, well or not.
    pub fn ended(result: Result<T>) -> Work<T> {
        Work { wait: Box::new(|| result), done: None }
    }

    /// Work whose result is what `wait` returns. Nobody knows before that whether it is done.
    pub fn from_fn(wait: impl FnOnce() -> Result<T> + Send + 'static) -> Work<T> {
        Work { wait: Box::new(wait), done: Some(Arc::default()) }
    }

    /// The same work with `f` applied to its result when it is waited for.
    pub fn map<R>(self, f: impl FnOnce(T) -> Result<R> + Send + 'static) -> Work<R> {
        let wait = self.wait;
        Work { wait: Box::new(move || f(wait()?)), done: self.done }
    }

    /// Waits for the end and returns the result.
    ///
    /// Errors as the call did: another rank called something else, did not call in time, or is gone.
    pub fn wait(self) -> Result<T> {
        match self.done {
            Some(_) => waiting(self.wait),
            None => (self.wait)(),
        }
    }

    /// Returns whether the call has ended, well or not, so that [`Work::wait`] would not wait.
    pub fn is_done(&self) -> bool {
        self.done.as_ref().is_none_or(|done| done.load(Ordering::Acquire))
    }
}
