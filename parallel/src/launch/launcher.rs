//! Starts the ranks of a job on this machine and watches over them.

use ferrotron_tensor::{Error, Result};
use rustix::process::Signal;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::Write;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::lines::Lines;
use super::rank_process::{RankProcess, describe};
use super::{COMMUNICATION_FAILED, INTERRUPTED, JOB_SECRET};

/// Pause between looks at the ranks.
const PAUSE: Duration = Duration::from_millis(20);

/// How long other ranks may take to notice that one has failed, and to say so, before they are killed.
const KILL_AFTER: Duration = Duration::from_secs(5);

/// Services mostly have ports below this.
const LOWEST_PORT: u16 = 10_000;

/// What to start.
#[derive(Debug, Clone)]
pub struct LaunchConfig {
    /// The program that is every rank.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// How many ranks.
    pub ranks: usize,
}

/// Signals that the launcher was sent and passes on to the ranks: whoever handles signals sets one.
#[derive(Debug, Clone, Default)]
pub struct SignalFlags {
    /// SIGINT: Ctrl-C.
    pub interrupt: Arc<AtomicBool>,
    /// SIGTERM.
    pub terminate: Arc<AtomicBool>,
}

/// How a job has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobEnd {
    /// Exit code of the whole job: that of the rank that failed first, 128 and its number for a signal.
    pub code: u8,
    /// Which rank failed first, and how.
    pub failure: Option<String>,
}

/// Runs a job of several processes on this machine, each with the environment variables of its rank, and
/// returns when all have ended. If one fails, the others have some seconds to end and are then killed. None
/// outlives the calling thread, however that ends.
///
/// Rank 0 writes where this process does. Of the others, each line goes to `out` or `err` in one `write_all`,
/// with `[rank N]` in front.
///
/// ```
/// use ferrotron_parallel::launch::{SignalFlags, JobEnd, LaunchConfig, launch};
/// let config = LaunchConfig {
///     program: "sh".into(),
///     arguments: ["-c", "test $WORLD_SIZE = 2 && exit $RANK"].map(Into::into).to_vec(),
///     ranks: 2,
/// };
/// let end = launch(&config, &SignalFlags::default(), std::io::stdout(), std::io::stderr())?;
/// assert_eq!(end, JobEnd { code: 1, failure: Some("rank 1 ended with exit code 1".into()) });
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
///
/// Errors if a rank cannot be started.
pub fn launch(
    config: &LaunchConfig,
    flags: &SignalFlags,
    out: impl Write + Send + 'static,
    err: impl Write + Send + 'static,
) -> Result<JobEnd> {
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
    let end = watch(&mut ranks, flags)?;
    lines.finish();
    Ok(end)
}

/// Waits until all ranks have ended.
fn watch(ranks: &mut [RankProcess], flags: &SignalFlags) -> Result<JobEnd> {
    let signals = [(&flags.interrupt, Signal::INT), (&flags.terminate, Signal::TERM)];
    let mut ends = Vec::new();
    let mut patience: Option<Instant> = None;
    while ranks.iter().any(RankProcess::is_running) {
        for (flag, signal) in signals {
            if flag.swap(false, Relaxed) {
                ranks.iter().for_each(|rank| rank.signal(signal));
            }
        }
        for (number, rank) in ranks.iter_mut().enumerate() {
            if let Some(status) = rank.ended()? {
                let (text, code) = describe(status);
                let by_signal = status.code().is_none();
                ends.push(End { rank: number, code, by_signal, text });
            }
        }
        if patience.is_none() && ends.iter().any(End::is_failure) {
            patience = Some(Instant::now() + KILL_AFTER);
        }
        if patience.is_some_and(|until| Instant::now() >= until) {
            break;
        }
        std::thread::sleep(PAUSE);
    }
    // Whoever still runs is killed when the ranks are dropped, and is not to blame.
    Ok(summary(&ends))
}

/// How one rank has ended.
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

/// A value for MASTER_PORT such that the port behind it is free on this machine and is none that the system
/// gives to connections: until rank 0 listens there, nobody gets it by chance.
fn free_port() -> Result<u16> {
    let none = |error| Error::io("launch", format!("no port of 127.0.0.1 is free: {error}"));
    let bind = |port| TcpListener::bind(("127.0.0.1", port)).and_then(|l| l.local_addr());
    let ports = LOWEST_PORT..first_connection_port();
    // Another job may look for one at the same moment, so each begins somewhere else.
    for _ in 0..if ports.is_empty() { 0 } else { 100 } {
        let random = u16::from_le_bytes(random_bytes()?);
        if let Ok(free) = bind(ports.start + random % ports.len() as u16) {
            return Ok(free.port() - 1);
        }
    }
    // Next to none is left by the system's settings.
    Ok(bind(0).map_err(none)?.port() - 1)
}

/// The first port that the system gives to connections.
fn first_connection_port() -> u16 {
    let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range");
    let first = range.ok().and_then(|range| range.split_whitespace().next()?.parse().ok());
    first.unwrap_or(32_768) // Linux's own choice
}

/// 128 random bits.
fn secret() -> Result<String> {
    Ok(random_bytes::<16>()?.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    }))
}

fn random_bytes<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes)
        .map_err(|error| Error::io("launch", format!("the system has no random bytes: {error}")))?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    /// A place that the test can read.
    #[derive(Clone, Default)]
    struct Kept(Arc<Mutex<Vec<u8>>>);

    impl Write for Kept {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    impl Kept {
        /// Its lines, sorted: ranks print when they like.
        fn lines(&self) -> Vec<String> {
            let text = String::from_utf8(self.0.lock().unwrap().clone()).unwrap();
            let mut lines: Vec<_> = text.lines().map(str::to_string).collect();
            lines.sort();
            lines
        }
    }

    fn shell(ranks: usize, script: &str) -> LaunchConfig {
        LaunchConfig {
            program: "sh".into(),
            arguments: ["-c", script].map(OsString::from).to_vec(),
            ranks,
        }
    }

    fn run(ranks: usize, script: &str) -> (JobEnd, Vec<String>, Vec<String>) {
        let (out, err) = (Kept::default(), Kept::default());
        let flags = SignalFlags::default();
        let end = launch(&shell(ranks, script), &flags, out.clone(), err.clone()).unwrap();
        (end, out.lines(), err.lines())
    }

    fn ended_well(code: u8) -> JobEnd {
        JobEnd { code, failure: None }
    }

    #[test]
    fn every_rank_learns_who_it_is_and_its_lines_are_marked() {
        let script = "test $RANK = 0 && exit
            echo $LOCAL_RANK of $WORLD_SIZE, $LOCAL_WORLD_SIZE here, at $MASTER_ADDR
            test $MASTER_PORT -gt 0 && test ${#FERROTRON_JOB_SECRET} = 32 && echo fine >&2";
        let (end, out, err) = run(3, script);
        assert_eq!(end, ended_well(0));
        let want = [1, 2].map(|rank| format!("[rank {rank}] {rank} of 3, 3 here, at 127.0.0.1"));
        assert_eq!(out, want);
        assert_eq!(err, ["[rank 1] fine", "[rank 2] fine"]);
    }

    #[test]
    fn each_job_has_its_own_secret() {
        let secrets: Vec<_> = (0..2).map(|_| run(2, "echo $FERROTRON_JOB_SECRET").1).collect();
        assert_ne!(secrets[0], secrets[1]);
    }

    #[test]
    fn rank_0_gets_a_port_that_no_connection_gets() {
        for _ in 0..20 {
            let port = free_port().unwrap() + 1;
            assert!((LOWEST_PORT..first_connection_port()).contains(&port), "{port}");
        }
    }

    #[test]
    fn a_rank_that_fails_ends_the_others_and_is_named() {
        let started = Instant::now();
        let (end, ..) = run(3, "test $RANK = 1 && exit 7; exec sleep 60");
        assert_eq!(end.code, 7);
        assert_eq!(end.failure.as_deref(), Some("rank 1 ended with exit code 7"));
        assert!(
            started.elapsed() < KILL_AFTER + Duration::from_secs(20),
            "{:?}",
            started.elapsed()
        );
    }

    #[test]
    fn a_killed_rank_is_named_with_its_signal() {
        // The others notice, and end with an exit code of their own, before or after.
        let (end, ..) = run(3, "test $RANK = 2 && sleep 0.2 && kill -KILL $$; exit 3");
        assert_eq!(end.code, 128 + 9);
        assert_eq!(end.failure.as_deref(), Some("rank 2 was killed by signal 9 (SIGKILL)"));
    }

    #[test]
    fn who_noticed_is_not_the_cause() {
        let (end, ..) = run(3, "test $RANK = 2 && sleep 0.2 && exit 1; exit 3");
        assert_eq!(end.failure.as_deref(), Some("rank 2 ended with exit code 1"));
        let (end, ..) = run(2, "exit 3");
        assert_eq!(end.code, COMMUNICATION_FAILED, "{end:?}");
    }

    #[test]
    fn signals_are_passed_on_and_stopping_is_no_failure() {
        let folder = std::env::temp_dir().join(format!("ferrotron-launch-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        for signal in ["INT", "TERM"] {
            let flags = SignalFlags::default();
            // Says that it is ready only when it is.
            let ready = |rank| folder.join(format!("{signal}-{rank}"));
            let script = format!(
                "trap 'exit 130' {signal}; : >{}/{signal}-$RANK; while :; do sleep 0.05; done",
                folder.display()
            );
            let config = shell(2, &script);
            let flag = if signal == "INT" { &flags.interrupt } else { &flags.terminate };
            let end = std::thread::scope(|scope| {
                let job = scope.spawn(|| launch(&config, &flags, Kept::default(), Kept::default()));
                let start = Instant::now();
                let begun = || (0..2).all(|rank| ready(rank).exists());
                while !begun() && start.elapsed() < Duration::from_secs(60) {
                    std::thread::sleep(PAUSE);
                }
                // Also if they have not begun, so that the job ends.
                let begun = begun();
                flag.store(true, Relaxed);
                assert!(begun, "the ranks did not begin");
                job.join().unwrap().unwrap()
            });
            assert_eq!(end, ended_well(INTERRUPTED), "{signal}");
        }
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_program_that_is_not_there_is_named() {
        let config = LaunchConfig { program: Path::new("/no/such").into(), ..shell(2, "") };
        let error = launch(&config, &SignalFlags::default(), Kept::default(), Kept::default());
        assert!(error.unwrap_err().to_string().contains("/no/such"));
    }
}
