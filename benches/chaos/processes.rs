//! Processes by their parent or by a mark in their environment, and signals to them.

use rustix::process::{Pid, Signal, kill_process};
use std::process::Child;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// The environment variable whose value marks all processes of a job.
pub const MARK: &str = "FERROTRON_CHAOS_JOB";

/// The processes that `parent` started.
pub fn children(parent: u32) -> Vec<u32> {
    let tasks = format!("/proc/{parent}/task/{parent}/children");
    let list = std::fs::read_to_string(tasks).unwrap_or_default();
    list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

/// Sends a signal. A process that has ended meanwhile gets none.
pub fn send(signal: Signal, process: u32) {
    if let Some(process) = i32::try_from(process).ok().and_then(Pid::from_raw) {
        let _ = kill_process(process, signal);
    }
}

/// Kills the program and the ranks that it has started.
pub fn kill(child: &mut Child) {
    let ranks = children(child.id());
    // In vain if it has ended.
    let _ = child.kill();
    ranks.into_iter().for_each(|rank| send(Signal::KILL, rank));
}

/// Waits for the end of the program; returns whether it came within `limit`. Otherwise it is killed.
pub fn end(child: &mut Child, limit: Duration) -> bool {
    let started = Instant::now();
    while started.elapsed() < limit {
        if child.try_wait().expect("it can be waited for").is_some() {
            return true;
        }
        sleep(Duration::from_millis(10));
    }
    kill(child);
    false
}

/// Whether the environment of a living process has [`MARK`] with this value. That of a zombie is empty.
pub fn is_marked(process: u32, mark: &str) -> bool {
    let wanted = format!("{MARK}={mark}");
    let variables = std::fs::read(format!("/proc/{process}/environ")).unwrap_or_default();
    variables.split(|&byte| byte == 0).any(|variable| variable == wanted.as_bytes())
}

/// All living processes that have [`MARK`] with this value.
pub fn marked(mark: &str) -> Vec<u32> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let ids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    ids.filter(|&process| is_marked(process, mark)).collect()
}
