//! Signals that ask a run to end: before its first step at once, later behind the step and a checkpoint.

use ferrotron::models::stop::StopFlag;
use ferrotron::parallel::launch::{INTERRUPTED, SAME_INTERRUPT, SignalFlags, stop_signals};
use ferrotron::{Error, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGXFSZ};
use signal_hook::{flag, low_level};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Instant;

use super::terminal;

/// Lets a write beyond `ulimit -f` fail, as one to a full disk does: SIGXFSZ would end the program without a word.
pub fn outlive_file_size_limit() {
    let _ = flag::register(SIGXFSZ, Arc::default());
}

/// The signals of this process.
pub struct ExitSignals {
    numbers: Vec<i32>,
    /// Whether there is nothing to save, yet or any more.
    is_loading: Arc<AtomicBool>,
}

impl ExitSignals {
    /// Lets [`stop_signals`] and another one, if there is, end this process with [`INTERRUPTED`] at once.
    ///
    /// # Errors
    /// A signal that cannot be handled.
    pub fn register(another: Option<i32>) -> Result<ExitSignals> {
        let mut numbers = stop_signals();
        numbers.extend(another);
        numbers.sort_unstable();
        numbers.dedup();
        let is_loading = Arc::new(AtomicBool::new(true));
        for &signal in &numbers {
            let code = i32::from(INTERRUPTED);
            let registered = flag::register_conditional_shutdown(signal, code, is_loading.clone());
            registered.map_err(unhandled)?;
        }
        Ok(ExitSignals { numbers, is_loading })
    }

    /// Returns a flag that the signals set from here on. A Ctrl-C behind another signal, or [`SAME_INTERRUPT`] after the
    /// first Ctrl-C or later, ends the process at once. A second SIGTERM does not: some send it to a job's processes and
    /// to their parents, who pass it on.
    pub fn stop_flag(&self) -> Result<StopFlag> {
        let stop = Arc::new(AtomicBool::new(false));
        exit_at_second_request(stop.clone())?;
        for &signal in &self.numbers {
            set_at(signal, &stop)?;
        }
        self.is_loading.store(false, SeqCst);
        Ok(StopFlag::from(stop))
    }

    /// Returns a flag for each signal, which it sets from here on: those that a launcher passes on.
    pub fn flags(&self) -> Result<SignalFlags> {
        let flags = SignalFlags::new(&self.numbers);
        for (signal, flag) in flags.iter() {
            set_at(signal, flag)?;
        }
        self.is_loading.store(false, SeqCst);
        Ok(flags)
    }
}

/// Ends the process at a Ctrl-C behind another signal, or [`SAME_INTERRUPT`] after the first Ctrl-C or later.
fn exit_at_second_request(stop: Arc<AtomicBool>) -> Result<()> {
    let start = Instant::now();
    let until = AtomicU64::new(0); // milliseconds since `start` up to which Ctrl-C is the first one
    let on_interrupt = move || {
        let now = start.elapsed().as_millis() as u64;
        if !stop.load(SeqCst) {
            until.store(now + SAME_INTERRUPT.as_millis() as u64, SeqCst);
        } else if now >= until.load(SeqCst) {
            low_level::exit(i32::from(INTERRUPTED));
        }
    };
    // SAFETY: the action reads the clock, accesses atomic numbers and calls `_exit`, which signal handlers may do; it
    // neither allocates nor locks.
    let registered = unsafe { low_level::register(SIGINT, on_interrupt) };
    registered.map(drop).map_err(unhandled)
}

/// Behind a run nothing is left to save, and a signal ends the process at once again.
impl Drop for ExitSignals {
    fn drop(&mut self) {
        self.is_loading.store(true, SeqCst);
    }
}

fn set_at(signal: i32, flag: &Arc<AtomicBool>) -> Result<()> {
    if signal == SIGHUP {
        terminal::outlive().map_err(unhandled)?;
    }
    flag::register(signal, flag.clone()).map(drop).map_err(unhandled)
}

fn unhandled(error: std::io::Error) -> Error {
    Error::io("signals", error.to_string())
}
