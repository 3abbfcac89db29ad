//! Carries a call out on the thread that waits for it.

use std::cell::Cell;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;

use crate::collective::work::Polling;

thread_local! {
    static MAY_SLEEP: Cell<bool> = const { Cell::new(false) };
}

/// Returns whether this thread carries out one call only, so that a pipe may let it sleep.
pub fn may_sleep() -> bool {
    MAY_SLEEP.get()
}

/// Wakes the thread that waits.
struct Unpark {
    thread: Thread,
    woken: AtomicBool,
}

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        if !self.woken.swap(true, Ordering::AcqRel) {
            self.thread.unpark();
        }
    }
}

/// Sets [`may_sleep`] until it is dropped.
struct Sleeping;

impl Drop for Sleeping {
    fn drop(&mut self) {
        MAY_SLEEP.set(false);
    }
}

/// Runs `future` on this thread to its end. Waits awake for a short while, then sleeps.
pub fn block_on<T>(future: impl Future<Output = T>) -> T {
    MAY_SLEEP.set(true);
    let _sleeping = Sleeping;
    let unpark = Arc::new(Unpark { thread: std::thread::current(), woken: AtomicBool::new(false) });
    let waker = Waker::from(unpark.clone());
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(result) = future.as_mut().poll(&mut context) {
            return result;
        }
        let (polling, mut polls) = (Polling::start(), true);
        while polls && !unpark.woken.load(Ordering::Acquire) {
            polls = polling.pause();
        }
        while !unpark.woken.swap(false, Ordering::AcqRel) {
            std::thread::park();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::sync::oneshot::channel;

    #[test]
    fn a_thread_sleeps_until_its_call_can_go_on() {
        for pause in [Duration::ZERO, Duration::from_millis(5)] {
            let (sender, receiver) = channel();
            let other = std::thread::spawn(move || {
                std::thread::sleep(pause);
                sender.send(7)
            });
            let ended = block_on(async {
                assert!(may_sleep());
                receiver.await
            });
            assert!(!may_sleep());
            assert_eq!(ended, Ok(7));
            other.join().unwrap().unwrap();
        }
    }
}
