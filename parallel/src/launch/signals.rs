//! The signals that ask a job to save and stop.
//!
//! | signal | sent by |
//! |---|---|
//! | SIGINT | Ctrl-C |
//! | SIGTERM | `kill`, Slurm at a job's time limit, containers |
//! | SIGHUP | a terminal that is closed |
//! | SIGUSR1, SIGUSR2 | `sbatch --signal=USR1@60`: Slurm, a while before a job's time limit |

use std::collections::BTreeMap;
use std::io::{Error, Result};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Returns the signals that ask this process to stop: all in the table, without SIGHUP if it is ignored, as under
/// `nohup`.
pub fn stop_signals() -> Vec<i32> {
    let mut signals = vec![libc::SIGINT, libc::SIGTERM, libc::SIGUSR1, libc::SIGUSR2];
    if !is_ignored(libc::SIGHUP) {
        signals.push(libc::SIGHUP);
    }
    signals
}

fn is_ignored(signal: i32) -> bool {
    // SAFETY: `sigaction` is plain data, for which zeros are valid.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: the call changes nothing, and writes to `action`, which outlives it.
    let result = unsafe { libc::sigaction(signal, std::ptr::null(), &mut action) };
    result == 0 && action.sa_sigaction == libc::SIG_IGN
}

/// Gives `signals` the system's reaction. Allowed between fork and exec.
pub fn reset(signals: &[i32]) -> Result<()> {
    for &signal in signals {
        // SAFETY: the call takes and runs no handler of ours.
        if unsafe { libc::signal(signal, libc::SIG_DFL) } == libc::SIG_ERR {
            return Err(Error::last_os_error());
        }
    }
    Ok(())
}

/// Flags of the signals that the launcher was sent and passes on to the ranks; signal handlers set them.
#[derive(Debug, Clone)]
pub struct SignalFlags(BTreeMap<i32, Arc<AtomicBool>>);

impl Default for SignalFlags {
    /// A flag for each of [`stop_signals`].
    fn default() -> SignalFlags {
        SignalFlags::new(&stop_signals())
    }
}

impl SignalFlags {
    /// A flag for each of `signals`, by their numbers.
    pub fn new(signals: &[i32]) -> SignalFlags {
        SignalFlags(signals.iter().map(|&signal| (signal, Arc::default())).collect())
    }

    /// Returns each signal's number and flag.
    pub fn iter(&self) -> impl Iterator<Item = (i32, &Arc<AtomicBool>)> {
        self.0.iter().map(|(&signal, flag)| (signal, flag))
    }
}
