//! Retention: the checkpoints of a run's folder that stay.

use ferrotron_tensor::{Error, Result};
use std::path::{Path, PathBuf};

use super::folder;

/// The rule by which checkpoints of a run's folder are deleted.
///
/// A checkpoint stays if it is one of the last that were written, if its step is a multiple of the interval, or if
/// `latest` names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retention {
    /// Number of checkpoints, of those written last, that stay.
    pub last: usize,
    /// Multiples of this number of steps stay, as with Megatron's `--save-retain-interval`.
    pub interval: Option<u64>,
}

impl Retention {
    /// Returns the checkpoints of `dir` that do not stay, in the order in which they were written; none without `latest`.
    pub fn superseded(&self, dir: &Path) -> Vec<PathBuf> {
        let Some(latest) = folder::latest(dir) else { return Vec::new() };
        let kept = |checkpoint: &Path| {
            let multiple = self.interval.zip(folder::step(checkpoint));
            checkpoint.ends_with(&latest)
                || multiple.is_some_and(|(interval, step)| step.is_multiple_of(interval))
        };
        let old = folder::list(dir).into_iter().skip(self.last);
        let mut old: Vec<PathBuf> = old.filter(|checkpoint| !kept(checkpoint)).collect();
        old.reverse();
        old
    }

    /// Deletes the checkpoints of `dir` that do not stay. No other process may delete there.
    ///
    /// # Errors
    /// A checkpoint that cannot be deleted.
    pub fn apply(&self, dir: &Path) -> Result<()> {
        let deleted = |checkpoint: PathBuf| folder::delete(&checkpoint);
        let faults = self.superseded(dir).into_iter().try_for_each(deleted);
        faults.map_err(|fault| Error::io("checkpoint", fault))
    }
}

/// Removes the remains of killed processes in `dir`: half-written and half-deleted checkpoints. No process may be
/// saving there.
///
/// # Errors
/// A folder that cannot be read or written.
pub fn clean(dir: &Path) -> Result<()> {
    folder::clean(dir).map_err(|fault| Error::io("checkpoint", fault))
}
