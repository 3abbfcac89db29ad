//! Locks without poisoning.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a value that changes only by single assignments. A poisoned lock then means that another thread panicked,
/// not that the value is inconsistent.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
