//! Jobs of shell scripts: lines, failures, signals.

use super::*;
use crate::launch::stop_signals;
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
        stop_timeout: Duration::from_secs(60),
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
fn a_rank_that_fails_ends_the_others_and_is_named() {
    let started = Instant::now();
    let (end, ..) = run(3, "test $RANK = 1 && exit 7; exec sleep 60");
    assert_eq!(end.code, 7);
    assert_eq!(end.failure.as_deref(), Some("rank 1 ended with exit code 7"));
    assert!(started.elapsed() < KILL_AFTER + Duration::from_secs(20), "{:?}", started.elapsed());
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

/// Runs two ranks and sends the signals, half a second apart, when both have said `: >$READY`. Returns the end of the
/// job and its time from the first signal on.
fn signalled(script: &str, stop_timeout: Duration, signals: &[Signal]) -> (JobEnd, Duration) {
    let folder = tempfile::tempdir().unwrap();
    let ready = |rank| folder.path().join(format!("ready-{rank}"));
    let script = format!("READY={}/ready-$RANK; {script}", folder.path().display());
    let config = LaunchConfig { stop_timeout, ..shell(2, &script) };
    let flags = SignalFlags::default();
    std::thread::scope(|scope| {
        let job = scope.spawn(|| launch(&config, &flags, Kept::default(), Kept::default()));
        let start = Instant::now();
        let begun = || (0..2).all(|rank| ready(rank).exists());
        while !begun() && start.elapsed() < Duration::from_secs(60) {
            std::thread::sleep(PAUSE);
        }
        // Also if they have not begun, so that the job ends.
        let (begun, asked) = (begun(), Instant::now());
        for (index, &signal) in signals.iter().enumerate() {
            std::thread::sleep(Duration::from_millis(500 * index.min(1) as u64));
            let (_, flag) = flags.iter().find(|(number, _)| *number == signal.as_raw()).unwrap();
            flag.store(true, Relaxed);
        }
        let end = job.join().unwrap().unwrap();
        assert!(begun, "the ranks did not begin");
        (end, asked.elapsed())
    })
}

#[test]
fn signals_are_passed_on_and_stopping_is_no_failure() {
    for (signal, name) in [
        (Signal::INT, "INT"),
        (Signal::TERM, "TERM"),
        (Signal::HUP, "HUP"),
        (Signal::USR1, "USR1"),
        (Signal::USR2, "USR2"),
    ] {
        // Under `nohup`, SIGHUP asks for nothing.
        if !stop_signals().contains(&signal.as_raw()) {
            continue;
        }
        let script = format!("trap 'exit 130' {name}; : >$READY; while :; do sleep 0.05; done");
        let (end, _) = signalled(&script, Duration::from_secs(60), &[signal]);
        assert_eq!(end, ended_well(INTERRUPTED), "{name}");
    }
}

/// A rank that has only just started has no handler yet.
#[test]
fn ranks_that_a_signal_ends_are_interrupted() {
    for signal in [Signal::USR1, Signal::TERM] {
        let script =
            "test $RANK = 1 && trap 'exit 130' USR1 TERM; : >$READY; while :; do sleep 0.05; done";
        let (end, _) = signalled(script, Duration::from_secs(60), &[signal]);
        assert_eq!(end, ended_well(INTERRUPTED), "{signal:?}");
    }
}

/// Starts ranks like a shell that is not interactive and runs `launcher &`.
#[test]
fn ranks_of_a_launcher_that_ignores_signals_notice_them() {
    let this = std::env::current_exe().unwrap();
    let test = "launch::launcher::tests::signals_are_passed_on_and_stopping_is_no_failure";
    let script = "trap '' INT TERM; exec \"$0\" --exact \"$1\"";
    let output = Command::new("sh").args(["-c", script]).arg(this).arg(test).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

#[test]
fn ranks_that_do_not_end_after_a_signal_are_killed_and_named() {
    let timeout = Duration::from_secs(1);
    for (deaf, named) in [("0 1", "ranks 0, 1 had"), ("1", "rank 1 had")] {
        // What rank 1 says without end is not waited for.
        let script = format!(
            "trap 'exit 130' INT; for deaf in {deaf}; do test $RANK = $deaf && trap '' INT; done
            : >$READY; while :; do test $RANK = 0 || echo here >&2; sleep 0.01; done"
        );
        let (end, took) = signalled(&script, timeout, &[Signal::INT]);
        assert_eq!(end.code, 128 + 9);
        let failure = end.failure.unwrap();
        assert!(failure.starts_with(named), "{failure}");
        assert!(failure.contains(" not ended 1."), "{failure}");
        assert!(failure.ends_with(" killed (SIGKILL)"), "{failure}");
        assert!(took >= timeout, "{took:?}");
    }
}

#[test]
fn who_has_waited_for_a_rank_that_is_killed_is_not_blamed_alone() {
    let script = |code| {
        format!(
            "trap 'exit {code}' INT; test $RANK = 1 && trap '' INT
            : >$READY; while :; do sleep 0.01; done"
        )
    };
    let (end, _) = signalled(&script(3), Duration::from_secs(1), &[Signal::INT]);
    assert_eq!(end.code, COMMUNICATION_FAILED);
    let failure = end.failure.unwrap();
    assert!(failure.starts_with("rank 0 ended with exit code 3; rank 1 had not"), "{failure}");
    let (end, _) = signalled(&script(7), Duration::from_secs(1), &[Signal::INT]);
    assert_eq!(end, JobEnd { code: 7, failure: Some("rank 0 ended with exit code 7".into()) });
}

#[test]
fn a_stopped_rank_is_named_and_goes_on_to_end_at_a_signal() {
    let script = "trap 'exit 130' TERM; : >$READY; test $RANK = 1 && kill -STOP $$
        while :; do sleep 0.05; done";
    let (end, took) = signalled(script, Duration::from_secs(60), &[Signal::TERM]);
    assert_eq!(end, ended_well(INTERRUPTED));
    assert!(took < KILL_AFTER, "{took:?}");
    // It is stopped again and again.
    let script = "trap 'exit 130' TERM; : >$READY
        test $RANK = 1 && { trap : TERM; while :; do kill -STOP $$; done; }
        while :; do sleep 0.05; done";
    let (end, took) = signalled(script, Duration::from_secs(60), &[Signal::TERM]);
    assert_eq!(end.code, KILLED);
    let failure = end.failure.unwrap();
    assert!(failure.starts_with("rank 1 was stopped (SIGSTOP); rank 1 had not ended"), "{failure}");
    assert!((KILL_AFTER..KILL_AFTER * 3).contains(&took), "{took:?}");
    // The others have waited for it in vain.
    let (end, _, err) = run(2, "test $RANK = 1 && kill -STOP $$; sleep 1.5; exit 3");
    assert_eq!(end.code, COMMUNICATION_FAILED);
    let failure = end.failure.unwrap();
    assert_eq!(failure, "rank 1 was stopped (SIGSTOP); rank 0 ended with exit code 3");
    let named = |line: &&String| line.starts_with("[launcher] rank 1 is stopped (process ");
    assert_eq!(err.iter().filter(named).count(), 1, "{err:?}");
}

#[test]
fn an_interrupt_behind_another_signal_does_not_wait() {
    let script = "trap '' INT TERM; : >$READY; while :; do sleep 0.05; done";
    let minute = Duration::from_secs(60);
    let (end, took) = signalled(script, minute, &[Signal::TERM, Signal::INT]);
    assert_eq!(end.code, 128 + 9);
    assert!((KILL_AFTER..minute / 2).contains(&took), "{took:?}");
    // Another SIGTERM changes nothing.
    let begun = Stop::by(Signal::INT, None, minute);
    let begun = Stop::by(Signal::TERM, Some(begun), minute / 2);
    assert_eq!(begun.within, minute);
    // Nor does another SIGINT at once: `timeout -s INT` sends two.
    assert_eq!(Stop::by(Signal::INT, Some(begun), minute / 2).within, minute);
}

#[test]
fn a_program_that_is_not_there_is_named() {
    let config = LaunchConfig { program: Path::new("/no/such").into(), ..shell(2, "") };
    let error = launch(&config, &SignalFlags::default(), Kept::default(), Kept::default());
    assert!(error.unwrap_err().to_string().contains("/no/such"));
}
