//! Files that a run writes beside its checkpoints: what is there already, and what cannot be written.

use super::{ferrotron, folder_with_text, losses, succeeded, train};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Output};

fn refused(folder: &Path, options: &[&str], named: &[&str]) {
    let output = train(folder, &[options, &["--save", "refused"]].concat());
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{options:?}: {message}");
    assert_eq!(message.lines().count(), 1, "{options:?}: {message}");
    for name in named {
        assert!(message.contains(name), "{options:?}: {name} is missing in {message}");
    }
    assert!(!folder.join("refused").exists(), "{options:?}: it was begun");
}

#[test]
fn what_the_program_has_not_written_is_refused_and_left() {
    let folder = folder_with_text();
    let path = folder.path();
    std::fs::write(path.join("notes"), "{\"step\": \"two\"}\nmilk\n").unwrap();
    assert!(Command::new("mkfifo").arg(path.join("pipe")).status().unwrap().success());
    let _socket = UnixListener::bind(path.join("socket")).unwrap();
    for option in ["--metrics", "--trace"] {
        for (file, what) in [
            ("pipe", "a pipe"),
            ("socket", "a socket"),
            ("/dev/full", "a device"),
            ("/dev/stdout", "a pipe"),
            (".", "a folder"),
        ] {
            refused(path, &[option, file], &[file, what, "not a regular file"]);
        }
    }
    refused(path, &["--metrics", "notes"], &["notes, line 1,", "--metrics"]);
    refused(path, &["--trace", "notes"], &["notes", "something else than a trace"]);
    let notes = std::fs::read_to_string(path.join("notes")).unwrap();
    assert_eq!(notes, "{\"step\": \"two\"}\nmilk\n");

    let null = ["--metrics", "/dev/null", "--trace", "/dev/null", "--trace-steps", "2-3"];
    succeeded(train(path, &[&null[..], &["--save", "run"]].concat()));
    let of_another = ["run/metrics.jsonl", "is of the run in 'run'"];
    refused(path, &["--metrics", "run/metrics.jsonl"], &of_another);
    // A resumed run looks at its own file, too.
    std::fs::write(path.join("run/metrics.jsonl"), "mine\n").unwrap();
    let output = ferrotron(path, &["train", "--load", "run", "--train-iters", "22"]);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(message.contains("metrics.jsonl, line 1,"), "{message}");
}

#[test]
fn a_picture_or_a_trace_that_fails_is_a_warning() {
    let folder = folder_with_text();
    let path = folder.path();
    std::fs::create_dir_all(path.join("run/loss.svg")).unwrap();
    let output = train(path, &["--save", "run"]);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    succeeded(output);
    assert!(
        message.contains("warning: plot: cannot write run/loss.svg: it is a folder"),
        "{message}"
    );
}

/// A run that may make no file longer than so many KiB, as on a disk that is full.
fn limited(folder: &Path, kilobytes: usize, options: &str) -> Output {
    let script = format!(
        "trap '' XFSZ; ulimit -f {}; exec \"$0\" train --data text.txt --num-layers 1 --hidden-size 8 \
         --num-attention-heads 2 --seq-length 8 --micro-batch-size 2 --threads 1 --log-interval 0 --valid-fraction 0.01 \
         --sample-length 4 --save run {options}",
        kilobytes * 2
    );
    let mut shell = Command::new("sh");
    shell.current_dir(folder).args(["-c", &script, env!("CARGO_BIN_EXE_ferrotron")]);
    shell.output().unwrap()
}

#[test]
fn a_full_disk_under_the_metrics_costs_lines_and_not_the_run() {
    let folder = folder_with_text();
    let path = folder.path();
    let output = limited(path, 40, "--train-iters 400");
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    succeeded(output);
    assert_eq!(
        message.matches("warning: metrics: cannot write run/metrics.jsonl").count(),
        1,
        "{message}"
    );
    let logged = losses(path.join("run/metrics.jsonl"));
    assert!((50..400).contains(&logged.len()), "{} lines", logged.len());
    assert!(path.join("run/iter_0000400/index.json").exists());
    // There is room again.
    succeeded(ferrotron(path, &["train", "--load", "run", "--train-iters", "410"]));
    assert_eq!(losses(path.join("run/metrics.jsonl")).last().unwrap().0, 410);
}

#[test]
fn a_full_disk_under_the_events_costs_events_and_not_the_run() {
    let folder = folder_with_text();
    let path = folder.path();
    let output = limited(path, 40, "--train-iters 400 --metrics /dev/null --tensorboard-dir tb");
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    succeeded(output);
    assert_eq!(
        message.matches("warning: tensorboard: cannot write tb/events").count(),
        1,
        "{message}"
    );
    assert!(path.join("run/iter_0000400/index.json").exists());
    // Another run in the same folder hides this one.
    let again = train(path, &["--save", "again", "--tensorboard-dir", "tb"]);
    let message = String::from_utf8_lossy(&again.stderr).into_owned();
    succeeded(again);
    assert!(message.contains("tb has event files of another run"), "{message}");
    assert_eq!(std::fs::read_dir(path.join("tb")).unwrap().count(), 2);
    refused(
        path,
        &["--tensorboard-dir", "text.txt"],
        &["--tensorboard-dir", "text.txt is not a folder"],
    );
    let none = ["--tensorboard-dir", "tb", "--tensorboard-log-interval", "0"];
    refused(path, &none, &["--tensorboard-log-interval", "must be positive"]);
}

#[test]
fn a_trace_that_does_not_fit_is_a_warning() {
    let folder = folder_with_text();
    let path = folder.path();
    for (steps, ranks) in [("1-50", ""), ("1-200", ""), ("1-50", "--nproc 2")] {
        let options = format!("--train-iters 60 --trace trace.json --trace-steps {steps} {ranks}");
        let output = limited(path, 64, &options);
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        succeeded(output);
        assert!(message.contains("warning: trace: cannot write"), "{message}");
        std::fs::remove_dir_all(path.join("run")).unwrap();
    }
}
