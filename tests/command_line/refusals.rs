//! Refusals of the program: exit codes and messages.

use std::path::Path;

use super::{ferrotron, folder_with_text, succeeded, train};

/// Writes another number of layers into the configuration of a checkpoint, and what follows from that into its index.
fn give_layers(checkpoint: &Path, layers: u64) {
    let edit = |file: &str, change: &dyn Fn(&mut serde_json::Value)| {
        let text = std::fs::read(checkpoint.join(file)).unwrap();
        let mut value = serde_json::from_slice(&text).unwrap();
        change(&mut value);
        std::fs::write(checkpoint.join(file), value.to_string()).unwrap();
        value.to_string()
    };
    let config = edit("config.json", &|value| value["model"]["num_layers"] = layers.into());
    edit("index.json", &|value| {
        let crc32 = crc32fast::hash(config.as_bytes());
        value["files"]["config.json"] = serde_json::json!({"bytes": config.len(), "crc32": crc32});
    });
}

#[test]
fn bad_input_gets_one_clear_line() {
    let folder = folder_with_text();
    let path = folder.path();
    std::fs::write(path.join("empty.txt"), "").unwrap();
    std::fs::write(path.join("short.txt"), "ab").unwrap();
    std::fs::write(path.join("odd.bin"), [1, 2, 3]).unwrap();
    std::fs::write(path.join("unknown.toml"), "no-such-key = 1\n").unwrap();
    std::fs::create_dir(path.join("broken")).unwrap();
    std::fs::write(path.join("broken/config.json"), "{\"model_type\": \"gpt2\"}").unwrap();
    std::fs::write(path.join("broken/model.safetensors"), "not a header").unwrap();
    std::fs::create_dir(path.join("deep")).unwrap();
    let deep = r#"{"model_type": "gpt2", "vocab_size": 65, "n_layer": 1000000000, "n_embd": 8, "n_head": 2, "n_positions": 8}"#;
    std::fs::write(path.join("deep/config.json"), deep).unwrap();
    succeeded(train(path, &["--save", "run"]));
    succeeded(train(path, &["--save", "deep-run", "--train-iters", "1"]));
    give_layers(&path.join("deep-run/iter_0000001"), 1_000_000_000);
    // Arguments, exit code, and what the line must name.
    let cases: &[(&[&str], i32, &[&str])] = &[
        (&["train", "--data", "absent.txt"], 1, &["absent.txt"]),
        (&["train", "--data", "empty.txt"], 1, &["empty.txt", "empty"]),
        (&["train", "--data", "short.txt", "--seq-length", "8"], 1, &["8"]),
        (&["train", "--data", "odd.bin", "--tokenizer", "gpt2"], 1, &["odd.bin"]),
        (
            &["train", "--data", "text.txt", "--hidden-size", "10", "--num-attention-heads", "4"],
            2,
            &["4", "10"],
        ),
        (&["train", "--data", "text.txt", "--num-query-groups", "3"], 2, &["3", "4"]),
        (
            &["train", "--data", "text.txt", "--num-layers", "1000000000"],
            2,
            &["num-layers", "10000"],
        ),
        (&["memory", "--hidden-size", "1000000000000"], 2, &["hidden-size 1000000000000", "10^15"]),
        (&["memory", "--hidden-size", "400000000"], 2, &[]),
        (
            &["memory", "--max-position-embeddings", "99999999999"],
            2,
            &["99999999999", "4294967296"],
        ),
        (&["export", "--load", "deep", "--output", "out"], 2, &["num-layers 1000000000"]),
        (&["generate", "--load", "deep-run"], 2, &["num-layers 1000000000"]),
        (&["train", "--load", "deep-run", "--data", "text.txt"], 2, &["num_layers 1000000000"]),
        (&["train", "--data", "text.txt", "--micro-batch-size", "0"], 2, &["micro"]),
        (
            &["train", "--data", "text.txt", "--micro-batch-size", "3", "--global-batch-size", "4"],
            2,
            &["3", "4"],
        ),
        (&["train", "--data", "text.txt", "--tokenizer", "word"], 2, &["word"]),
        (&["train", "--data", "text.txt", "--threads", "0"], 2, &["0"]),
        (&["train", "--data", "text.txt", "--lr-decay-style", "steps"], 2, &["steps"]),
        (&["train", "--no-such-flag"], 2, &["--no-such-flag"]),
        (&["train", "--config", "unknown.toml"], 2, &["--no-such-key"]),
        (&["train", "--config", "absent.toml"], 2, &["absent.toml"]),
        (&["train", "--data", "text.txt", "--preset", "gpt5"], 2, &["gpt5", "gpt2-124m"]),
        (&["train", "--data", "text.txt", "--dtype", "u8"], 2, &["u8", "bf16"]),
        (&["train", "--data", "text.txt", "--grad-reduce-in-bf16"], 2, &["needs --bf16", "f32"]),
        (&["train", "--data", "text.txt", "--stochastic-rounding"], 2, &["--fp16", "f32"]),
        (&["train", "--data", "text.txt", "--fp16", "--hysteresis", "0"], 2, &["hysteresis", "0"]),
        (&["train", "--data", "text.txt", "--fp16", "--loss-scale", "0"], 2, &["loss-scale", "0"]),
        (
            &["train", "--data", "text.txt", "--fp16", "--local-sgd-steps", "4"],
            2,
            &["loss-scale", "4 steps"],
        ),
        (
            &["train", "--data", "text.txt", "--optimizer", "adafactor", "--adafactor-beta1", "1"],
            2,
            &["beta1", "1"],
        ),
        (
            &["train", "--data", "text.txt", "--optimizer", "adafactor", "--lr", "1e-3"],
            2,
            &["--lr", "--adafactor-step-size scheduled"],
        ),
        (&["train", "--load", "run", "--optimizer", "adafactor"], 2, &["exp_avg", "--optimizer"]),
        (
            &["train", "--data", "text.txt", "--recompute-method", "block"],
            2,
            &["--recompute-method", "--recompute-granularity full"],
        ),
        (
            &[
                "train",
                "--data",
                "text.txt",
                "--recompute-granularity=full",
                "--recompute-num-layers=99",
            ],
            2,
            &["recompute-num-layers 99", "layers"],
        ),
        (
            &["train", "--data", "text.txt", "--recompute-modules", "mlp"],
            2,
            &["--recompute-modules", "selective"],
        ),
        (
            &[
                "train",
                "--data",
                "text.txt",
                "--recompute-granularity=selective",
                "--recompute-modules",
                "core_attn",
                "attn",
            ],
            2,
            &["core_attn is a part of attn"],
        ),
        (
            &["train", "--data", "text.txt", "--offload-folder", "."],
            2,
            &["--offload-folder", "needs --offload-optimizer-states"],
        ),
        (
            &["train", "--data", "text.txt", "--cpu-offloading-num-layers", "99"],
            2,
            &["cpu-offloading-num-layers 99", "4 layers"],
        ),
        (
            &["train", "--data", "text.txt", "--bf16", "--saved-activations-dtype", "bf16"],
            2,
            &["--saved-activations-dtype", "f32", "bf16"],
        ),
        (
            &["train", "--data", "text.txt", "--saved-activations-encoding", "sparse"],
            2,
            &["saved-activations-encoding sparse", "ReLU", "GeluTanh"],
        ),
        (
            &[
                "train",
                "--data=text.txt",
                "--offload-optimizer-states",
                "--offload-folder=text.txt",
            ],
            1,
            &["'text.txt'", "choose another --offload-folder"],
        ),
        (&["train", "--data", "text.txt", "--device", "cuda:99"], 2, &["cuda:99", "doctor"]),
        (&["generate", "--load", "run", "--device", "cuda:99"], 2, &["cuda:99", "doctor"]),
        (&["doctor", "--compile-kernels", "9.0,90"], 2, &["'90'", "such as 9.0"]),
        (&["bench", "--device", "gpu"], 2, &["'gpu'", "cpu, cuda or cuda:N"]),
        (&["train", "--data", "text.txt", "--save", "/proc/run"], 1, &["/proc/run"]),
        (&["train", "--load", "run", "--hidden-size", "32"], 2, &["16", "32"]),
        (&["train", "--load", "run", "--tokenizer", "byte"], 2, &["--tokenizer"]),
        (&["train", "--load", "run", "--data", "text.txt", "text.txt"], 2, &["training tokens"]),
        (&["train", "--data", "text.txt", "--save", "run"], 2, &["run", "--load"]),
        (&["train", "--valid-data", "text.txt"], 2, &["--valid-data", "--data"]),
        (&["train", "--data", "text.txt", "--eval-iters", "some"], 2, &["--eval-iters", "'all'"]),
        (&["eval", "--load", "run", "--micro-batch-size", "0"], 2, &["--micro-batch-size 0"]),
        (&["train", "--data", "text.txt", "--clip-grad", "-1"], 2, &["--clip-grad"]),
        (&["train", "--load", "run", "--dtype", "f64"], 2, &["--dtype", "holds f32", "in f64"]),
        (&["generate", "--load", "absent"], 1, &["absent"]),
        (&["generate", "--load", "run", "--prompt", "\u{2603}"], 1, &["\u{2603}"]),
        (&["export", "--load", "broken", "--output", "out"], 1, &["broken"]),
        (&["bench", "--steps", "0"], 2, &["--steps"]),
        (
            &["bench", "--instruction-set", "sse9"],
            2,
            &["--instruction-set", "sse9 is not one of this processor's: portable"],
        ),
        (
            &["bench", "--profile", "--device", "cuda", "--enable-cuda-graph"],
            2,
            &["--profile", "leave --enable-cuda-graph out"],
        ),
        (
            &["train", "--memory-limit", "12MB"],
            2,
            &["12.00 MB", "weights", "with --recompute-granularity full", "with --bf16"],
        ),
        (
            &["train", "--data", "text.txt", "--log-straggler", "--log-interval", "0"],
            2,
            &["--log-straggler", "--log-interval"],
        ),
        (&["memory", "--memory-limit", "8 apples"], 2, &["8 apples", "8GiB"]),
        (&["memory", "--vocab-size", "0"], 2, &["--vocab-size", "0"]),
        (&["schedule", "--pipeline-schedule", "2f2b"], 2, &["2f2b", "zb-h1"]),
        (&["schedule", "--chunks", "2"], 2, &["2 chunks", "interleaved", "1f1b"]),
        (&["schedule", "--pipeline-schedule", "interleaved", "--chunks", "1"], 2, &["2 chunks"]),
        (
            &["schedule", "--pipeline-schedule", "interleaved", "--microbatches", "7"],
            2,
            &["multiple", "7", "4"],
        ),
        (&["schedule", "--pipeline-schedule", "pipedream", "--microbatches", "2"], 2, &["got 2"]),
        (&["schedule", "--steps", "2"], 2, &["1f1b is empty after each step"]),
        (&["schedule", "--stages", "0"], 2, &["stages", "0"]),
        (&["schedule", "--stages", "2000000", "--microbatches", "2000000"], 2, &["2000000"]),
        (&["schedule", "--tf", "-1"], 2, &["forward", "-1"]),
        (&["schedule", "--tf", "0", "--tb", "0", "--tw", "0"], 2, &["zero"]),
        (&["schedule", "--svg", "/proc/absent/a.svg"], 1, &["/proc/absent/a.svg"]),
        (&["fly"], 2, &["fly"]),
    ];
    for (arguments, code, named) in cases {
        let output = ferrotron(path, arguments);
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(*code), "{arguments:?}: {message}");
        assert!(!message.contains("panicked"), "{arguments:?}: {message}");
        for name in *named {
            assert!(message.contains(name), "{arguments:?} does not name {name}: {message}");
        }
        // What a run has told before its error stands in front of it.
        let is_error = |line: &str| line.starts_with("ferrotron: ");
        assert_eq!(
            message.lines().position(is_error),
            Some(message.lines().count() - 1),
            "{message}"
        );
    }
}
