//! Retention: the checkpoints of a run's folder that stay.

use ferrotron_tensor::{Error, Result};
use std::path::{Path, PathBuf};

use super::folder;
use super::summary::inspect;

/// The rule by which checkpoints of a run's folder are deleted.
///
/// A checkpoint stays if it is one of the last that were written, if its step is a multiple of the interval, or if
/// `latest` names it. One that cannot be opened stays as well, and is not counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retention {
    /// Number of checkpoints, of those written last, that stay.
    pub last: usize,
    /// Multiples of this number of steps stay, as with Megatron's `--save-retain-interval`.
    pub interval: Option<u64>,
}

/// The checkpoints of a folder that a [`Retention`] counts, deletes and cannot read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RetentionPlan {
    /// The checkpoint written last of those that are counted.
    pub newest: Option<PathBuf>,
    /// The checkpoints that do not stay, in the order in which they were written.
    pub superseded: Vec<PathBuf>,
    /// A line for each checkpoint that was to be counted and cannot be opened: headers and lengths are looked at,
    /// checksums of tensors are not compared.
    pub damaged: Vec<String>,
}

impl Retention {
    /// Looks through the checkpoints of `dir`. Without `latest` all stay.
    pub fn plan(&self, dir: &Path) -> RetentionPlan {
        let mut plan = RetentionPlan::default();
        let Some(latest) = folder::latest(dir) else { return plan };
        let kept = |checkpoint: &Path| {
            let multiple = self.interval.zip(folder::step(checkpoint));
            checkpoint.ends_with(&latest)
                || multiple.is_some_and(|(interval, step)| step.is_multiple_of(interval))
        };
        let mut counted = 0;
        for checkpoint in folder::list(dir) {
            if counted >= self.last && kept(&checkpoint) {
                continue; // and need not be read
            }
            match inspect(&checkpoint) {
                Ok(_) if counted < self.last => {
                    counted += 1;
                    plan.newest.get_or_insert(checkpoint);
                }
                Ok(_) => plan.superseded.push(checkpoint),
                Err(fault) if checkpoint.exists() => plan.damaged.push(format!(
                    "'{}' is neither counted nor deleted, it cannot be loaded: {fault}",
                    checkpoint.display()
                )),
                Err(_) => {}
            }
        }
        plan.superseded.reverse();
        plan
    }

    /// Deletes the checkpoints of `dir` that do not stay, and returns what it did. No other process may delete there.
    ///
    /// # Errors
    /// A checkpoint that cannot be deleted.
    pub fn apply(&self, dir: &Path) -> Result<RetentionPlan> {
        let plan = self.plan(dir);
        plan.delete()?;
        Ok(plan)
    }
}

impl RetentionPlan {
    /// Deletes what does not stay. No other process may delete there.
    ///
    /// # Errors
    /// A checkpoint that cannot be deleted.
    pub fn delete(&self) -> Result<()> {
        let faults = self.superseded.iter().try_for_each(|checkpoint| folder::delete(checkpoint));
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
