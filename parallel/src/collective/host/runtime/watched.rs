//! A value that tasks wait for.

use std::sync::{Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;

/// A value, and the tasks that wait until it is as they want it. They are woken in the order in which they came, so that
/// a simulation repeats: tokio's channel for this wakes them in an order of its own.
#[derive(Default)]
pub struct Watched<T> {
    value: Mutex<T>,
    changed: Notify,
}

impl<T> Watched<T> {
    /// The value, locked.
    pub fn get(&self) -> MutexGuard<'_, T> {
        self.value.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the value, and lets those who wait look at it.
    pub fn change<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        let result = change(&mut self.get());
        self.changed.notify_waiters();
        result
    }

    /// Waits until the value is as wanted.
    pub async fn wait_for(&self, is_wanted: impl Fn(&T) -> bool) {
        loop {
            let changed = self.changed.notified(); // from here on nothing is missed
            if is_wanted(&self.get()) {
                return;
            }
            changed.await;
        }
    }
}
