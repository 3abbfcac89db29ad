//! Work that may take longer than a call of a group: reading many files, for example.
//!
//! A rank that waits in a collective gives up after the group's timeout. So the work runs in a thread while the ranks sum,
//! every tenth of a second, how many of them are not done: no call is long, and a rank that dies is noticed.

use ferrotron_tensor::{Device, Error, Result};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use crate::collective::Group;

/// Longest time between two sums.
pub const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Runs `work`, and returns its result when all ranks of `group` are done; all call this. The work should end soon after
/// its argument is set, which means that another rank has failed.
///
/// # Errors
/// That of the work, at once: it ends the call of the other ranks, with the same reason.
///
/// ```
/// use ferrotron_parallel::collective::{WorldConfig, run_threads};
/// use ferrotron_parallel::long_work::run_long;
/// let squares = run_threads(2, &WorldConfig::default(), |world| {
///     let rank = world.rank();
///     run_long(&world.everyone()?, |_| Ok(rank * rank))
/// });
/// assert_eq!(squares.into_iter().collect::<ferrotron_tensor::Result<Vec<_>>>()?, [0, 1]);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub fn run_long<R: Send>(
    group: &Group,
    work: impl FnOnce(&AtomicBool) -> Result<R> + Send,
) -> Result<R> {
    let cancelled = AtomicBool::new(false);
    if group.size() == 1 {
        return work(&cancelled);
    }
    let host = Device::cpu(1)?;
    thread::scope(|scope| {
        let (sender, results) = channel();
        let cancelled = &cancelled;
        // The receiver is gone if the others have failed.
        scope.spawn(move || drop(sender.send(work(cancelled))));
        let mut own = None;
        let mut wait = || loop {
            if own.is_none() {
                own = match results.recv_timeout(POLL_INTERVAL) {
                    Ok(result) => Some(result?),
                    Err(RecvTimeoutError::Timeout) => None,
                    Err(RecvTimeoutError::Disconnected) => {
                        let message = "a thread has ended without a result";
                        return Err(Error::value("work", message));
                    }
                };
            }
            if group.sum(&host, f64::from(u8::from(own.is_none())))? == 0.0 {
                return Ok(());
            }
        };
        let waited = wait();
        cancelled.store(true, Relaxed);
        waited?;
        own.ok_or_else(|| Error::value("work", "it has no result"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::{WorldConfig, run_threads};
    use std::time::Instant;

    #[test]
    fn a_rank_may_take_longer_than_a_call() {
        let config = WorldConfig { timeout: Duration::from_millis(800) };
        let found = run_threads(3, &config, |world| {
            let rank = world.rank();
            run_long(&world.everyone()?, |_| {
                thread::sleep(Duration::from_millis(1000 * rank as u64));
                Ok(rank)
            })
        });
        assert_eq!(found.into_iter().collect::<Result<Vec<_>>>().unwrap(), [0, 1, 2]);
    }

    #[test]
    fn a_rank_that_fails_ends_the_others() {
        let started = Instant::now();
        let found = run_threads(3, &WorldConfig::default(), |world| {
            let fails = world.rank() == 1;
            run_long(&world.everyone()?, |cancelled| {
                while !fails && !cancelled.load(Relaxed) {
                    thread::sleep(Duration::from_millis(1));
                }
                Err::<(), _>(Error::io("read", if fails { "no disk" } else { "cancelled" }))
            })
        });
        for error in found {
            assert!(error.unwrap_err().to_string().contains("no disk"));
        }
        assert!(started.elapsed() < Duration::from_secs(20));
    }
}
