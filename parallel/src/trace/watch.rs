//! A subscriber of the `tracing` crate that watches a closure.

use std::sync::Arc;
use tracing::callsite::rebuild_interest_cache;
use tracing::{Dispatch, Subscriber, dispatcher};

/// The watch of a subscriber over closures on this thread, until it is dropped.
///
/// ```
/// use ferrotron_parallel::trace::Watch;
/// use std::sync::Arc;
/// use tracing::subscriber::NoSubscriber;
/// let watch = Watch::new(Arc::new(NoSubscriber::default()));
/// assert_eq!(watch.over(|| 1 + 1), 2);
/// ```
pub struct Watch {
    /// Two handles of the same subscriber. While there is a single one in the process, tracing-core 0.1 asks the
    /// thread that first comes by a span whether it is watched, and takes the answer for all threads:
    /// tokio-rs/tracing, issue 3611.
    handles: Vec<Dispatch>,
}

impl Watch {
    /// A watch of `subscriber`.
    pub fn new<S: Subscriber + Send + Sync + 'static>(subscriber: Arc<S>) -> Watch {
        Watch { handles: vec![Dispatch::new(subscriber.clone()), Dispatch::new(subscriber)] }
    }

    /// Runs `f` with the subscriber told of the spans and events of this thread.
    pub fn over<R>(&self, f: impl FnOnce() -> R) -> R {
        dispatcher::with_default(&self.handles[0], f)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.handles.clear();
        // tracing-core does not notice by itself that there is no subscriber any more.
        rebuild_interest_cache();
    }
}
