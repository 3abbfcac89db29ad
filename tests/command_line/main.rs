//! The program as a user meets it: what it leaves behind, tells and refuses.

mod async_saves;
mod bad_steps;
mod bert;
mod bert_validation_sets;
mod blends;
mod checkpoints;
mod data_change;
mod documents;
mod exports;
mod first_hour;
mod freezing;
mod gemma;
mod gpu;
mod hugging_face;
mod indexed_data;
mod long_data;
mod many_files;
mod memory;
mod models_and_data;
mod old_checkpoints;
mod optimizers;
mod options;
mod output_files;
mod packing;
mod parse_errors;
mod plan;
mod precision;
mod presets;
mod profile;
mod race;
mod refusals;
mod report;
mod schedule;
mod serve;
mod serve_clients;
mod simulate;
mod stopping;
mod streams;
mod switches;
mod tasks;
mod tasks_in_runs;
mod tokenize;
#[cfg(target_os = "linux")]
mod tokenize_memory;
mod train_samples;
mod two_runs;
mod validation_sets;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

/// A model that `plan` and `simulate` are asked about; the number of words comes last.
const PLANNED_MODEL: &[&str] = &[
    "--num-layers",
    "4",
    "--hidden-size",
    "256",
    "--num-attention-heads",
    "4",
    "--seq-length",
    "128",
    "--vocab-size",
    "512",
];

/// A model that trains in a blink.
const TINY: &[&str] = &[
    "--num-layers",
    "1",
    "--hidden-size",
    "16",
    "--num-attention-heads",
    "2",
    "--seq-length",
    "8",
    "--micro-batch-size",
    "2",
    "--train-iters",
    "20",
    "--eval-interval",
    "10",
    "--save-interval",
    "5",
    "--save-retain",
    "10",
    "--log-interval",
    "5",
    "--sample-length",
    "20",
    "--threads",
    "1",
];

fn ferrotron(folder: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ferrotron"))
        .current_dir(folder)
        .args(arguments)
        .output()
        .expect("the program starts")
}

fn train(folder: &Path, more: &[&str]) -> Output {
    let mut arguments = vec!["train", "--data", "text.txt"];
    arguments.extend(TINY);
    arguments.extend(more);
    ferrotron(folder, &arguments)
}

fn folder_with_text() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let text: String =
        (0..400).map(|i| format!("line {} of a small text.\n", i * 7919 % 1000)).collect();
    std::fs::write(folder.path().join("text.txt"), text).unwrap();
    folder
}

fn succeeded(output: Output) -> String {
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "status {:?}\n{out}\n{err}", output.status);
    out.into_owned()
}

/// A JSON file of a checkpoint.
fn checkpoint_file(checkpoint: &Path, name: &str) -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(checkpoint.join(name)).unwrap()).unwrap()
}

/// Replaces a JSON file of a checkpoint, under a correct checksum.
fn write_checkpoint_file(checkpoint: &Path, name: &str, value: &serde_json::Value) {
    let text = value.to_string();
    let mut index = checkpoint_file(checkpoint, "index.json");
    let crc32 = crc32fast::hash(text.as_bytes());
    index["files"][name] = serde_json::json!({ "bytes": text.len(), "crc32": crc32 });
    std::fs::write(checkpoint.join(name), text).unwrap();
    std::fs::write(checkpoint.join("index.json"), index.to_string()).unwrap();
}

fn losses(path: PathBuf) -> Vec<(u64, String)> {
    let text = std::fs::read_to_string(path).unwrap();
    let parse = |line: &str| {
        let value: serde_json::Value = serde_json::from_str(line).unwrap();
        (value["step"].as_u64().unwrap(), value["loss"].to_string())
    };
    text.lines().map(parse).collect()
}

fn weights(run: &Path, step: u64) -> Vec<u8> {
    let folder = run.join(format!("iter_{step:07}"));
    let mut bytes = std::fs::read(folder.join("model.safetensors")).unwrap();
    bytes.extend(std::fs::read(folder.join("optimizer.safetensors")).unwrap());
    bytes
}

#[test]
fn a_run_leaves_metrics_a_picture_and_a_checkpoint_that_generates() {
    let folder = folder_with_text();
    let out = succeeded(train(folder.path(), &[]));
    assert!(out.contains("validation loss") && out.contains("sample: "), "{out}");
    let run = folder.path().join("runs/0001");
    let lines = losses(run.join("metrics.jsonl"));
    assert_eq!(lines.iter().map(|line| line.0).collect::<Vec<_>>(), (1..=20).collect::<Vec<_>>());
    assert!(std::fs::read_to_string(run.join("loss.svg")).unwrap().contains("<svg"));

    let text = succeeded(ferrotron(
        folder.path(),
        &["generate", "--prompt", "line", "--max-new-tokens", "12"],
    ));
    assert!(
        text.starts_with("line") && text.trim_end_matches('\n').chars().count() >= 10,
        "{text:?}"
    );
    let again = succeeded(ferrotron(
        folder.path(),
        &["generate", "--prompt", "line", "--max-new-tokens", "12"],
    ));
    assert_eq!(text, again, "the same seed gives the same text");

    let report = succeeded(ferrotron(folder.path(), &["eval", "--data", "text.txt", "--json"]));
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    assert!(
        report["loss"].as_f64().unwrap().is_finite() && report["tokens"].as_u64().unwrap() > 100
    );

    succeeded(ferrotron(folder.path(), &["export", "--load", "runs/0001", "--output", "hf"]));
    assert!(
        folder.path().join("hf/model.safetensors").exists()
            && folder.path().join("hf/config.json").exists()
    );
}

/// The same samples in every evaluation, the last one included, and none where none is wanted.
#[test]
fn an_evaluation_covers_as_much_as_was_asked_for() {
    let folder = folder_with_text();
    let evaluated = |options: &str| {
        let _ = std::fs::remove_dir_all(folder.path().join("run"));
        let options: Vec<&str> = options.split_whitespace().collect();
        let output = train(folder.path(), &[&options[..], &["--save", "run"]].concat());
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        let out = succeeded(output);
        let tokens =
            told.lines().filter_map(|line| line.split_once(" over ")?.1.split_once(" tok"));
        let tokens: Vec<u64> = tokens.map(|found| found.0.parse().unwrap()).collect();
        let metrics = std::fs::read_to_string(folder.path().join("run/metrics.jsonl")).unwrap();
        assert_eq!(metrics.matches("validation_loss").count(), tokens.len(), "{told}");
        assert_eq!(metrics.lines().count(), 20);
        assert_eq!(out.contains("validation loss"), !tokens.is_empty(), "{out}");
        if let Some(last) = tokens.last() {
            assert!(metrics.lines().last().unwrap().contains("validation_loss"));
            assert!(out.contains(&format!("(bigrams of the same {last} tokens: ")), "{out}");
        }
        tokens
    };
    // Steps 10 and 20; samples of 8 tokens; a global batch has 2 or 6.
    assert_eq!(evaluated("--eval-iters 3"), [48, 48]);
    assert_eq!(evaluated("--eval-iters 3 --global-batch-size 6"), [144, 144]);
    assert_eq!(evaluated("--eval-iters 3 --nproc 3"), [144, 144]);
    let length = std::fs::metadata(folder.path().join("text.txt")).unwrap().len();
    let held_out = length - (length as f64 * 0.9) as u64 - 1;
    assert_eq!(evaluated("--eval-iters all"), [held_out; 2]);
    assert_eq!(evaluated("--eval-iters all --eval-interval 100"), [held_out]);
    assert!(evaluated("--eval-iters 0").is_empty());
    assert!(evaluated("--eval-interval 0").is_empty());
}

#[test]
fn a_resumed_run_is_the_same_run_to_the_last_bit() {
    let folder = folder_with_text();
    let dropout =
        ["--hidden-dropout", "0.1", "--attention-dropout", "0.1", "--global-batch-size", "4"];
    let whole = [&dropout[..], &["--save", "whole"]].concat();
    succeeded(train(folder.path(), &whole));

    // The first half ends as if killed: after its checkpoint it takes some steps that are lost.
    let half = [&dropout[..], &["--save", "parts", "--exit-interval", "10"]].concat();
    succeeded(train(folder.path(), &half));
    let metrics = folder.path().join("parts/metrics.jsonl");
    let mut lost = std::fs::read_to_string(&metrics).unwrap();
    let line = "{\"step\":11,\"loss\":0.0,\"lr\":0.1,\"grad_norm\":1.0,\"tokens\":32}\n";
    lost.push_str(&format!("{line}{}", &line.replace("11", "12")[..14]));
    std::fs::write(&metrics, lost).unwrap();
    // Options that are typed again replace those of the run; they do not add to them.
    // Where the optimizer's state and activations wait changes nothing.
    let go_on = ["train", "--load", "parts", "--data", "text.txt", "--offload-optimizer-states"];
    let offload = ["--cpu-offloading-num-layers", "1", "--offload-folder", "elsewhere"];
    succeeded(ferrotron(folder.path(), &[&go_on[..], &offload].concat()));

    let [whole, parts] = ["whole", "parts"].map(|name| folder.path().join(name));
    assert_eq!(losses(whole.join("metrics.jsonl")), losses(parts.join("metrics.jsonl")));
    assert!(weights(&whole, 20) == weights(&parts, 20), "weights or moments differ");
}

#[test]
fn a_damaged_checkpoint_is_named_and_the_previous_one_offered() {
    let folder = folder_with_text();
    succeeded(train(folder.path(), &["--save", "run"]));
    let file = folder.path().join("run/iter_0000020/model.safetensors");
    let bytes = std::fs::read(&file).unwrap();
    std::fs::write(&file, &bytes[..bytes.len() - 100]).unwrap();
    let output = ferrotron(folder.path(), &["generate", "--load", "run"]);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(message.contains("iter_0000020") && message.contains("iter_0000015"), "{message}");
}

#[test]
fn options_come_from_a_file_and_the_command_line_overrides_them() {
    let folder = folder_with_text();
    let config = "data = \"text.txt\"\nnum_layers = 1\nhidden-size = 16\nnum-attention-heads = 2\nseq-length = 8\n\
                  micro-batch-size = 2\ntrain-iters = 4\nthreads = 1\nsave = \"run\"\nsample-length = 0\nswiglu = true\n\
                  ffn-hidden-size = 64\nsave-interval = 1000\n";
    std::fs::write(folder.path().join("run.toml"), config).unwrap();
    succeeded(ferrotron(folder.path(), &["train", "--config", "run.toml", "--train-iters", "3"]));
    assert_eq!(losses(folder.path().join("run/metrics.jsonl")).len(), 3);
}

#[test]
fn the_doctor_names_every_library_with_its_version_or_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let text = succeeded(ferrotron(folder.path(), &["doctor"]));
    let json = succeeded(ferrotron(folder.path(), &["doctor", "--json"]));
    let report: serde_json::Value = serde_json::from_str(&json).unwrap();
    for library in ["libcuda", "libnvrtc", "libcublasLt", "libnccl"] {
        assert!(text.lines().any(|line| line.starts_with(&format!("{library}.so"))), "{text}");
        let found = &report["libraries"][library];
        assert_ne!(found["version"].is_string(), found["missing"].is_string(), "{report}");
    }
    assert!(text.starts_with("processor        products by "), "{text}");
    assert!(report["processor"]["bf16"].is_string(), "{report}");
    assert!(report["devices"].is_array() || report["devices"]["missing"].is_string(), "{report}");
}

#[test]
fn a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_checkpoint() {
    let folder = folder_with_text();
    succeeded(train(folder.path(), &["--save", "run"]));
    let explode = [
        "train",
        "--load",
        "run",
        "--train-iters",
        "30",
        "--lr",
        "1e30",
        "--lr-decay-style",
        "constant",
        "--lr-warmup-iters",
        "0",
        "--clip-grad",
        "0",
        "--save-interval",
        "0",
    ];
    let output = ferrotron(folder.path(), &explode);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(message.contains("step 2") && message.contains("first offender: "), "{message}");
    assert!(message.contains("; to go on without such steps, add --on-bad-step skip"), "{message}");
    let latest = std::fs::read_to_string(folder.path().join("run/latest")).unwrap();
    assert_eq!(latest.trim(), "iter_0000020");
    succeeded(ferrotron(folder.path(), &["generate", "--load", "run", "--max-new-tokens", "2"]));
}

#[cfg(unix)]
#[test]
fn interrupts_at_once_finish_the_step_and_save() {
    let folder = folder_with_text();
    let mut arguments = vec!["train", "--data", "text.txt"];
    arguments.extend(TINY);
    arguments.extend(["--save", "run", "--train-iters", "1000000", "--save-interval", "0"]);
    let mut child = Command::new(env!("CARGO_BIN_EXE_ferrotron"))
        .current_dir(folder.path())
        .args(&arguments)
        .stderr(std::process::Stdio::null())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let metrics = folder.path().join("run/metrics.jsonl");
    while std::fs::metadata(&metrics).map_or(0, |data| data.len()) == 0 {
        assert!(child.try_wait().unwrap().is_none(), "ended before its first step");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    // As `timeout -s INT` does.
    let interrupt = || Command::new("kill").args(["-INT", &child.id().to_string()]).status();
    let (first, _) = (interrupt().unwrap(), interrupt());
    assert!(first.success());
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let last = losses(metrics).last().unwrap().0;
    assert!(folder.path().join(format!("run/iter_{last:07}/model.safetensors")).exists());
}
