//! Catches panics of other crates without the lines that a panic prints.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    /// Whether panics of this thread are caught and print nothing.
    static IS_QUIET: Cell<bool> = const { Cell::new(false) };
}

/// The value of `read`, or none if it panics. Panics of other threads are printed as before.
///
/// Values that `read` changes may be half changed after a panic: the caller uses them no more.
pub fn catch_quietly<T>(read: impl FnOnce() -> T) -> Option<T> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let previous = take_hook();
        set_hook(Box::new(move |panic| {
            // A thread whose locals are gone prints.
            if !IS_QUIET.try_with(Cell::get).unwrap_or(false) {
                previous(panic);
            }
        }));
    });
    let before = IS_QUIET.replace(true);
    let value = catch_unwind(AssertUnwindSafe(read));
    IS_QUIET.set(before);
    value.ok()
}
