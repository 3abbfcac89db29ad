//! `--async-save`: checkpoints that are written while training goes on.

use super::{TINY, ferrotron, folder_with_text, losses, succeeded, train};
use serde_json::Value;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// The bytes of all files of a checkpoint but the documents, which name the options.
fn tensors(checkpoint: &Path) -> Vec<(String, Vec<u8>)> {
    let entries = std::fs::read_dir(checkpoint).unwrap().map(|entry| entry.unwrap());
    let mut files: Vec<(String, Vec<u8>)> = entries
        .map(|entry| (entry.file_name().into_string().unwrap(), entry.path()))
        .filter(|(name, _)| !["config.json", "index.json"].contains(&name.as_str()))
        .map(|(name, path)| (name, std::fs::read(path).unwrap()))
        .collect();
    files.sort();
    files
}

#[test]
fn they_have_the_same_bytes() {
    let folder = folder_with_text();
    let path = folder.path();
    let layouts: [&[&str]; 3] = [
        &[],
        &["--nproc", "2", "--zero-stage", "1"],
        &["--nproc", "2", "--pipeline-model-parallel-size", "2", "--num-layers", "2"],
    ];
    for layout in layouts {
        for (run, options) in [("blocking", &[][..]), ("async", &["--async-save"])] {
            let common = ["--sample-length", "0", "--save", run];
            let output = train(path, &[&common[..], layout, options].concat());
            let told = String::from_utf8_lossy(&output.stderr).into_owned();
            succeeded(output);
            assert_eq!(told.matches("saved async/iter_").count(), 4 * options.len(), "{told}");
        }
        for step in [5, 10, 15, 20] {
            let of = |run: &str| tensors(&path.join(format!("{run}/iter_{step:07}")));
            assert!(of("blocking").len() >= 4);
            assert!(of("blocking") == of("async"), "step {step}, {layout:?}");
        }
        let all = ["checkpoint", "verify", "async", "--all"];
        assert_eq!(succeeded(ferrotron(path, &all)).matches(": ok\n").count(), 4);
        for run in ["blocking", "async"] {
            std::fs::remove_dir_all(path.join(run)).unwrap();
        }
    }
}

#[test]
fn their_copy_is_in_the_memory_of_a_rank() {
    let folder = folder_with_text();
    let report = |more: &[&str]| -> Value {
        let arguments = [&["memory", "--data", "text.txt", "--json"], TINY, more].concat();
        serde_json::from_str(&succeeded(ferrotron(folder.path(), &arguments))).unwrap()
    };
    let (blocking, copying) = (report(&[]), report(&["--async-save"]));
    let stage = |report: &Value, name: &str| report["stages"][0][name].as_u64().unwrap();
    let copy = stage(&blocking, "weights_bytes") + stage(&blocking, "optimizer_bytes");
    assert_eq!(stage(&copying, "snapshot_bytes"), copy);
    assert_eq!(stage(&copying, "total_bytes"), stage(&blocking, "total_bytes") + copy);

    let limit = (copying["total_bytes"].as_u64().unwrap() - 1).to_string();
    let limited = ["--async-save", "--memory-limit", &limit];
    let output = train(folder.path(), &limited);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(message.contains("snapshot") && message.contains("--async-save=false"), "{message}");

    succeeded(train(folder.path(), &["--async-save", "--save", "run"]));
    let metrics = std::fs::read_to_string(folder.path().join("run/metrics.jsonl")).unwrap();
    let last: Value = serde_json::from_str(metrics.lines().last().unwrap()).unwrap();
    assert_eq!(last["mem_peak_bytes"], copying["total_bytes"]);

    let table = [&["memory", "--data", "text.txt"], TINY].concat();
    assert!(!succeeded(ferrotron(folder.path(), &table)).contains("snapshot"));
    let table = [&table[..], &["--async-save"]].concat();
    assert!(succeeded(ferrotron(folder.path(), &table)).contains("snapshot"));
}

/// Whatever ends the run, the checkpoint of its last step is there; and it remembers that it saves so.
#[test]
fn the_end_of_a_run_waits_for_them() {
    for layout in ["", "--nproc 2"] {
        let folder = folder_with_text();
        let path = folder.path();
        let mut more = vec!["--async-save", "--save", "run", "--exit-interval", "10"];
        more.extend(layout.split_whitespace());
        succeeded(train(path, &[&more[..], &["--save-interval", "10"]].concat()));
        assert_eq!(std::fs::read_to_string(path.join("run/latest")).unwrap(), "iter_0000010\n");
        let config = std::fs::read(path.join("run/iter_0000010/config.json")).unwrap();
        let config: Value = serde_json::from_slice(&config).unwrap();
        assert_eq!(config["run"]["async-save"], true);

        let mut child = start(path, "1000000", layout, &["--load", "run"]);
        wait_for_steps(path, 30);
        let pid = child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
        assert_eq!(child.wait().unwrap().code(), Some(130), "{layout}");
        let latest = std::fs::read_to_string(path.join("run/latest")).unwrap();
        let (last, _) = losses(path.join("run/metrics.jsonl")).pop().unwrap();
        assert_eq!(latest.trim(), format!("iter_{last:07}"));
        succeeded(ferrotron(path, &["checkpoint", "verify", "run"]));
    }
}

#[test]
fn a_failed_one_ends_the_run_with_one_line_and_leaves_the_one_before() {
    let stages = "--nproc 2 --transport tcp --pipeline-model-parallel-size 2 --num-layers 2";
    for layout in ["", "--nproc 2 --transport tcp", stages] {
        let folder = folder_with_text();
        let path = folder.path();
        let mut more = vec!["--async-save", "--save", "run", "--sample-length", "0"];
        more.extend(layout.split_whitespace());
        succeeded(train(path, &[&more[..], &["--exit-interval", "5"]].concat()));
        let script = format!(
            "trap '' XFSZ; ulimit -f 16; exec \"$0\" train --load run --train-iters 400 --eval-interval 0 {layout}"
        );
        let mut shell = Command::new("sh");
        shell.current_dir(path).args(["-c", &script, env!("CARGO_BIN_EXE_ferrotron")]);
        let output = shell.output().unwrap();
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{layout}: {message}");
        let line = "step 10 was not saved: cannot write 'run/iter_0000010.tmp/";
        assert!(message.contains(line), "{layout}: {message}");
        assert!(message.contains("earlier checkpoints are untouched"), "{layout}: {message}");
        assert!(!path.join("run/iter_0000010.tmp").exists(), "{layout}");
        assert_eq!(std::fs::read_to_string(path.join("run/latest")).unwrap(), "iter_0000005\n");
        succeeded(ferrotron(path, &["checkpoint", "verify", "run"]));
    }
}

#[test]
fn a_kill_at_any_moment_leaves_the_one_before() {
    let folder = folder_with_text();
    let path = folder.path();
    for kill in 0..8_u64 {
        let layout = if kill % 2 == 0 { "" } else { "--nproc 2" };
        let more = ["--save-interval", "1", "--load", "run"];
        let mut child = start(path, "1000000", layout, &more);
        let before = steps(path);
        wait_for_steps(path, before + 3);
        std::thread::sleep(Duration::from_millis(7 * kill));
        let ranks = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", child.id()));
        let ranks = ranks.unwrap_or_default();
        let all: Vec<&str> = ranks.split_whitespace().collect();
        let launcher = child.id().to_string();
        let _ = Command::new("kill").arg("-9").arg(&launcher).args(all).status();
        child.wait().unwrap();
        let found = succeeded(ferrotron(path, &["checkpoint", "verify", "run", "--all"]));
        assert!(found.contains(": ok\n"), "{found}");
    }
    assert!(steps(path) >= 8);
}

fn start(folder: &Path, train_iters: &str, layout: &str, more: &[&str]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrotron"));
    command.current_dir(folder).args(["train", "--data", "text.txt"]).args(TINY);
    command.args(["--save", "run", "--train-iters", train_iters, "--eval-interval", "0"]);
    command.args(["--sample-length", "0", "--async-save", "--global-batch-size", "4"]);
    command.args(layout.split_whitespace()).args(more);
    command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

/// The number of the last step in the metrics.
fn steps(folder: &Path) -> u64 {
    let text = std::fs::read_to_string(folder.join("run/metrics.jsonl")).unwrap_or_default();
    let mut lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.next_back().and_then(|line| line["step"].as_u64()).unwrap_or(0)
}

fn wait_for_steps(folder: &Path, count: u64) {
    for _ in 0..6000 {
        if steps(folder) >= count {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("it has taken {} of {count} steps in a minute", steps(folder));
}
