//! `ferrotron plan`: what it prints, writes and refuses.

use serde_json::Value;

use super::{PLANNED_MODEL, ferrotron, folder_with_text, succeeded};

fn planned<'a>(more: &[&'a str]) -> Vec<&'a str> {
    let plan = ["plan", "--cluster", "h100", "--global-batch-size", "8"];
    [&plan, PLANNED_MODEL, &["--bf16"], more].concat()
}

#[test]
fn the_best_layout_is_one_that_the_other_commands_take() {
    let folder = folder_with_text();
    let run = |words: &[&str]| succeeded(ferrotron(folder.path(), words));
    let report = run(&planned(&["--nproc", "4", "--output", "layout.toml", "--json"]));
    let report: Value = serde_json::from_str(&report).unwrap();
    let best = report["best"].as_array().unwrap();
    assert_eq!(best.len(), 5, "{report}");
    let seconds = |found: &Value| found["s_per_step"].as_f64().unwrap();
    assert!(best.windows(2).all(|pair| seconds(&pair[0]) <= seconds(&pair[1])), "{report}");
    assert!(report["runner_up"].as_str().unwrap().contains("% slower"), "{report}");

    let simulate = ["simulate", "--cluster", "h100", "--bf16", "--json", "--config", "layout.toml"];
    let simulated: Value =
        serde_json::from_str(&run(&[&simulate, PLANNED_MODEL].concat())).unwrap();
    for key in ["s_per_step", "bubble", "mfu"] {
        let (a, b) = (simulated[key].as_f64().unwrap(), best[0][key].as_f64().unwrap());
        assert!((a - b).abs() <= 1e-12 * a.abs(), "{key}: {a} {b}");
    }
    assert_eq!(simulated["peak_bytes"], best[0]["peak_bytes"]);

    let table = run(&planned(&["--nproc", "4", "--nodes", "2", "--explain"]));
    for part in ["8 GPUs", "s a step", "the second is", "tensor parallel up to a node (4 GPUs)"] {
        assert!(table.contains(part), "{part} is missing: {table}");
    }
    // Five layouts fit without host memory.
    assert!(report["not_compared"].as_u64().unwrap() > 0, "{report}");
    assert!(table.contains("not compared since they use host memory without need"), "{table}");
    let stated = run(&planned(&["--nproc", "2", "--offload-optimizer-states"]));
    assert!(!stated.contains("not compared"), "{stated}");
    let rows = stated.lines().filter(|line| line.contains(" states "));
    assert_eq!(rows.count(), 5, "{stated}");
    // The rules are older than shards of gradients and weights.
    let rules = table.lines().find(|line| line.starts_with("rules: ")).unwrap();
    assert!(rules.contains("tensor 4, context 1, pipeline 1, 1f1b, chunks 1"), "{rules}");
    assert!(rules.contains("ZeRO 0") || rules.contains("ZeRO 1"), "{rules}");
}

#[test]
fn a_training_takes_the_file_of_the_best_layout() {
    let folder = folder_with_text();
    let run = |words: &[&str]| succeeded(ferrotron(folder.path(), words));
    run(&planned(&["--nproc", "2", "--output", "layout.toml"]));
    let model = &PLANNED_MODEL[..PLANNED_MODEL.len() - 2];
    let train = ["train", "--data", "text.txt", "--config", "layout.toml", "--train-iters", "1"];
    run(&[&train, model, &["--eval-interval", "0"]].concat());
}

#[test]
fn bad_requests_get_one_line() {
    let folder = folder_with_text();
    for (more, part) in [
        (["--cluster", "dgx-3"], "'dgx-3' is neither"),
        (["--nproc", "9"], "--nproc: 9 ranks"),
        (["--zero-stage", "1"], "--zero-stage: plan decides it"),
        (["--load", "run"], "--load"),
        (["--global-batch-size", "0"], "--global-batch-size"),
        (["--nodes", "1000"], "no multiple of the data-parallel ranks"),
        (["--memory-limit", "1MB"], "the least that was found is"),
        (["--num-attention-heads", "3"], "num-attention-heads"),
        (["--context-parallel-size", "0"], "--context-parallel-size"),
        (["--output", "text.txt"], "--output: text.txt holds something else than a layout"),
    ] {
        let output = ferrotron(folder.path(), &planned(&more));
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{more:?}: {message}");
        assert_eq!(message.lines().count(), 1, "{message}");
        assert!(message.contains(part), "{part} is missing: {message}");
    }
    let small = planned(&["--memory-limit", "42MB", "--cpu-offloading-num-layers", "0"]);
    let output = ferrotron(folder.path(), &small);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!((output.status.code(), message.lines().count()), (Some(2), 1), "{message}");
    assert!(message.contains(": 16 GPUs are enough, with 4"), "{message}");
    // A search that finds nothing leaves no file.
    let nothing = planned(&["--memory-limit", "1MB", "--output", "layout.toml"]);
    assert!(!ferrotron(folder.path(), &nothing).status.success());
    assert!(!folder.path().join("layout.toml").exists());
}
