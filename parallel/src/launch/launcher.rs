//! Starts the ranks of a job on this machine and watches over them.

use ferrotron_tensor::Result;
use rustix::process::Signal;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::lines::Lines;
use super::ports::free_port;
use super::rank_process::{RankProcess, describe};
use super::signals::SignalFlags;
use super::stopped_ranks::StoppedRanks;
use super::{COMMUNICATION_FAILED, INTERRUPTED, JOB_SECRET, SAME_INTERRUPT, random_bytes};
use crate::descriptors;

/// Pause between looks at the ranks.
const PAUSE: Duration = Duration::from_millis(20);

/// The same for each rank, where there are many: a look asks the system about each.
const PAUSE_PER_RANK: Duration = Duration::from_micros(100);

/// Time that ranks have to end before they are killed. It begins for the others when one has failed, and for all when
/// an interrupt follows another signal.
const KILL_AFTER: Duration = Duration::from_secs(5);

/// Exit code that stands for SIGKILL.
const KILLED: u8 = 128 + Signal::KILL.as_raw() as u8;

/// The job to start.
#[derive(Debug, Clone)]
pub struct LaunchConfig {
    /// The program that is every rank.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// Number of ranks.
    pub ranks: usize,
    /// Time that ranks have to end after a signal was passed on to them, before they are killed.
    pub stop_timeout: Duration,
}

/// The end of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobEnd {
    /// Exit code of the whole job: that of the rank that failed first, 128 and its number for a signal.
    pub code: u8,
    /// The rank that failed first, and its end.
    pub failure: Option<String>,
}

/// Runs a job of several processes on this machine, each with the environment variables of its rank, and
/// returns when all have ended. If one fails, the others have 5 seconds to end and are then killed. None
/// outlives the calling thread, however that ends.
///
/// Ranks begin with the system's reaction to [`stop_signals`](super::stop_signals), which is to end, even if this
/// process ignores SIGINT; one that a signal ends so, which was passed on, counts as one that ended with
/// [`INTERRUPTED`]. Those that have not ended [`LaunchConfig::stop_timeout`] after a signal was passed on are
/// killed. An interrupt behind another signal means not to wait: then they have 5 seconds. A rank that is stopped, as
/// by SIGSTOP, is continued behind the signal, so that it can save; if it stays stopped for 5 seconds, all are killed.
///
/// Rank 0 writes where this process does. Of the others, each line goes to `out` or `err` in one `write_all`,
/// with `[rank N]` in front. A line to `err` names a rank that is stopped.
///
/// ```
/// use ferrotron_parallel::launch::{JobEnd, LaunchConfig, SignalFlags, launch};
/// let config = LaunchConfig {
///     program: "sh".into(),
///     arguments: ["-c", "test $WORLD_SIZE = 2 && exit $RANK"].map(Into::into).to_vec(),
///     ranks: 2,
///     stop_timeout: std::time::Duration::from_secs(30),
/// };
/// let end = launch(&config, &SignalFlags::default(), std::io::stdout(), std::io::stderr())?;
/// assert_eq!(end, JobEnd { code: 1, failure: Some("rank 1 ended with exit code 1".into()) });
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
///
/// Errors if a rank cannot be started, or may not have as many files open as it needs.
pub fn launch(
    config: &LaunchConfig,
    flags: &SignalFlags,
    out: impl Write + Send + 'static,
    err: impl Write + Send + 'static,
) -> Result<JobEnd> {
    descriptors::provide_launcher(config.ranks)?; // ranks inherit what is raised
    let (out, err) = (Arc::new(Mutex::new(out)), Arc::new(Mutex::new(err)));
    let (port, secret, lines) = (free_port()?, secret()?, Lines::new());
    let mut ranks = Vec::with_capacity(config.ranks);
    for rank in 0..config.ranks {
        let mut command = Command::new(&config.program);
        command.args(&config.arguments).stdin(Stdio::null());
        let size = config.ranks.to_string();
        command.env("RANK", rank.to_string()).env("LOCAL_RANK", rank.to_string());
        command.env("WORLD_SIZE", &size).env("LOCAL_WORLD_SIZE", &size);
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
        command.env(JOB_SECRET, &secret);
        if rank > 0 {
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
        }
        let mut process = RankProcess::start(command)?;
        if let Some(stdout) = process.child().stdout.take() {
            lines.pass_on(rank, stdout, &out);
        }
        if let Some(stderr) = process.child().stderr.take() {
            lines.pass_on(rank, stderr, &err);
        }
        ranks.push(process);
    }
    let end = watch(ranks, flags, config.stop_timeout, &err)?;
    lines.finish();
    Ok(end)
}

/// Waits until all ranks have ended, or those that still run are killed.
fn watch<W: Write>(
    mut ranks: Vec<RankProcess>,
    flags: &SignalFlags,
    stop_timeout: Duration,
    err: &Mutex<W>,
) -> Result<JobEnd> {
    let mut stopped = StoppedRanks::default();
    let mut ends = Vec::new();
    let mut patience: Option<Instant> = None;
    let mut stop: Option<Stop> = None;
    let mut passed_on = Vec::new();
    while ranks.iter().any(RankProcess::is_running) {
        for (number, flag) in flags.iter() {
            if let Some(signal) = Signal::from_named_raw(number)
                && flag.swap(false, Relaxed)
            {
                for rank in &ranks {
                    rank.signal(signal);
                    rank.signal(Signal::CONT); // one that is stopped could not save
                }
                stop = Some(Stop::by(signal, stop, stop_timeout));
                passed_on.push(number);
            }
        }
        stopped.look(&ranks, err);
        for (number, rank) in ranks.iter_mut().enumerate() {
            if let Some(status) = rank.ended()? {
                let (text, code) = describe(status);
                ends.push(match status.signal() {
                    // One that had only just started did not handle it yet.
                    Some(signal) if passed_on.contains(&signal) => {
                        End { rank: number, code: INTERRUPTED, by_signal: false, text }
                    }
                    signal => End { rank: number, code, by_signal: signal.is_some(), text },
                });
            }
        }
        if patience.is_none() && ends.iter().any(End::is_failure) {
            patience = Some(Instant::now() + KILL_AFTER);
        }
        if patience.is_some_and(|until| Instant::now() >= until)
            || stop.as_ref().is_some_and(|stop| {
                stop.is_over() || stopped.longest_since(stop.asked) >= KILL_AFTER
            })
        {
            break;
        }
        std::thread::sleep(PAUSE.max(PAUSE_PER_RANK * ranks.len() as u32));
    }
    // Ranks that still run are killed when they are dropped.
    let numbers = |is: fn(&RankProcess) -> bool| -> Vec<String> {
        let found = ranks.iter().enumerate().filter(|(_, rank)| is(rank));
        found.map(|(number, _)| number.to_string()).collect()
    };
    let (late, stopped) = (numbers(RankProcess::is_running), numbers(RankProcess::is_stopped));
    let end = summary(&ends);
    let end = match stop {
        Some(stop) if !late.is_empty() => stop.missed(&late, end),
        _ => end,
    };
    Ok(blame_stopped(&stopped, end))
}

/// The end of a job in which these ranks were stopped to the end, if the others ended only because they waited for
/// them.
fn blame_stopped(stopped: &[String], end: JobEnd) -> JobEnd {
    if stopped.is_empty() || !matches!(end.code, COMMUNICATION_FAILED | KILLED) {
        return end;
    }
    let (ranks, were) = if stopped.len() == 1 { ("rank", "was") } else { ("ranks", "were") };
    let failure = end.failure.map_or(String::new(), |failure| format!("; {failure}"));
    let failure = format!("{ranks} {} {were} stopped (SIGSTOP){failure}", stopped.join(", "));
    JobEnd { code: end.code, failure: Some(failure) }
}

/// Ranks were asked to end.
struct Stop {
    /// The time of the first signal.
    asked: Instant,
    /// Time after which the remaining ranks are killed.
    within: Duration,
    /// The time of the first Ctrl-C.
    interrupted: Option<Instant>,
}

impl Stop {
    /// The request that results from a signal, after an earlier one or as the first.
    fn by(signal: Signal, before: Option<Stop>, timeout: Duration) -> Stop {
        let now = Instant::now();
        let interrupted = (signal == Signal::INT).then_some(now);
        match before {
            None => Stop { asked: now, within: timeout, interrupted },
            // A second Ctrl-C does not wait. A second SIGTERM may be the first one, sent by two.
            Some(stop) if interrupted.is_some() && !stop.was_just_interrupted() => {
                let within = stop.within.min(stop.asked.elapsed() + KILL_AFTER);
                Stop { within, interrupted, ..stop }
            }
            Some(stop) => stop,
        }
    }

    fn was_just_interrupted(&self) -> bool {
        self.interrupted.is_some_and(|first| first.elapsed() < SAME_INTERRUPT)
    }

    fn is_over(&self) -> bool {
        self.asked.elapsed() >= self.within
    }

    /// The end of a job in which these ranks had to be killed and the others ended as `others` says.
    fn missed(&self, late: &[String], others: JobEnd) -> JobEnd {
        let (ranks, were) = if late.len() == 1 { ("rank", "was") } else { ("ranks", "were") };
        let (late, seconds) = (late.join(", "), self.asked.elapsed().as_secs_f64());
        let killed = format!(
            "{ranks} {late} had not ended {seconds:.1} s after a signal and {were} killed (SIGKILL)"
        );
        let (code, failure) = match others.failure {
            None => (KILLED, killed),
            // Whom calls between ranks failed may have waited for just these.
            Some(noticed) if others.code == COMMUNICATION_FAILED => {
                (others.code, format!("{noticed}; {killed}"))
            }
            Some(cause) => (others.code, cause),
        };
        JobEnd { code, failure: Some(failure) }
    }
}

/// The end of one rank.
struct End {
    rank: usize,
    code: u8,
    by_signal: bool,
    text: String,
}

impl End {
    fn is_failure(&self) -> bool {
        self.by_signal || !matches!(self.code, 0 | INTERRUPTED)
    }
}

/// The job's end, from those of its ranks in their order: a rank that died of itself is the cause, not one
/// that noticed.
fn summary(ends: &[End]) -> JobEnd {
    let failures = || ends.iter().filter(|end| end.is_failure());
    let cause = failures()
        .find(|end| end.by_signal)
        .or_else(|| failures().find(|end| end.code != COMMUNICATION_FAILED))
        .or_else(|| failures().next());
    match cause {
        Some(end) => {
            JobEnd { code: end.code, failure: Some(format!("rank {} {}", end.rank, end.text)) }
        }
        None => JobEnd { code: ends.iter().map(|end| end.code).max().unwrap_or(0), failure: None },
    }
}

/// 128 random bits.
fn secret() -> Result<String> {
    Ok(random_bytes::<16>()?.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    }))
}

#[cfg(test)]
mod tests;
