//! Asynchronous data parallelism from the command line.

use serde_json::Value;
use std::path::Path;

use super::{MODEL, assert_same, command, finished, folder_with_text, succeeded, texts};

/// The updates that the weights of each rank missed, by step.
fn staleness(run: &Path) -> Vec<Vec<u64>> {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let missed = |line: (usize, &str)| {
        let step: Value = serde_json::from_str(line.1).unwrap();
        assert_eq!(step["step"], line.0 + 1, "updates are applied in the order of the steps");
        step["staleness"].as_array().unwrap().iter().map(|steps| steps.as_u64().unwrap()).collect()
    };
    text.lines().enumerate().map(missed).collect()
}

#[test]
fn staleness_is_bounded_logged_and_none_behind_a_drain() {
    let folder = folder_with_text();
    let path = folder.path();
    let model = MODEL.replace("--eval-interval 3", "--eval-interval 8");
    let options = "--async-data-parallel --max-staleness 2 --drain-interval 4";
    let line = format!("{model} --nproc 2 --save stale --train-iters 16 {options}");
    succeeded(finished(command(path, &format!("{line} --exit-interval 8 --async-save"))));
    // Without it, the options that need it are forgotten too.
    let plain =
        "train --load stale --save plain --nproc 2 --async-data-parallel=false --exit-interval 12";
    succeeded(finished(command(path, plain)));
    assert!(path.join("plain/iter_0000012").exists());
    // The checkpoint remembers that the run is asynchronous.
    succeeded(finished(command(path, "train --load stale --save stale --nproc 2")));
    let log = staleness(&path.join("stale"));
    assert_eq!(log.len(), 16);
    for (index, missed) in log.iter().enumerate() {
        let most = (index as u64 % 4).min(2);
        assert!(missed.len() == 2 && missed.iter().all(|&missed| missed <= most), "{log:?}");
    }
    assert!(path.join("stale/iter_0000008").exists() && path.join("stale/iter_0000016").exists());
}

/// Every rank says which step it was, though each has taken another number of later ones.
#[test]
fn all_ranks_name_the_step_that_is_not_finite() {
    let folder = folder_with_text();
    let options = "--async-data-parallel --max-staleness 2 --drain-interval 4 --clip-grad 0";
    let model = MODEL.replace("--eval-interval 3", "--eval-interval 8");
    let line =
        format!("{model} --nproc 2 --train-iters 8 --lr 1e38 --async-save --save run {options}");
    for _ in 0..3 {
        let output = finished(command(folder.path(), &line));
        let (_, err) = texts(&output);
        assert!(!output.status.success());
        let reasons: Vec<&str> =
            err.lines().filter_map(|line| Some(line.split_once(": train: ")?.1)).collect();
        assert_eq!(reasons.len(), 2, "{err}");
        assert!(reasons[0] == reasons[1] && !err.contains("gone"), "{err}");
        assert!(reasons[0].contains(": loss "), "{err}");
        std::fs::remove_dir_all(folder.path().join("run")).unwrap();
    }
}

#[test]
fn staleness_of_0_is_the_synchronous_run() {
    let folder = folder_with_text();
    let path = folder.path();
    let line = |options: &str| format!("{MODEL} --nproc 2 --train-iters 6 {options}");
    let none = line("--save none --async-data-parallel --max-staleness 0");
    succeeded(finished(command(path, &none)));
    succeeded(finished(command(path, &line("--save plain"))));
    assert_same("staleness 0", &path.join("none"), &path.join("plain"), 0.0);
}

/// A machine whose ranks sum the gradients of a small model about as long as they compute them.
const CLUSTER: &str = r#"
description = "two cores"
device = "cpu"
[gpu]
threads = 1
dtype = "f32"
memory_gb = 16
memory_gb_per_s = 20
product_efficiency = 0.5
attention_efficiency = 0.3
memory_efficiency = 0.5
launch_us = 1
[gpu.peak_tflops]
f32 = 0.1
[node]
gpus = 2
gb_per_s = 0.5
latency_us = 20
[network]
gb_per_s = 0.5
latency_us = 20
[software]
attention = "fused"
overlap_grad_reduce = true
overlap_messages = true
scatter_gather = true
"#;

#[test]
fn predicted_steps_do_not_wait_for_their_own_sums() {
    let folder = folder_with_text();
    std::fs::write(folder.path().join("own.toml"), CLUSTER).unwrap();
    let model = "--nproc 2 --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 32 \
                 --vocab-size 4096 --micro-batch-size 2 --global-batch-size 8";
    let json = |words: String| -> Value {
        serde_json::from_str(&texts(&finished(command(folder.path(), &words))).0).unwrap()
    };
    let simulate = |options: &str| -> Value {
        json(format!("simulate --cluster own.toml --json --by-kernel {model} {options}"))
    };
    let sum = |report: &Value, key: &str| -> f64 {
        report[key].as_object().unwrap().values().map(|part| part.as_f64().unwrap()).sum()
    };
    let number = |report: &Value, key: &str| report[key].as_f64().unwrap();
    let synchronous = simulate("");
    let (computing, seconds) =
        (sum(&synchronous, "computing_s"), number(&synchronous, "s_per_step"));
    let mut last = f64::INFINITY;
    for staleness in [0, 1, 3] {
        let options =
            format!("--async-data-parallel --max-staleness {staleness} --drain-interval 20");
        let found = simulate(&options);
        let step = number(&found, "s_per_step");
        let parts = sum(&found, "computing_s") + sum(&found, "exposed_communication_s");
        assert!((parts / step - 1.0).abs() < 1e-9, "{found}");
        assert!((sum(&found, "computing_s") / computing - 1.0).abs() < 1e-9, "{found}");
        let kernels = found["kernels"].as_array().unwrap().iter();
        let kernels: f64 = kernels.map(|kernel| 1e-3 * kernel["ms"].as_f64().unwrap()).sum();
        assert!((kernels / computing - 1.0).abs() < 1e-9, "{found}");
        let memory = json(format!("memory --json {model} {options}"));
        assert_eq!(found["peak_bytes"], memory["total_bytes"]);
        match staleness {
            0 => assert_eq!(step, seconds),
            // A sum is waited for behind a drain at most, of which there is one in 20 steps.
            _ => assert!(step < 0.9 * seconds && step < 1.1 * computing, "{found} {synchronous}"),
        }
        assert!(step <= last, "{staleness}: {found}");
        last = step;
    }
    // The trace has the steps one by one.
    let traced = "--async-data-parallel --max-staleness 2 --drain-interval 5 --trace steps.json";
    simulate(traced);
    let trace = std::fs::read_to_string(folder.path().join("steps.json")).unwrap();
    let trace: Value = serde_json::from_str(&trace).unwrap();
    let events = trace["traceEvents"].as_array().unwrap().iter();
    let steps: Vec<&Value> = events.filter(|event| event["cat"] == "step").collect();
    let numbers: Vec<u64> =
        steps.iter().map(|event| event["args"]["step"].as_u64().unwrap()).collect();
    assert_eq!(numbers, [1, 2, 3, 4, 5]);
    let ends = |event: &Value| number(event, "ts") + number(event, "dur");
    let follow = steps.windows(2).all(|pair| ends(pair[0]) <= number(pair[1], "ts") + 1e-6);
    assert!(follow, "{steps:?}");
    let line = format!("plan --cluster own.toml {model} --async-data-parallel");
    let line = line.replace("--micro-batch-size 2", "");
    for (line, part) in [
        (line, "--async-data-parallel: plan compares layouts with the same losses: leave it out"),
        (
            "simulate --cluster h100 --async-data-parallel --vocab-size 50257".to_string(),
            "--async-data-parallel: does not go with a GPU",
        ),
        (
            format!(
                "simulate --cluster own.toml {model} --async-data-parallel --drain-interval 1000000000"
            ),
            "--drain-interval: 1000000000 steps until a drain are too many to predict together: give at most 10000",
        ),
    ] {
        let output = finished(command(folder.path(), &line));
        let (_, message) = texts(&output);
        assert_eq!((output.status.code(), message.lines().count()), (Some(2), 1), "{message}");
        assert!(message.contains(part), "{message}");
    }
}
