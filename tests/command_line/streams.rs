//! Standard output and error without a reader, or that cannot be written to: a run continues without them.

use super::{TINY, ferrotron, folder_with_text, losses, succeeded, train};
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

fn command(folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrotron"));
    command.current_dir(folder).args(["train", "--data", "text.txt", "--save", "run"]).args(TINY);
    command
}

/// A stream whose reader is gone.
fn closed() -> Stdio {
    let (_, writer) = std::io::pipe().unwrap();
    writer.into()
}

fn full() -> Stdio {
    File::options().write(true).open("/dev/full").unwrap().into()
}

#[test]
fn training_needs_no_reader() {
    for stream in [closed, full] {
        for ranks in [&[][..], &["--nproc", "2"]] {
            let folder = folder_with_text();
            let mut run = command(folder.path());
            let status = run.args(ranks).stdout(stream()).stderr(stream()).status().unwrap();
            assert_eq!(status.code(), Some(0), "{ranks:?}");
            let run = folder.path().join("run");
            assert_eq!(losses(run.join("metrics.jsonl")).len(), 20, "{ranks:?}");
            assert!(run.join("iter_0000020/index.json").exists(), "{ranks:?}");
        }
    }
}

#[test]
fn a_reader_of_the_first_line_ends_nothing() {
    let folder = folder_with_text();
    let mut child =
        command(folder.path()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let mut message = String::new();
    child.stderr.take().unwrap().read_to_string(&mut message).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0), "{message}");
    assert!(!message.contains("panicked") && !message.contains("cannot write"), "{message}");
}

#[test]
fn an_error_without_a_reader_keeps_its_code() {
    let folder = folder_with_text();
    for stream in [closed, full] {
        let mut run = command(folder.path());
        let status = run.args(["--micro-batch-size", "0"]).stderr(stream()).status().unwrap();
        assert_eq!(status.code(), Some(2));
    }
}

/// Other commands have no result but their output, so losing it is an error.
#[test]
fn results_that_are_lost_are_an_error() {
    let folder = folder_with_text();
    succeeded(train(folder.path(), &["--save", "run"]));
    let evaluate = |stream: Stdio| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrotron"));
        command.current_dir(folder.path()).args(["eval", "--load", "run"]).stdout(stream);
        command.output().unwrap()
    };
    let output = evaluate(full());
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(message.contains("cannot write to standard output: No space left"), "{message}");
    assert_eq!(evaluate(closed()).status.code(), Some(141));
    succeeded(ferrotron(folder.path(), &["eval", "--load", "run"]));
}

/// Leaves the pipe unread, as a terminal does behind Ctrl-S, or a pager.
#[test]
fn a_reader_who_pauses_stops_no_run() {
    for ranks in ["", "--nproc 2"] {
        let folder = folder_with_text();
        let mut run = command(folder.path());
        run.args("--train-iters 1000000 --log-interval 1 --eval-interval 0".split(' '));
        run.args("--save-interval 0".split(' ')).args(ranks.split_whitespace());
        let mut child = run.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        // A pipe has 64 KiB, and a line some 90 bytes.
        let metrics = folder.path().join("run/metrics.jsonl");
        let lines = || std::fs::read_to_string(&metrics).map_or(0, |text| text.lines().count());
        let begun = Instant::now();
        while lines() < 2000 {
            assert!(begun.elapsed() < Duration::from_secs(120), "it waits after {} steps", lines());
            std::thread::sleep(Duration::from_millis(20));
        }
        let (id, asked) = (child.id().to_string(), Instant::now());
        assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
        assert_eq!(child.wait().unwrap().code(), Some(130), "{ranks}");
        assert!(asked.elapsed() < Duration::from_secs(10), "{ranks}: {:?}", asked.elapsed());
        let last = lines();
        assert!(folder.path().join(format!("run/iter_{last:07}/index.json")).exists(), "{ranks}");
    }
}

/// `ulimit -f`: a file that may not grow is an error as any other.
#[test]
fn a_limit_of_file_sizes_is_an_error() {
    let folder = folder_with_text();
    let inner = command(folder.path());
    let mut shell = Command::new("sh");
    shell.current_dir(folder.path()).args(["-c", "ulimit -f 16; exec \"$0\" \"$@\""]);
    let output = shell.arg(inner.get_program()).args(inner.get_args()).output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(message.contains("File too large"), "{message}");
    assert!(!folder.path().join("run/iter_0000005.tmp").exists());
}
