//! Switches of the model one by one: Megatron-LM's pair of a window, biases of norms, norms of queries and keys around 0.

use super::models_and_data::refused;
use super::{TINY, ferrotron, folder_with_text, losses, succeeded};
use serde_json::Value;
use std::path::Path;

fn run(folder: &Path, command: &str, more: &str) -> std::process::Output {
    let more: Vec<&str> = more.split_whitespace().collect();
    ferrotron(folder, &[&[command, "--data", "text.txt"], TINY, &more].concat())
}

/// The number of parameters, which `memory` counts.
fn parameters(folder: &Path, more: &str) -> u64 {
    let report = succeeded(run(folder, "memory", &format!("{more} --json")));
    serde_json::from_str::<Value>(&report).unwrap()["parameters"].as_u64().unwrap()
}

#[test]
fn a_window_may_be_megatron_s_pair() {
    let folder = folder_with_text();
    let path = folder.path();
    for (save, window) in [("one", "4"), ("pair", "3,0"), ("tuple", "(3,0)")] {
        succeeded(run(path, "train", &format!("--window-size {window} --save {save}")));
        assert_eq!(
            losses(path.join(save).join("metrics.jsonl")),
            losses(path.join("one/metrics.jsonl"))
        );
    }
    // The checkpoint remembers the number, which no spelling contradicts.
    succeeded(run(path, "train", "--window-size 4 --load pair --save pair --train-iters 22"));
    succeeded(run(path, "train", "--window-size 3,0 --load pair --save pair --train-iters 24"));
    for (window, part) in [
        ("3,1", "must be A,0: a query sees no keys behind it"),
        ("-1,0", "asks for no window: leave the option out"),
        ("-1,-1", "asks for no window: leave the option out"),
        ("-2,0", "is no pair A,0"),
        ("3,", "is no pair A,0"),
        ("wide", "is no number of keys"),
    ] {
        let output = run(path, "train", &format!("--window-size {window} --save refused"));
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && message.contains(part), "{window}: {message}");
    }
    let line = refused(run(path, "train", "--window-size 0 --save refused"), 2);
    assert!(line.contains("window-size must be positive, got 0"), "{line}");
}

/// Norms keep their biases without those of linear layers, as in Megatron-LM, and lose them by an option of their own. All
/// layouts train alike, and take the memory that `memory` says.
#[test]
fn biases_of_norms_are_a_switch_of_their_own() {
    let folder = folder_with_text();
    let path = folder.path();
    let all = parameters(path, "");
    // One block of width 16: two norms and the last one have 3 x 16, linear layers 48 + 16 + 64 + 16.
    assert_eq!(parameters(path, "--disable-bias-norm"), all - 48);
    assert_eq!(parameters(path, "--disable-bias-linear"), all - 144);
    assert_eq!(parameters(path, "--disable-bias-linear --disable-bias-norm"), all - 192);
    let rms = parameters(path, "--normalization RMSNorm --disable-bias-linear");
    assert_eq!(rms, all - 192);
    let norms = "--qk-layernorm --apply-layernorm-1p --position-embedding-type rope";
    for (name, more) in [
        ("linear", "--disable-bias-linear"),
        ("norm", "--disable-bias-norm"),
        ("both", "--disable-bias-linear --disable-bias-norm"),
        ("queries", norms),
    ] {
        let common = format!("{more} --num-layers 2 --dtype f64 --eval-interval 0 --train-iters 5");
        succeeded(run(path, "train", &format!("{common} --save {name}")));
        let report = succeeded(run(path, "memory", &format!("{common} --json")));
        let report: Value = serde_json::from_str(&report).unwrap();
        let metrics = std::fs::read_to_string(path.join(name).join("metrics.jsonl")).unwrap();
        let last: Value = serde_json::from_str(metrics.lines().last().unwrap()).unwrap();
        assert_eq!(report["total_bytes"], last["mem_peak_bytes"], "{name}");
        let number = |line: &(u64, String)| line.1.parse::<f64>().unwrap();
        for (run_name, layout) in [
            ("tp", "--nproc 2 --tensor-model-parallel-size 2 --sequence-parallel"),
            ("pp", "--nproc 2 --pipeline-model-parallel-size 2"),
            ("cp", "--nproc 2 --context-parallel-size 2"),
            ("dp", "--nproc 2 --zero-stage 3 --global-batch-size 2 --micro-batch-size 1"),
        ] {
            let save = format!("{name}-{run_name}");
            succeeded(run(path, "train", &format!("{common} {layout} --save {save}")));
            let found = losses(path.join(&save).join("metrics.jsonl"));
            let wanted = losses(path.join(name).join("metrics.jsonl"));
            for (a, b) in found.iter().zip(&wanted) {
                assert!((number(a) - number(b)).abs() < 1e-9, "{save}: {a:?} {b:?}");
            }
            assert_eq!(found.len(), 5);
        }
        // The checkpoint goes on in another layout, and no family holds such norms.
        let resume =
            ["train", "--load", name, "--save", name, "--train-iters", "6", "--nproc", "2"];
        succeeded(ferrotron(path, &[&resume[..], &["--tensor-model-parallel-size", "2"]].concat()));
        let output = ferrotron(path, &["export", "--load", name, "--output", "hf"]);
        let line = refused(output, 2);
        assert!(line.contains("this model cannot be a Hugging Face "), "{name}: {line}");
    }
    succeeded(ferrotron(
        path,
        &["generate", "--load", "queries", "--prompt", "line", "--max-new-tokens", "3"],
    ));
}
