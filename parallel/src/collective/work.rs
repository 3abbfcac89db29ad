//! A call that is under way.

use ferrotron_tensor::{Error, Result};
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
        let before = Instant::now();
        yield_now();
        let now = Instant::now();
        now < self.until && now - before < TURN
    }
}

/// A call that is under way. It owns its memory; [`Work::wait`] gives the result. Work that is not waited
/// for runs to its end all the same.
#[must_use = "a collective's result, and its error, come from `wait`"]
pub struct Work<T>(Box<dyn FnOnce() -> Result<T> + Send>);

/// The other end of a [`Work`], for the backend that carries the call out.
pub struct Completion(Sender<Result<Memory>>);

impl Completion {
    /// Hands over what the call left behind.
    pub fn complete(self, result: Result<Memory>) {
        // The caller may have dropped its `Work`.
        let _ = self.0.send(result);
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
        (Work(Box::new(wait)), Completion(sender))
    }
}

impl<T: Send + 'static> Work<T> {
    /// Work that is done already.
    pub fn ready(value: T) -> Work<T> {
        Work(Box::new(|| Ok(value)))
    }

    /// Work whose result is what `wait` returns.
    pub fn from_fn(wait: impl FnOnce() -> Result<T> + Send + 'static) -> Work<T> {
        Work(Box::new(wait))
    }

    /// The same work with `f` applied to its result when it is waited for.
    pub fn map<R>(self, f: impl FnOnce(T) -> Result<R> + Send + 'static) -> Work<R> {
        Work(Box::new(move || f((self.0)()?)))
    }

    /// Waits for the end and returns the result.
    ///
    /// Errors as the call did: another rank called something else, did not call in time, or is gone.
    pub fn wait(self) -> Result<T> {
        (self.0)()
    }
}
