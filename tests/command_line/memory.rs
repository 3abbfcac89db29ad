//! `ferrotron memory`, and what `train` makes of its number.

use super::{TINY, ferrotron, folder_with_text, succeeded, train};

#[test]
fn a_run_tells_what_memory_it_takes_and_is_refused_where_there_is_less() {
    let folder = folder_with_text();
    let arguments = [&["memory", "--data", "text.txt"], TINY].concat();
    let table = succeeded(ferrotron(folder.path(), &arguments));
    for part in ["stage", "weights", "optimizer", "activations", "logits", "total", " kB"] {
        assert!(table.contains(part), "{part} is missing: {table}");
    }
    let report = succeeded(ferrotron(folder.path(), &[&arguments[..], &["--json"]].concat()));
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    let total = report["total_bytes"].as_u64().unwrap();
    assert_eq!(report["stages"][0]["total_bytes"], total);
    let weights = report["stages"][0]["weights_bytes"].as_u64().unwrap();
    assert_eq!(weights, 4 * report["parameters"].as_u64().unwrap());

    let limited = |limit: u64| {
        let limit = limit.to_string();
        train(folder.path(), &["--save", "run", "--memory-limit", &limit])
    };
    let output = limited(total - 1);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert_eq!(message.lines().count(), 1, "{message}");
    for part in ["rank 0", "weights", "--memory-limit", "--micro-batch-size 1"] {
        assert!(message.contains(part), "{part} is missing: {message}");
    }
    let output = limited(total);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(message.contains("memory of a rank: at most "), "{message}");
    succeeded(output);
    let metrics = std::fs::read_to_string(folder.path().join("run/metrics.jsonl")).unwrap();
    let last: serde_json::Value = serde_json::from_str(metrics.lines().last().unwrap()).unwrap();
    assert_eq!(last["mem_peak_bytes"], total);

    // Sharded and cut: a rank of each stage.
    let cut = [
        "--nproc",
        "8",
        "--tensor-model-parallel-size",
        "2",
        "--pipeline-model-parallel-size",
        "2",
        "--num-layers",
        "2",
        "--zero-stage",
        "1",
        "--json",
    ];
    let report = succeeded(ferrotron(folder.path(), &[&arguments[..], &cut].concat()));
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    assert_eq!(report["ranks"], 8);
    assert_eq!(report["stages"][1]["ranks"], 4);
    assert_eq!(report["stages"].as_array().unwrap().len(), 2);
}

/// Each option alone is not enough, all together are.
#[test]
fn a_model_that_does_not_fit_trains_with_what_saves_memory() {
    let folder = folder_with_text();
    let model = [
        "--num-layers",
        "4",
        "--hidden-size",
        "64",
        "--seq-length",
        "64",
        "--micro-batch-size",
        "4",
        "--train-iters",
        "2",
    ];
    let arguments = [&["memory", "--data", "text.txt", "--json"], TINY, &model].concat();
    let report = succeeded(ferrotron(folder.path(), &arguments));
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    let limit = (report["total_bytes"].as_u64().unwrap() * 2 / 5).to_string();
    let options: [&[&str]; 3] =
        [&["--bf16"], &["--offload-optimizer-states"], &["--recompute-granularity", "full"]];
    let attempt = |options: &[&[&str]]| {
        let start = ["--save", "run", "--memory-limit", &limit];
        train(folder.path(), &[&model[..], &start, &options.concat()].concat())
    };
    for refused in [&[][..], &options[..1], &options[1..2], &options[2..]] {
        let output = attempt(refused);
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{refused:?}: {message}");
        assert!(message.contains("--memory-limit"), "{refused:?}: {message}");
    }
    succeeded(attempt(&options));
}

#[test]
fn what_waits_in_host_memory_is_told() {
    let folder = folder_with_text();
    let table = |more: &[&str]| {
        let arguments = [&["memory", "--data", "text.txt"], TINY, more].concat();
        succeeded(ferrotron(folder.path(), &arguments))
    };
    assert!(!table(&[]).contains("host"));
    let offloaded = table(&["--offload-optimizer-states"]);
    let columns: Vec<Vec<&str>> =
        offloaded.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(columns[0].last(), Some(&"host"), "{offloaded}");
    // Two moments, each as large as the weights.
    let [weights, host] = [3, columns[1].len() - 2].map(|at| columns[1][at].parse::<f64>());
    assert_eq!(host.unwrap(), 2.0 * weights.unwrap(), "{offloaded}");
    let output = train(folder.path(), &["--offload-optimizer-states"]);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(message.contains(" of host memory"), "{message}");
}

/// The refusal comes before anything starts, in one line.
#[test]
fn what_no_machine_can_do_is_refused() {
    let folder = folder_with_text();
    for (more, code, part) in [
        (&["--micro-batch-size", "100000000"][..], 2, "use a smaller --micro-batch-size"),
        (&["--micro-batch-size", "10000000000000000000"], 2, "use a smaller --micro-batch-size"),
        (&["--threads", "1000000000000"], 2, "1000000000000"),
        (
            &["--nproc", "2", "--offload-optimizer-states", "--offload-folder", "text.txt"],
            1,
            "ferrotron: offload: cannot make a file in 'text.txt': ",
        ),
    ] {
        let output = train(folder.path(), more);
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{more:?}: {message}");
        assert!(message.contains(part) && message.lines().count() == 1, "{more:?}: {message}");
    }
    // Gradients take the place of activations: what is kept for backward counts where it is more than the gradients.
    for (micro, remedy) in
        [("8", "with --offload-optimizer-states"), ("64", "with --recompute-granularity full")]
    {
        let large = ["train", "--preset", "ptd-1t", "--micro-batch-size", micro];
        let output = ferrotron(folder.path(), &large);
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && message.lines().count() == 1, "{message}");
        let has =
            message.contains("this machine has") || message.contains("the control group allows");
        assert!(has && message.contains(remedy), "{message}");
        assert_eq!(message.contains("--recompute"), micro == "64", "{message}");
    }
    let output = ferrotron(folder.path(), &["memory", "--device", "nowhere"]);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(2) && message.contains("'nowhere'"), "{message}");
    assert!(!folder.path().join("runs").exists(), "nothing has started");
}

/// The tokens that a BERT adds to a vocabulary count in both commands.
#[test]
fn a_vocabulary_size_is_that_of_the_tokenizer() {
    let folder = folder_with_text();
    let text = std::fs::read_to_string(folder.path().join("text.txt")).unwrap();
    let mut characters: Vec<char> = text.chars().collect();
    characters.sort_unstable();
    characters.dedup();
    let size = characters.len().to_string();
    for architecture in ["gpt2", "bert"] {
        let bytes = |more: &[&str]| {
            let start = ["memory", "--json", "--architecture", architecture];
            let report = ferrotron(folder.path(), &[&start, TINY, more].concat());
            let report: serde_json::Value = serde_json::from_str(&succeeded(report)).unwrap();
            report
        };
        let more: &[&str] = if architecture == "bert" { &["--sample-length", "0"] } else { &[] };
        let of_size = bytes(&[more, &["--vocab-size", &size]].concat());
        let of_text = bytes(&[more, &["--data", "text.txt"]].concat());
        assert_eq!(of_size, of_text, "{architecture}");
        let training = ["--architecture", architecture, "--save", architecture];
        succeeded(train(folder.path(), &[&training[..], more].concat()));
        let run = folder.path().join(architecture).join("metrics.jsonl");
        let metrics = std::fs::read_to_string(run).unwrap();
        let last: serde_json::Value =
            serde_json::from_str(metrics.lines().last().unwrap()).unwrap();
        assert_eq!(last["mem_peak_bytes"], of_size["total_bytes"], "{architecture}");
    }
}
