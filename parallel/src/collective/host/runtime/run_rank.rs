//! Runs a rank, and tells the others if it ends with an error or a panic.

use ferrotron_tensor::{Error, Result};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::collective::host::runtime::world_health::WorldHealth;

/// Runs a rank's function; if it fails or panics, tells the other ranks, so that none waits for it.
pub fn run_rank<T>(rank: usize, shared: &WorldHealth, f: impl FnOnce() -> Result<T>) -> Result<T> {
    let result = catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|panic| {
        let what = panicked(panic);
        shared.fail(&format!("rank {rank} {what}"));
        Err(Error::communication("", what).at(&format!("rank {rank}")))
    });
    if let Err(error) = &result {
        shared.fail(&format!("rank {rank} ended with an error: {error}"));
    }
    result
}

/// Formats a panic with its message.
pub fn panicked(panic: Box<dyn Any + Send>) -> String {
    let message = panic
        .downcast_ref::<&str>()
        .map(|message| message.to_string())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_string());
    format!("panicked: {message}")
}
