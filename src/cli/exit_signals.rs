//! Signals that ask a run to end: before its first step at once, later behind the step and a checkpoint.

use ferrotron::models::stop::StopFlag;
use ferrotron::parallel::launch::{INTERRUPTED, SignalFlags, stop_signals};
use ferrotron::{Error, Result};
use signal_hook::consts::{SIGHUP, SIGINT};
use signal_hook::flag;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;

use super::terminal;

/// The signals of this process.
pub struct ExitSignals {
    numbers: Vec<i32>,
    /// Whether there is nothing to save yet.
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

    /// Returns a flag that the signals set from here on. A second Ctrl-C ends the process at once. A second SIGTERM does
    /// not: some send it to a job's processes and to their parents, who pass it on.
    pub fn stop_flag(&self) -> Result<StopFlag> {
        let stop = Arc::new(AtomicBool::new(false));
        let code = i32::from(INTERRUPTED);
        let second = flag::register_conditional_shutdown(SIGINT, code, stop.clone());
        second.map_err(unhandled)?;
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

fn set_at(signal: i32, flag: &Arc<AtomicBool>) -> Result<()> {
    if signal == SIGHUP {
        terminal::outlive().map_err(unhandled)?;
    }
    flag::register(signal, flag.clone()).map(drop).map_err(unhandled)
}

fn unhandled(error: std::io::Error) -> Error {
    Error::io("signals", error.to_string())
}
