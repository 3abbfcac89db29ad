//! Numbers the calls of random layers within a pass, so that each draws numbers of its own, and a recomputed region
//! the same ones again.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex};

use crate::lock;

/// Counts the draws of each random site in a pass. Cloning returns another handle of the same counts.
///
/// A [checkpoint](crate::checkpoint) runs its region again with the numbers of its first run, and
/// [gradcheck](crate::gradcheck()) calls its function with the same ones each time.
///
/// ```
/// use ferrotron_autograd::CallCounts;
/// let calls = CallCounts::default();
/// assert_eq!([calls.next("dropout"), calls.next("dropout"), calls.next("other")], [0, 1, 0]);
/// ```
#[derive(Clone, Default)]
pub struct CallCounts(Arc<Mutex<HashMap<String, u64>>>);

/// The counts that a run drew from, each with its value before.
#[derive(Default)]
pub(crate) struct CallLog(Vec<(CallCounts, String, u64)>);

thread_local! {
    /// The log of the run that this thread is in.
    static ACTIVE: RefCell<Option<CallLog>> = const { RefCell::new(None) };
}

impl CallCounts {
    /// The number of this call of `site`, from 0.
    pub fn next(&self, site: &str) -> u64 {
        let number = self.exchange(site, |number| number + 1);
        ACTIVE.with_borrow_mut(|active| {
            if let Some(log) = active {
                log.note(self, site, number);
            }
        });
        number
    }

    /// Sets the count of `site`, and returns the one before.
    fn exchange(&self, site: &str, next: impl FnOnce(u64) -> u64) -> u64 {
        let mut counts = lock(&self.0);
        match counts.get_mut(site) {
            Some(count) => {
                let before = *count;
                *count = next(before);
                before
            }
            None => {
                counts.insert(site.to_string(), next(0));
                0
            }
        }
    }
}

impl CallLog {
    /// Keeps the first number of each site.
    fn note(&mut self, counts: &CallCounts, site: &str, before: u64) {
        let known = |(other, name, _): &(CallCounts, String, u64)| {
            Arc::ptr_eq(&other.0, &counts.0) && name == site
        };
        if !self.0.iter().any(known) {
            self.0.push((counts.clone(), site.to_string(), before));
        }
    }

    /// Sets every count to its value in the log; returns a log of the values before.
    pub fn rewind(&self) -> CallLog {
        let set = |(counts, site, number): &(CallCounts, String, u64)| {
            let before = counts.exchange(site, |_| *number);
            (counts.clone(), site.clone(), before)
        };
        CallLog(self.0.iter().map(set).collect())
    }
}

/// Runs `f`, and logs which counts it drew from.
pub(crate) fn logged<R>(f: impl FnOnce() -> R) -> (R, CallLog) {
    let outer = ACTIVE.replace(Some(CallLog::default()));
    let result = f();
    let log = ACTIVE.replace(outer).unwrap_or_default();
    ACTIVE.with_borrow_mut(|active| {
        if let Some(outer) = active {
            log.0.iter().for_each(|(counts, site, before)| outer.note(counts, site, *before));
        }
    });
    (result, log)
}

/// Runs `f` with the counts of a log, and sets them back.
pub(crate) fn rewound<R>(log: &CallLog, f: impl FnOnce() -> R) -> R {
    let (before, outer) = (log.rewind(), ACTIVE.replace(None));
    let result = f();
    ACTIVE.replace(outer);
    before.rewind();
    result
}

impl fmt::Debug for CallCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CallCounts({:?})", *lock(&self.0))
    }
}
