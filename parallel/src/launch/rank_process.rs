//! One rank as a process of this machine.

use ferrotron_tensor::{Error, Result};
use rustix::process::{
    Pid, Signal, getpid, getppid, kill_process, set_parent_process_death_signal,
};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus};

use super::signals::{reset, stop_signals};

/// A started rank, which does not outlive this value, nor the thread that has started it.
pub struct RankProcess {
    child: Child,
    status: Option<ExitStatus>,
}

impl RankProcess {
    /// Starts `command` in a process group of its own, so that Ctrl-C on a terminal reaches it once: from
    /// the launcher. It reacts to [`stop_signals`] as the system does, until it handles them itself.
    pub fn start(mut command: Command) -> Result<RankProcess> {
        let (launcher, signals) = (getpid(), stop_signals());
        let prepare = move || {
            // Shells have their jobs in the background ignore SIGINT, which would be inherited.
            reset(&signals)?;
            set_parent_process_death_signal(Some(Signal::KILL))?;
            match getppid() == Some(launcher) {
                true => Ok(()),
                // The launcher died in between.
                false => Err(std::io::ErrorKind::Interrupted.into()),
            }
        };
        // SAFETY: between fork and exec the closure makes a few system calls and touches no memory of others.
        unsafe { command.pre_exec(prepare) };
        let child = command.process_group(0).spawn().map_err(|error| {
            let program = command.get_program().display();
            Error::io("launch", format!("{program} cannot be started: {error}"))
        })?;
        Ok(RankProcess { child, status: None })
    }

    /// The process.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// Returns the number of its process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Returns its exit status, once.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        if self.status.is_some() {
            return Ok(None);
        }
        let lost = |error| Error::io("launch", format!("a rank's end cannot be known: {error}"));
        self.status = self.child.try_wait().map_err(lost)?;
        Ok(self.status)
    }

    /// Returns whether it has not been seen to end.
    pub fn is_running(&self) -> bool {
        self.status.is_none()
    }

    /// Returns whether it is stopped, by a signal or a debugger.
    pub fn is_stopped(&self) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id()));
        // The name before the state, in parentheses, may hold anything.
        let state =
            stat.as_deref().ok().and_then(|stat| stat.rsplit(')').next()?.trim().chars().next());
        self.is_running() && matches!(state, Some('T' | 't'))
    }

    /// Sends a signal, if it runs.
    pub fn signal(&self, signal: Signal) {
        if self.is_running()
            && let Some(pid) = Pid::from_raw(self.child.id() as i32)
        {
            // It may have ended meanwhile, but no other process has its number before `ended` has seen that.
            let _ = kill_process(pid, signal);
        }
    }
}

impl Drop for RankProcess {
    fn drop(&mut self) {
        if self.is_running() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// Describes the end of a process, and returns the exit code that stands for it.
pub fn describe(status: ExitStatus) -> (String, u8) {
    const NAMES: [(i32, &str); 11] = [
        (1, "SIGHUP"),
        (2, "SIGINT"),
        (4, "SIGILL"),
        (6, "SIGABRT"),
        (7, "SIGBUS"),
        (8, "SIGFPE"),
        (9, "SIGKILL"),
        (10, "SIGUSR1"),
        (11, "SIGSEGV"),
        (12, "SIGUSR2"),
        (15, "SIGTERM"),
    ];
    match (status.code(), status.signal()) {
        (Some(code), _) => (format!("ended with exit code {code}"), code as u8),
        (None, signal) => {
            let signal = signal.unwrap_or_default();
            let name = NAMES.iter().find(|(number, _)| *number == signal);
            let name = name.map_or(String::new(), |(_, name)| format!(" ({name})"));
            // As shells report it.
            (format!("was killed by signal {signal}{name}"), 128_u8.saturating_add(signal as u8))
        }
    }
}
