//! Standard output and error without a reader, or that cannot be written to: a run continues without them.

use super::{TINY, ferrotron, folder_with_text, losses, succeeded, train};
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};

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
