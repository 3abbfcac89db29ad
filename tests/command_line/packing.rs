//! Fine-tuning on packed prompts and completions: from JSON lines to a run, its evaluation and its resumption.

use super::models_and_data::refused;
use super::{TINY, ferrotron, losses, succeeded, weights};
use serde_json::{Value, json};
use std::path::Path;

/// Writes 120 pairs of up to 40 bytes, and makes the data set `out_prompt_completion` of them.
fn write(folder: &Path) {
    let line = |i: usize| {
        let (a, b) = (i * 7919 % 89, i * 31 % 13);
        let prompt = format!("Add {a} and {b}. ");
        json!({ "prompt": prompt, "completion": "because ".repeat(i % 4) + &(a + b).to_string() })
    };
    let lines: String = (0..120).map(|i| format!("{}\n", line(i))).collect();
    std::fs::write(folder.join("pairs.jsonl"), lines).unwrap();
    let output = ferrotron(folder, TOKENIZE);
    let warning = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(warning.contains("--append-eod ends completions"), "{warning}");
    let line = succeeded(output);
    assert!(line.starts_with("out_prompt_completion: 120 documents, "), "{line}");
}

const TOKENIZE: &[&str] = &[
    "tokenize",
    "--input",
    "pairs.jsonl",
    "--output-prefix",
    "out",
    "--tokenizer",
    "byte",
    "--prompt-completion",
];

const DATA: &[&str] =
    &["train", "--data-path", "out_prompt_completion", "--tokenizer", "byte", "--split", "8,1,1"];

const PACKED: &[&str] = &["--packing", "first-fit", "--seq-length", "64", "--eval-iters", "all"];

#[test]
fn pairs_become_a_run_that_resumes_and_is_evaluated() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    write(path);
    let verified = succeeded(ferrotron(path, &["tokenize", "--verify", "out_prompt_completion"]));
    assert!(verified.contains("as in the fingerprint"), "{verified}");
    let train = |save: &str, more: &[&str]| {
        let numbers = ["--dtype", "f64", "--global-batch-size", "4", "--save", save];
        ferrotron(path, &[DATA, TINY, PACKED, &numbers, more].concat())
    };
    let output = train("run", &[]);
    let lines = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        lines.contains("96 samples packed into ") && lines.contains(", efficiency "),
        "{lines}"
    );
    let report = succeeded(output);
    assert!(report.contains("test loss ") && !report.contains("bigrams"), "{report}");
    let metrics = std::fs::read_to_string(path.join("run/metrics.jsonl")).unwrap();
    let last: Value = serde_json::from_str(metrics.lines().last().unwrap()).unwrap();
    let eval_run = ["eval", "--load", "run", "--json", "--threads", "1"];
    let found: Value = serde_json::from_str(&succeeded(ferrotron(path, &eval_run))).unwrap();
    let (run, eval) = (last["validation_loss"].as_f64().unwrap(), found["loss"].as_f64().unwrap());
    assert!((run - eval).abs() < 1e-5, "{run} and {eval}");
    // The completions of the pairs 96 to 107, which alone count.
    let completion = |i: usize| "because ".len() * (i % 4) + digits(i * 7919 % 89 + i * 31 % 13);
    assert_eq!(found["tokens"], (96..108).map(completion).sum::<usize>());

    succeeded(train("cut", &["--exit-interval", "10"]));
    succeeded(ferrotron(path, &["train", "--load", "cut"]));
    let log = |run: &str| losses(path.join(run).join("metrics.jsonl"));
    assert_eq!(log("cut"), log("run"));
    assert!(weights(&path.join("cut"), 20) == weights(&path.join("run"), 20));
    let other =
        ["train", "--load", "cut", "--train-iters", "24", "--packing", "first-fit-decreasing"];
    let output = ferrotron(path, &other);
    let line = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(2) && line.contains("another order"), "{line}");
    for layout in [&["--nproc", "2", "--tensor-model-parallel-size", "2"][..], &["--nproc", "2"]] {
        let name = layout.len().to_string();
        succeeded(train(&name, layout));
        for (one, two) in log("run").iter().zip(log(&name)) {
            let (one, two): (f64, f64) = (one.1.parse().unwrap(), two.1.parse().unwrap());
            assert!((one - two).abs() < 1e-12, "{layout:?}: {one} and {two}");
        }
    }
}

fn digits(number: usize) -> usize {
    number.to_string().len()
}

#[test]
fn what_does_not_fit_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    write(path);
    std::fs::write(path.join("text.txt"), "some text ".repeat(50)).unwrap();
    for (more, part) in [
        (
            "--seq-length 20",
            "--packing: 72 of 96 samples are longer than --seq-length 20, of which",
        ),
        ("--data-order megatron", "--data-order: megatron is no order of packed samples"),
        (
            "--reset-attention-mask",
            "--reset-attention-mask: --packing keeps samples apart by itself",
        ),
        ("--max-position-embeddings 32", "--max-position-embeddings"),
    ] {
        let more: Vec<&str> = more.split(' ').collect();
        let line = refused(ferrotron(path, &[DATA, TINY, PACKED, &more].concat()), 2);
        assert!(line.contains(part), "{more:?}: {line}");
    }
    let cut = ["--truncate-samples", "--seq-length", "20", "--save", "cut"];
    let output = ferrotron(path, &[DATA, TINY, PACKED, &cut].concat());
    let lines = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(lines.contains("; 72 samples are cut"), "{lines}");
    let plain = ["train", "--data", "text.txt"];
    let line = refused(ferrotron(path, &[&plain[..], TINY, PACKED].concat()), 2);
    assert!(line.contains("--packing: packs data sets of prompts and completions: name"), "{line}");
    // Without the option, a line says what is missing.
    let stream = [DATA, TINY, &["--save", "stream"]].concat();
    let output = ferrotron(path, &stream);
    let lines = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && lines.contains("--packing first-fit packs them"), "{lines}");
}

#[test]
fn broken_pairs_are_refused_or_skipped() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let good = r#"{"prompt": "a", "completion": "b"}"#;
    for (line, part) in [
        (r#"{"prompt": "a"}"#, "line 2: no key 'completion'; it has 'prompt'"),
        (r#"{"prompt": "a", "completion": " "}"#, "line 2: the value of 'completion' is empty"),
        (r#"{"prompt": "", "completion": "b"}"#, "line 2: the value of 'prompt' is empty"),
        (r#"{"prompt": 3, "completion": "b"}"#, "line 2: the value of 'prompt' is no string"),
        ("{", "line 2: no JSON object"),
    ] {
        std::fs::write(path.join("pairs.jsonl"), format!("{good}\n{line}\n{good}\n")).unwrap();
        let output = ferrotron(path, TOKENIZE);
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(1) && message.contains(part), "{line}: {message}");
        let _ = std::fs::remove_file(path.join("out.journal.json"));
        let out = succeeded(ferrotron(path, &[TOKENIZE, &["--skip-broken-lines"]].concat()));
        assert!(out.contains("out_prompt_completion: 2 documents, 4 tokens"), "{out}");
        for end in ["bin", "idx", "fingerprint.json"] {
            std::fs::remove_file(path.join(format!("out_prompt_completion.{end}"))).unwrap();
        }
    }
    std::fs::write(path.join("pairs.jsonl"), good).unwrap();
    std::fs::write(path.join("pairs.txt"), "text").unwrap();
    for (more, part) in [
        (&["--json-keys", "prompt"][..], "--prompt-completion: takes two keys, of the prompt"),
        (&["--format", "nanogpt"], "--format: nanogpt cannot tell prompts from completions"),
        (&["--input", "pairs.txt"], "is plain text, which has no prompt and completion"),
    ] {
        let output = ferrotron(path, &[TOKENIZE, more].concat());
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && message.contains(part), "{more:?}: {message}");
    }
}
