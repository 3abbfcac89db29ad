//! `ferrotron simulate`: what it prints, writes and refuses.

use serde_json::{Value, json};
use std::collections::BTreeSet;

use super::{PLANNED_MODEL, ferrotron, folder_with_text, succeeded};

/// The rest of the options of a run with all axes.
const PARALLEL: &[&str] = &[
    "--micro-batch-size",
    "2",
    "--global-batch-size",
    "32",
    "--tensor-model-parallel-size",
    "2",
    "--pipeline-model-parallel-size",
    "2",
    "--bf16",
];

/// A run of the model on two nodes.
fn simulated<'a>(more: &[&'a str]) -> Vec<&'a str> {
    let simulate = ["simulate", "--cluster", "h100", "--nodes", "2"];
    [&simulate, PLANNED_MODEL, PARALLEL, more].concat()
}

#[test]
fn a_step_is_predicted_with_its_parts() {
    let folder = folder_with_text();
    let run = |more: &[&str]| ferrotron(folder.path(), &simulated(more));
    let table = succeeded(run(&["--by-kernel", "--timeline", "--train-tokens", "1e9"]));
    for part in [
        "16 GPUs",
        "TFLOP/s a GPU",
        "communication, tensor",
        "communication, pipeline",
        "bubble",
        "training ",
        "matmul 1 x",
        "attention_64",
        "adamw",
        "rank 1",
    ] {
        assert!(table.contains(part), "{part} is missing: {table}");
    }
    // A line for each stage, with the bytes that the table of `memory` has.
    let stages: Vec<Vec<&str>> = table
        .lines()
        .skip_while(|line| !line.starts_with("stage "))
        .take(3)
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert_eq!(stages[0][..3], ["stage", "layers", "GPUs"], "{table}");
    let memory = [&["memory", "--nproc", "16", "--device", "cuda"], PLANNED_MODEL, PARALLEL];
    let memory = succeeded(ferrotron(folder.path(), &memory.concat()));
    for (stage, line) in stages[1..].iter().enumerate() {
        assert_eq!(line[..3], [stage.to_string().as_str(), "2", "8"], "{table}");
        for bytes in line[3..].chunks(2) {
            assert!(memory.contains(&bytes.join(" ")), "{bytes:?} is not in {memory}: {table}");
        }
    }
    // Rotary tables are computed once a run, so a step has their use alone.
    let llama = succeeded(run(&["--by-kernel", "--architecture", "llama"]));
    assert!(llama.contains("rotary") && !llama.contains("cos"), "{llama}");
    let files = ["--json", "--trace", "trace.json", "--svg", "step.svg"];
    let report: Value = serde_json::from_str(&succeeded(run(&files))).unwrap();
    let number = |key: &str| report[key].as_f64().unwrap_or_else(|| panic!("{key}: {report}"));
    assert_eq!((number("gpus"), number("tokens")), (16.0, 32.0 * 128.0));
    let seconds = number("s_per_step");
    assert!((number("tokens_per_s") * seconds / number("tokens") - 1.0).abs() < 1e-12);
    let sum = |key: &str| -> f64 {
        report[key].as_object().unwrap().values().map(|part| part.as_f64().unwrap()).sum()
    };
    let parts = sum("computing_s") + sum("exposed_communication_s") + number("bubble_s");
    assert!((parts / seconds - 1.0).abs() < 1e-9, "{report}");
    assert!(number("mfu") > 0.0 && number("mfu") < 1.0 && number("tflops_per_gpu") > 0.0);
    assert!(number("bubble") > 0.25, "1F1B with 4 micro-batches on 2 stages: {report}");
    assert!(report["fits"].as_bool().unwrap());

    // The bytes are those of `ferrotron memory`.
    let memory = ["memory", "--nproc", "16", "--json", "--device", "cuda"];
    let memory = [&memory, PLANNED_MODEL, PARALLEL].concat();
    let memory: Value =
        serde_json::from_str(&succeeded(ferrotron(folder.path(), &memory))).unwrap();
    assert_eq!(number("peak_bytes"), memory["total_bytes"].as_f64().unwrap());

    let picture = std::fs::read_to_string(folder.path().join("step.svg")).unwrap();
    assert!(picture.contains("16 GPUs of h100"), "{picture}");
    let trace = std::fs::read_to_string(folder.path().join("trace.json")).unwrap();
    let trace: Value = serde_json::from_str(&trace).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    for (category, name) in [
        ("instruction", "Forward(microbatch 0, chunk 0)"),
        ("module", "blocks.0"),
        ("forward", "attention"),
        ("backward", "layer_norm"),
        ("collective", "all_reduce"),
        ("collective", "send"),
        ("wait", "wait"),
        ("optimizer", "optimizer"),
    ] {
        let found = |event: &&Value| {
            event["cat"] == category && event["name"].as_str().unwrap().contains(name)
        };
        assert!(events.iter().any(|event| found(&event)), "no {category} {name}");
    }
    // As in a real trace a step encloses what a rank does, and computations name their micro-batch and chunk.
    let of = |category: &str, rank: u64| -> Vec<&Value> {
        let wanted = |event: &&Value| event["cat"] == category && event["pid"] == rank;
        events.iter().filter(wanted).collect()
    };
    let end = |event: &Value| event["ts"].as_f64().unwrap() + event["dur"].as_f64().unwrap();
    let ranks: BTreeSet<u64> = events.iter().map(|event| event["pid"].as_u64().unwrap()).collect();
    assert_eq!(ranks.len(), 2, "one of each stage");
    for rank in ranks {
        let steps = of("step", rank);
        assert_eq!(steps.len(), 1);
        assert_eq!((&steps[0]["name"], &steps[0]["args"]["step"]), (&json!("step"), &json!(1)));
        for category in ["instruction", "module", "optimizer", "wait"] {
            for event in of(category, rank) {
                assert!(end(event) <= end(steps[0]) + 1e-6, "{event} is not in {}", steps[0]);
            }
        }
        let numbers = |event: &&Value| {
            let number = |name: &str| event["args"][name].as_u64();
            Some((number("microbatch")?, number("chunk")?))
        };
        let computations = of("instruction", rank);
        let mut computations: Vec<_> = computations.iter().filter_map(numbers).collect();
        computations.sort_unstable();
        // Forward and backward of each of 4 micro-batches.
        let want: Vec<(u64, u64)> = (0..4).flat_map(|microbatch| [(microbatch, 0); 2]).collect();
        assert_eq!(computations, want, "rank {rank}");
    }
    // A trace is replaced, another file is not.
    succeeded(run(&["--trace", "trace.json"]));
    let refused = run(&["--trace", "text.txt"]);
    assert!(!refused.status.success());
}

/// Products take longer beside collectives, and so do the kernels of the table.
#[test]
fn the_times_of_kernels_add_up_to_those_of_the_step() {
    let folder = folder_with_text();
    for layout in ["--tensor-model-parallel-size 2", "--zero-stage 3"] {
        let layout: Vec<&str> = layout.split(' ').collect();
        let words = ["simulate", "--cluster", "dgx-a100-80", "--json", "--by-kernel", "--bf16"];
        let words = [&words, PLANNED_MODEL, &layout].concat();
        let found: Value =
            serde_json::from_str(&succeeded(ferrotron(folder.path(), &words))).unwrap();
        let computing = found["computing_s"].as_object().unwrap().values();
        let computing: f64 = computing.map(|part| part.as_f64().unwrap()).sum();
        let kernels = found["kernels"].as_array().unwrap().iter();
        let kernels: f64 = kernels.map(|kernel| 1e-3 * kernel["ms"].as_f64().unwrap()).sum();
        assert!((kernels / computing - 1.0).abs() < 1e-9, "{kernels} {computing}");
    }
}

/// The steps are those of docs/results/gpu-results.md, each with a line of its kernels.
#[test]
fn steps_of_one_h200_are_predicted_as_published() {
    let folder = folder_with_text();
    for (preset, micro_batch, step, kernel) in [
        (
            "gpt2-124m",
            "32",
            "step 0.0627 s, 32768 tokens",
            "attention_backward_keys_64 12 6.08 GB 1237.0 6.514",
        ),
        ("gpt2-1.5b", "16", "step 0.3313 s, 16384 tokens", "layer_norm 193 20.26 GB 0.0 6.571"),
        ("ptd-1.7b", "8", "step 0.3247 s, 16384 tokens", "attention_96 24 7.29 GB 3710.9 11.036"),
    ] {
        let simulate = ["simulate", "--cluster", "h200", "--nproc", "1", "--bf16", "--by-kernel"];
        let model = ["--preset", preset, "--micro-batch-size", micro_batch];
        let table = succeeded(ferrotron(folder.path(), &[&simulate[..], &model].concat()));
        let spaced = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        for part in [step, kernel] {
            let found = table.lines().any(|line| spaced(line).starts_with(part));
            assert!(found, "{preset}: {part} is missing: {table}");
        }
    }
}

#[test]
fn a_checkpoint_has_the_options_of_its_run() {
    let folder = folder_with_text();
    let run = |words: &[&str]| succeeded(ferrotron(folder.path(), words));
    let own = [
        "--hidden-size",
        "32",
        "--num-layers",
        "2",
        "--seq-length",
        "16",
        "--num-attention-heads",
        "2",
    ];
    let train = [
        "train",
        "--data",
        "text.txt",
        "--tokenizer",
        "byte",
        "--train-iters",
        "1",
        "--eval-interval",
        "0",
    ];
    run(&[&train[..], &own, &["--save", "run"]].concat());
    let step = |more: &[&str]| -> Value {
        let simulate = ["simulate", "--cluster", "h100", "--nproc", "1", "--bf16", "--json"];
        serde_json::from_str(&run(&[&simulate, more].concat())).unwrap()
    };
    let loaded = step(&["--load", "run"]);
    let stated = step(&[&own[..], &["--data", "text.txt", "--tokenizer", "byte"]].concat());
    assert_eq!(loaded, stated);
    // What is given counts for more.
    let larger = step(&["--load", "run", "--global-batch-size", "48"]);
    assert!(larger["tokens"].as_u64().unwrap() > loaded["tokens"].as_u64().unwrap(), "{larger}");
    let absent = ferrotron(folder.path(), &["simulate", "--cluster", "h100", "--load", "absent"]);
    let message = String::from_utf8_lossy(&absent.stderr).into_owned();
    assert!(message.contains("there is no 'absent'") && message.lines().count() == 1, "{message}");
}

#[test]
fn host_memory_takes_time_and_its_link_is_needed() {
    let folder = folder_with_text();
    let step = |more: &[&str]| -> Value {
        let words =
            [&simulated(&["--json", "--recompute-granularity", "selective"])[..], more].concat();
        serde_json::from_str(&succeeded(ferrotron(folder.path(), &words))).unwrap()
    };
    let seconds = |report: &Value| report["s_per_step"].as_f64().unwrap();
    let [whole, states, blocks] =
        [&[][..], &["--offload-optimizer-states"], &["--cpu-offloading-num-layers", "2"]].map(step);
    for offloaded in [&states, &blocks] {
        assert!(seconds(offloaded) > seconds(&whole), "{offloaded} {whole}");
        assert!(
            offloaded["peak_bytes"].as_u64() < whole["peak_bytes"].as_u64(),
            "{offloaded} {whole}"
        );
    }
    let known = include_str!("../../planner/clusters/h100.toml");
    let lines = known.lines().filter(|line| !line.starts_with("host_gb_per_s"));
    std::fs::write(folder.path().join("own.toml"), lines.collect::<Vec<_>>().join("\n")).unwrap();
    let words = simulated(&["--cluster", "own.toml", "--offload-optimizer-states"]);
    let refused = ferrotron(folder.path(), &words);
    let message = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(message.contains("gpu.host_gb_per_s is missing"), "{message}");
}

#[test]
fn bad_requests_get_one_line() {
    let folder = folder_with_text();
    std::fs::write(folder.path().join("half.toml"), "description = \"half\"\n").unwrap();
    for (more, part) in [
        (["--cluster", "dgx-3"], "'dgx-3' is neither"),
        (["--cluster", "half.toml"], "half.toml: node.gpus is missing"),
        (["--cluster", "v100-32-jz"], "gpu.peak_tflops.bf16 is missing"),
        (["--nproc", "9"], "--nproc: 9 ranks"),
        (["--train-tokens", "0"], "--train-tokens"),
        (["--local-sgd-steps", "8"], "--local-sgd-steps: 8, but the weights"),
        (["--tensor-model-parallel-size", "3"], "tensor-model-parallel-size 3"),
    ] {
        let output = ferrotron(folder.path(), &simulated(&more));
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{more:?}: {message}");
        assert_eq!(message.lines().count(), 1, "{message}");
        assert!(message.contains(part), "{part} is missing: {message}");
    }
}

#[test]
fn heads_that_no_kernel_takes_get_one_line() {
    let folder = folder_with_text();
    let wide = ["--hidden-size", "1024"];
    let plan = ["plan", "--cluster", "h100", "--nodes", "2", "--global-batch-size", "32", "--bf16"];
    for words in [simulated(&wide), [&plan, PLANNED_MODEL, &wide].concat()] {
        let output = ferrotron(folder.path(), &words);
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!((output.status.code(), message.lines().count()), (Some(1), 1), "{message}");
        assert!(message.contains("a GPU takes heads of at most 128 elements"), "{message}");
    }
}

#[test]
fn a_calibrated_machine_is_a_cluster() {
    let folder = folder_with_text();
    let run = |words: &[&str]| ferrotron(folder.path(), words);
    let text = succeeded(run(&["bench", "--calibrate", "own.toml", "--threads", "1"]));
    assert_eq!(text, std::fs::read_to_string(folder.path().join("own.toml")).unwrap());
    let f32_run = &PARALLEL[..PARALLEL.len() - 1];
    let simulate = [&["simulate", "--cluster", "own.toml"], PLANNED_MODEL, f32_run].concat();
    let report = |nproc: &str| -> Value {
        let more = ["--nproc", nproc, "--json", "--by-kernel"];
        serde_json::from_str(&succeeded(run(&[&simulate[..], &more].concat()))).unwrap()
    };
    let found = report("4");
    let number = |found: &Value, key: &str| found[key].as_f64().unwrap();
    assert_eq!(number(&found, "gpus"), 4.0);
    assert!(number(&found, "s_per_step") > 0.0 && number(&found, "mfu") < 1.0, "{found}");
    let kernels = found["kernels"].as_array().unwrap();
    for name in ["linear", "attention_backward", "gelu_tanh", "adamw"] {
        assert!(kernels.iter().any(|kernel| kernel["name"] == name), "no {name}: {found}");
    }
    // Ranks share the machine's memory.
    let speed = succeeded(run(&[&simulate[..], &["--nproc", "8"]].concat()));
    assert!(speed.contains("GFLOP/s a rank"), "{speed}");
    let memory = |nproc: &str| -> f64 {
        let table = succeeded(run(&[&simulate[..], &["--nproc", nproc]].concat()));
        let line = table.lines().find(|line| line.starts_with("memory  ")).unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        let [.., number, unit] = words[..] else { panic!("{line}") };
        assert_eq!(unit, "GB", "{line}");
        number.parse().unwrap()
    };
    assert!((memory("4") / memory("8") - 2.0).abs() < 0.02);
    for (more, part) in [
        (&["--bf16"][..], "measured in f32: give --dtype f32"),
        (&["--threads", "4"], "--threads: 4, but a rank of own.toml has 1"),
        (&["--nodes", "2"], "--nodes: 2, but ranks that share node.cores of own.toml"),
    ] {
        let refused = run(&[&simulate[..], &["--nproc", "4"], more].concat());
        let message = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(message.contains(part) && message.lines().count() == 1, "{message}");
    }
    std::fs::write(folder.path().join("mine.toml"), "mine = 1\n").unwrap();
    for (file, part) in [
        ("own", "name it own.toml instead"),
        ("absent/own.toml", "cannot write absent/own.toml"),
        ("mine.toml", "holds something else than a calibrated machine"),
    ] {
        let refused = run(&["bench", "--calibrate", file]);
        let message = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(message.contains(part) && message.lines().count() == 1, "{message}");
    }
    for (words, part) in [
        (["--device", "cuda"], "--calibrate: measures a processor"),
        (["--profile", "--bf16"], "--profile"),
    ] {
        let refused = run(&[&["bench", "--calibrate", "other.toml"], &words[..]].concat());
        let message = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && message.contains(part), "{message}");
    }
}

/// Steps follow one another without the bubble of each, so a step is faster, and a stage holds more versions of weights.
#[test]
fn a_pipeline_without_a_flush_is_predicted_by_all_its_steps() {
    let folder = folder_with_text();
    let sizes = "--micro-batch-size 2 --global-batch-size 16 --pipeline-model-parallel-size 2 --clip-grad 0 --bf16 \
                 --untie-embeddings-and-output-weights --json --pipeline-schedule";
    let ended = |schedule: &[&str]| {
        let words = ["simulate", "--cluster", "h100", "--nodes", "2"];
        let sizes: Vec<&str> = sizes.split_whitespace().collect();
        ferrotron(folder.path(), &[&words, PLANNED_MODEL, &sizes, schedule].concat())
    };
    let run =
        |schedule: &[&str]| -> Value { serde_json::from_str(&succeeded(ended(schedule))).unwrap() };
    let (flushed, stashing) = (run(&["1f1b"]), run(&["pipedream"]));
    let number = |report: &Value, key: &str| report[key].as_f64().unwrap();
    assert_eq!(flushed["tokens"], stashing["tokens"]);
    // One micro-batch on two stages: the bubble is as long as the work, without the sums of gradients.
    assert!(number(&flushed, "bubble") > 0.4, "{flushed}");
    assert!(number(&stashing, "bubble") < 0.2 * number(&flushed, "bubble"), "{stashing}");
    assert!(number(&stashing, "s_per_step") < 0.8 * number(&flushed, "s_per_step"), "{stashing}");
    let weights = |report: &Value, stage: usize| report["stages"][stage]["weights_bytes"].as_u64();
    assert_eq!(weights(&stashing, 0), weights(&flushed, 0).map(|one| 2 * one));
    assert_eq!(weights(&stashing, 1), weights(&flushed, 1));
    // Its parts are those of one step, whatever the number of steps until the pipeline is drained.
    let parts = |report: &Value| -> f64 {
        let of = |key: &str| -> f64 {
            report[key].as_object().unwrap().values().map(|part| part.as_f64().unwrap()).sum()
        };
        of("computing_s") + of("exposed_communication_s") + number(report, "bubble_s")
    };
    assert!((parts(&stashing) / number(&stashing, "s_per_step") - 1.0).abs() < 1e-9, "{stashing}");
    let refused = ended(&["pipedream", "--pipeline-drain-interval", "1000000000"]);
    let message = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(message.contains("--pipeline-drain-interval: 1000000000 steps"), "{message}");
    assert_eq!(message.lines().count(), 1, "{message}");
    let often = run(&["pipedream", "--pipeline-drain-interval", "2"]);
    assert!(number(&often, "s_per_step") > number(&stashing, "s_per_step"), "{often}");
}
