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
    // All of so few layouts are compared, also those with host memory that fit without.
    assert!(report["layouts"].as_u64().unwrap() <= 2000, "{report}");
    assert_eq!(report["not_compared"], 0, "{report}");
    let stated = run(&planned(&["--nproc", "2", "--offload-optimizer-states"]));
    assert!(!stated.contains("not compared"), "{stated}");
    let rows = stated.lines().filter(|line| line.contains(" states "));
    assert_eq!(rows.count(), 5, "{stated}");
    // The rules are older than shards of gradients and weights.
    let rules = table.lines().find(|line| line.starts_with("rules: ")).unwrap();
    assert!(rules.contains("tensor 4, context 1, pipeline 1, 1f1b, chunks 1"), "{rules}");
    assert!(rules.contains("ZeRO 0") || rules.contains("ZeRO 1"), "{rules}");
}

/// A large space leaves out what uses host memory without need, and says so.
#[test]
fn a_large_space_is_not_compared_whole() {
    let folder = folder_with_text();
    let sizes = ["--nodes", "2", "--num-layers", "24", "--global-batch-size", "256"];
    let table = succeeded(ferrotron(folder.path(), &planned(&sizes)));
    assert!(table.contains("not compared since they use host memory without need"), "{table}");
}

/// One line for each choice that differs, with the step when it alone is that of the rules.
#[test]
fn an_explanation_puts_back_one_choice_at_a_time() {
    let folder = folder_with_text();
    let run = |words: &[&str]| succeeded(ferrotron(folder.path(), words));
    let words = ["--nproc", "4", "--nodes", "2", "--explain", "--output", "layout.toml"];
    let words = [&planned(&words)[..], &["--global-batch-size", "64"]].concat();
    let table = run(&words);
    let line = |start: &str| {
        let found = table.lines().find(|line| line.starts_with(start));
        found.unwrap_or_else(|| panic!("no '{start}': {table}")).to_string()
    };
    // The micro-batch is the one with the least time by the equation.
    let rules = line("micro-batch by the rules: b ");
    let (chosen, tried) = rules["micro-batch by the rules: b ".len()..].split_once(" of ").unwrap();
    let times = tried.split("; ").map(|one| {
        let (micro, seconds) = one.split_once(", T ").unwrap();
        (micro[2..].to_string(), seconds[..seconds.len() - 2].parse::<f64>().unwrap())
    });
    let times: Vec<(String, f64)> = times.collect();
    assert!(times.len() > 2, "{rules}");
    let least = times.iter().map(|(_, seconds)| *seconds).fold(f64::INFINITY, f64::min);
    assert!(times.iter().any(|(micro, seconds)| micro == chosen && *seconds == least), "{rules}");
    assert!(line("rules: ").contains(&format!("micro-batch {chosen}, ")), "{table}");
    let put_back: Vec<&str> =
        table.lines().filter(|line| line.contains(": that alone put back ")).collect();
    assert!(!put_back.is_empty(), "{table}");
    for line in &put_back {
        let outcome = line.split(" put back ").nth(1).unwrap();
        let known = ["takes ", "does not fit: ", "does not go with the other choices"];
        assert!(known.iter().any(|known| outcome.starts_with(known)), "{line}");
    }
    // Its time is that of `simulate` with this option changed.
    let (_, seconds) = line("tensor 1, by the rules 4: ").split_once(" takes ").map_or_else(
        || panic!("{table}"),
        |(start, rest)| (start.to_string(), rest.split(' ').next().unwrap().to_string()),
    );
    let simulate = ["simulate", "--cluster", "h100", "--bf16", "--nproc", "4", "--nodes", "2"];
    let changed = ["--config", "layout.toml", "--tensor-model-parallel-size", "4"];
    let simulated = run(&[&simulate[..], PLANNED_MODEL, &changed].concat());
    assert!(simulated.contains(&format!("step            {seconds} s")), "{simulated}{table}");
}

/// One sample of attention's one head for each of two ranks: the layout is a pipeline.
#[test]
fn a_training_takes_the_file_of_a_pipeline() {
    let folder = folder_with_text();
    let run = |words: &[&str]| succeeded(ferrotron(folder.path(), words));
    let model: Vec<&str> =
        "--num-layers 4 --hidden-size 32 --num-attention-heads 1 --seq-length 16"
            .split(' ')
            .collect();
    let plan: Vec<&str> =
        "plan --cluster h100 --nproc 4 --global-batch-size 2 --vocab-size 64 --output layout.toml"
            .split(' ')
            .collect();
    run(&[&plan[..], &model].concat());
    let layout = std::fs::read_to_string(folder.path().join("layout.toml")).unwrap();
    let stages =
        layout.lines().find_map(|line| line.strip_prefix("pipeline_model_parallel_size = "));
    assert!(stages.unwrap().parse::<usize>().unwrap() > 1, "{layout}");
    assert!(layout.contains("nproc = 4"), "{layout}");
    let train: Vec<&str> =
        "train --data text.txt --config layout.toml --train-iters 1 --eval-interval 0 --threads 1"
            .split(' ')
            .collect();
    run(&[&train[..], &model].concat());
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
