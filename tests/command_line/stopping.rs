//! Signals in every phase of a run: the program ends within seconds, and the last step is saved.

use super::{TINY, losses};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Time in which a program ends after a signal.
const SOON: Duration = Duration::from_secs(2);

/// The time that is added where other work goes on: these tests run at once, on as few as two processors, and a save waits for the
/// disk behind what others write. With eleven processes for each two processors the slowest end took 0.55 s; this leaves
/// room for nine times as many.
const BUSY: Duration = Duration::from_secs(3);

/// Where nothing else runs [`SOON`] alone is the limit: `FERROTRON_STRICT_STOP=1 cargo test --release --test command_line
/// stopping -- --test-threads 1 --nocapture`, which also shows what was measured.
const STRICT: &str = "FERROTRON_STRICT_STOP";

/// Longest that a phase may take to begin.
const PATIENCE: Duration = Duration::from_secs(120);

/// A folder with 30 MB of text: to evaluate on half of it takes far longer than a program may run after a signal.
fn folder_with_long_text() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let page: String =
        (0..5000).map(|i| format!("{} of a long text.\n", i * 7919 % 9973)).collect();
    std::fs::write(folder.path().join("text.txt"), page.repeat(30_000_000 / page.len())).unwrap();
    folder
}

fn start(folder: &Path, more: &str) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrotron"));
    command.current_dir(folder).args(["train", "--data", "text.txt", "--save", "run"]).args(TINY);
    command.args(["--valid-fraction", "0.5", "--save-interval", "0", "--log-interval", "1"]);
    command.args(more.split_whitespace());
    command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Waits until the program has said that it trains.
fn wait_for_training(child: &mut Child) {
    let mut lines = BufReader::new(child.stderr.as_mut().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("memory of a rank")), "it does not train");
}

fn wait_for(what: &Path) {
    let started = Instant::now();
    while !what.exists() {
        assert!(started.elapsed() < PATIENCE, "no {}", what.display());
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Sends SIGTERM as [`stop_by`].
fn stop(child: Child) -> ExitStatus {
    stop_by("TERM", child)
}

/// Sends a signal in a second, when the phase is on its way, and returns how the program ended.
fn stop_by(name: &str, mut child: Child) -> ExitStatus {
    std::thread::sleep(Duration::from_secs(1));
    assert!(child.try_wait().unwrap().is_none(), "it had ended before the signal");
    let (signal, process) = (format!("-{name}"), child.id().to_string());
    assert!(Command::new("kill").args([signal, process]).status().unwrap().success());
    let asked = Instant::now();
    let limit = if std::env::var_os(STRICT).is_some() { SOON } else { SOON + BUSY };
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            let test = std::thread::current().name().unwrap_or_default().to_string();
            println!("{test}: ended {:.2} s after SIG{name}", asked.elapsed().as_secs_f64());
            return status;
        }
        if asked.elapsed() > limit {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("it had not ended {limit:?} after the signal");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn assert_saved(folder: &Path, steps: u64) {
    let run = folder.join("run");
    let latest = std::fs::read_to_string(run.join("latest")).unwrap();
    assert_eq!(latest.trim(), format!("iter_{steps:07}"));
    let logged: Vec<u64> =
        losses(run.join("metrics.jsonl")).into_iter().map(|line| line.0).collect();
    assert_eq!(logged, (1..=steps).collect::<Vec<_>>());
}

/// A folder with 100 MB of words that are all different: GPT-2's tokenizer takes seconds for them.
fn folder_with_many_words() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let mut text = Vec::with_capacity(100_000_000);
    let mut bits = 1u64;
    while text.len() < 100_000_000 {
        bits = bits.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        text.extend((0..16).map(|i| b'a' + (bits >> (4 * i) & 15) as u8));
        text.push(b' ');
    }
    std::fs::write(folder.path().join("text.txt"), text).unwrap();
    folder
}

#[test]
fn a_signal_while_tokenizing_ends_the_program() {
    let folder = folder_with_many_words();
    for (signal, options) in
        [("TERM", ""), ("USR1", ""), ("XCPU", "--exit-signal SIGXCPU"), ("USR1", "--nproc 2")]
    {
        let child = start(folder.path(), &format!("--tokenizer gpt2 {options}"));
        // Nothing is there to be saved.
        assert_eq!(stop_by(signal, child).code(), Some(130), "{signal} {options}");
        assert!(!folder.path().join("run").exists());
    }
}

#[test]
fn a_signal_ends_an_evaluation_and_the_steps_are_saved() {
    let folder = folder_with_long_text();
    let mut child = start(folder.path(), "--eval-interval 1 --eval-iters all");
    wait_for_training(&mut child);
    assert_eq!(stop(child).code(), Some(130));
    assert_saved(folder.path(), 1);
}

#[test]
fn the_last_step_is_saved_before_the_last_evaluation() {
    for ranks in ["", "--nproc 2", "--nproc 2 --pipeline-model-parallel-size 2 --num-layers 2"] {
        let folder = folder_with_long_text();
        let options = "--train-iters 3 --eval-interval 100 --eval-iters all";
        let child = start(folder.path(), &format!("{options} {ranks}"));
        wait_for(&folder.path().join("run/latest"));
        assert_eq!(stop(child).code(), Some(130), "{ranks}");
        assert_saved(folder.path(), 3);
    }
}

#[test]
fn a_signal_ends_the_evaluation_of_a_task() {
    for ranks in ["", "--nproc 2", "--nproc 2 --pipeline-model-parallel-size 2 --num-layers 2"] {
        let folder = folder_with_long_text();
        let text = std::fs::read(folder.path().join("text.txt")).unwrap();
        std::fs::write(folder.path().join("task.txt"), &text[..6_000_000]).unwrap();
        let options = "--train-iters 3 --eval-interval 0 --eval-tasks wikitext --task-data wikitext=task.txt \
                       --eval-tasks-interval 100";
        let child = start(folder.path(), &format!("{options} {ranks}"));
        wait_for(&folder.path().join("run/latest"));
        assert_eq!(stop(child).code(), Some(130), "{ranks}");
        assert_saved(folder.path(), 3);
    }
}

/// Megatron's `--exit-signal`, for schedulers that send another one.
#[test]
fn the_exit_signal_finishes_the_step_and_saves() {
    for ranks in ["", "--nproc 2"] {
        let folder = folder_with_long_text();
        let options = "--train-iters 1000000 --eval-interval 0 --log-interval 0 --exit-signal-handler --exit-signal xcpu";
        let mut child = start(folder.path(), &format!("{options} {ranks}"));
        wait_for_training(&mut child);
        assert_eq!(stop_by("XCPU", child).code(), Some(130), "{ranks}");
        assert!(folder.path().join("run/latest").exists());
    }
}

#[test]
fn a_signal_ends_the_sample() {
    let folder = folder_with_long_text();
    let options = "--train-iters 2 --eval-interval 0 --sample-length 100000000";
    let child = start(folder.path(), options);
    wait_for(&folder.path().join("run/latest"));
    assert_eq!(stop(child).code(), Some(130));
    assert_saved(folder.path(), 2);
}
