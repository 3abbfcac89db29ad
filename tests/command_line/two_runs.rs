//! A run's folder belongs to one run at a time, however it is called and however the last one ended.

use super::{TINY, ferrotron, folder_with_text, losses, succeeded, train};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

fn start(folder: &Path, more: &[&str]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrotron"));
    command.current_dir(folder).args(["train", "--data", "text.txt"]).args(TINY).args(more);
    command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("the program starts")
}

/// Waits until the run has taken a step.
fn wait_for_a_step(run: &Path) {
    let start = Instant::now();
    while !std::fs::read_to_string(run.join("metrics.jsonl")).is_ok_and(|text| text.contains('\n'))
    {
        assert!(start.elapsed() < Duration::from_secs(60), "no step in {}", run.display());
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_second_run_is_refused_until_the_first_one_has_ended() {
    let folder = folder_with_text();
    let path = folder.path();
    succeeded(train(path, &["--save", "run"]));
    let run = path.join("run");
    std::os::unix::fs::symlink("run", path.join("link")).unwrap();
    // It runs for longer than this test, without saving.
    let mut first =
        start(path, &["--load", "run", "--train-iters", "100000000", "--save-interval", "0"]);
    let steps = || losses(run.join("metrics.jsonl")).len();
    let begin = Instant::now();
    while steps() <= 20 {
        assert!(begin.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(10));
    }
    // It may be writing a checkpoint.
    let staging = run.join("iter_0000777.tmp");
    std::fs::create_dir(&staging).unwrap();

    let holder = format!("process {} on ", first.id());
    let absolute = run.to_str().unwrap().to_string();
    for arguments in [
        &["--save", "run"][..],
        &["--save", &absolute],
        &["--load", "run", "--save", "link"],
        &["--load", "./run"],
    ] {
        let before = steps();
        let output = train(path, arguments);
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {message}");
        assert_eq!(message.lines().count(), 1, "{message}");
        for part in ["is used by another run", &holder, "s ago)", "--save"] {
            assert!(message.contains(part), "{arguments:?} lacks {part}: {message}");
        }
        assert!(steps() >= before && staging.exists());
    }
    // Who only reads may.
    succeeded(ferrotron(path, &["generate", "--load", "run", "--max-new-tokens", "3"]));
    succeeded(ferrotron(path, &["eval", "--load", "run", "--data", "text.txt"]));
    succeeded(ferrotron(path, &["export", "--load", "run", "--output", "hf"]));

    first.kill().unwrap();
    first.wait().unwrap();
    for (save, step) in [("./run", 25), ("link", 30), (&absolute, 35)] {
        let step = step.to_string();
        succeeded(train(path, &["--load", "run", "--save", save, "--train-iters", &step]));
    }
    assert!(!staging.exists(), "left by the run that was killed");
    assert_eq!(steps(), 35);
}

/// Two runs may share a device for their metrics, and no file.
#[test]
fn metrics_that_another_run_writes_are_refused_and_left() {
    let folder = folder_with_text();
    let path = folder.path();
    let metrics = path.join("metrics.jsonl");
    let long = ["--train-iters", "100000000", "--save-interval", "0", "--log-interval", "1"];
    let mut first =
        start(path, &[&["--save", "first", "--metrics", "metrics.jsonl"], &long[..]].concat());
    wait_for_a_step(path);
    for ranks in ["1", "2"] {
        let words = ["--save", "second", "--metrics", "metrics.jsonl", "--nproc", ranks];
        let output = train(path, &words);
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{message}");
        assert_eq!(message.lines().count(), 1, "{message}");
        for part in ["metrics.jsonl is being written by another run", "--metrics"] {
            assert!(message.contains(part), "{part} is missing: {message}");
        }
        assert!(!path.join("second").exists());
    }
    first.kill().unwrap();
    first.wait().unwrap();
    assert_eq!(losses(metrics)[0].0, 1);
    let mut first = start(path, &[&["--save", "1", "--metrics", "/dev/null"], &long[..]].concat());
    succeeded(train(path, &["--save", "2", "--metrics", "/dev/null"]));
    first.kill().unwrap();
    first.wait().unwrap();
}

#[test]
fn of_two_runs_that_start_at_once_one_is_refused() {
    for round in 0..5 {
        let folder = folder_with_text();
        let path = folder.path();
        let both = [start(path, &["--save", "run"]), start(path, &["--save", "./run"])];
        let outputs = both.map(|child| child.wait_with_output().unwrap());
        let codes = outputs.each_ref().map(|output| output.status.code());
        let refused = outputs.iter().find(|output| output.status.code() == Some(2));
        let message = refused.map(|output| String::from_utf8_lossy(&output.stderr).into_owned());
        let message = message.unwrap_or_else(|| panic!("round {round}: {codes:?}"));
        assert!(codes.contains(&Some(0)), "round {round}: {codes:?}: {message}");
        let last = message.lines().last().unwrap_or_default();
        assert!(
            last.contains("is used by another run") || last.contains("holds a run"),
            "{message}"
        );
        assert_eq!(losses(path.join("run/metrics.jsonl")).len(), 20);
    }
}

#[test]
fn a_killed_job_of_ranks_gives_its_folder_back() {
    let folder = folder_with_text();
    let path = folder.path();
    let long =
        ["--save", "run", "--nproc", "2", "--train-iters", "100000000", "--save-interval", "2"];
    let mut first = start(path, &long);
    wait_for_a_step(&path.join("run"));
    let begin = Instant::now();
    while !path.join("run/latest").exists() {
        assert!(begin.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(10));
    }
    first.kill().unwrap();
    first.wait().unwrap();
    // Its ranks end with it, some moments later.
    let begin = Instant::now();
    let (output, message) = loop {
        let output = train(path, &["--load", "run", "--nproc", "1", "--train-iters", "1"]);
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        if !message.contains("is used by another run") || begin.elapsed() > Duration::from_secs(60)
        {
            break (output, message);
        }
    };
    assert!(output.status.success(), "{message}");
}
