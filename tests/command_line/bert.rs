//! `--architecture bert`: trained on plain text, resumed, spread over ranks, planned, and what it refuses.

use super::{TINY, ferrotron, folder_with_text, losses, succeeded, train, weights};
use serde_json::Value;
use std::path::Path;

const BERT: &[&str] = &["--architecture", "bert", "--seq-length", "64", "--sample-length", "0"];

/// The lines of a run's metrics.
fn metrics(folder: &Path, run: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(folder.join(run).join("metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_bert_trains_on_plain_text_in_the_memory_that_was_estimated() {
    let folder = folder_with_text();
    let longer = ["--train-iters", "60", "--lr", "3e-3", "--save", "run"];
    let out = succeeded(train(folder.path(), &[BERT, &longer].concat()));
    for part in ["validation loss", "masked tokens (masked lm", "sentence order", "checkpoint: "] {
        assert!(out.contains(part), "{part} is missing: {out}");
    }
    let lines = metrics(folder.path(), "run");
    let loss = |line: &Value| line["loss"].as_f64().unwrap();
    let masked = |line: &Value| line["losses"]["masked_lm"].as_f64().unwrap();
    assert!(masked(&lines[59]) < 0.85 * masked(&lines[0]), "{} {}", lines[0], lines[59]);

    let arguments = [&["memory", "--data", "text.txt", "--json"], TINY, BERT].concat();
    let report = succeeded(ferrotron(folder.path(), &arguments));
    let report: Value = serde_json::from_str(&report).unwrap();
    assert_eq!(lines[59]["mem_peak_bytes"], report["total_bytes"]);

    // Evaluations always have the same masks.
    let found = succeeded(ferrotron(folder.path(), &["eval", "--load", "run", "--json"]));
    let found: Value = serde_json::from_str(&found).unwrap();
    let (got, want) = (loss(&found), lines[59]["validation_loss"].as_f64().unwrap());
    assert!((got - want).abs() < 1e-4 * want, "{got} {want}");
    let terms = ["masked_lm", "sentence_order"].map(|name| found["losses"][name].as_f64().unwrap());
    assert!((terms[0] + terms[1] - got).abs() < 1e-6, "{found}");

    succeeded(ferrotron(folder.path(), &["export", "--load", "run", "--output", "hf"]));
    let config = std::fs::read_to_string(folder.path().join("hf/config.json")).unwrap();
    assert!(config.contains("MegatronBertForPreTraining"), "{config}");
    let output = ferrotron(folder.path(), &["generate", "--load", "run", "--prompt", "a"]);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    let line = "--load: 'run' holds a BERT, which continues no text: name a GPT";
    assert_eq!((output.status.code(), message.lines().count()), (Some(2), 1), "{message}");
    assert!(message.contains(line), "{message}");
}

#[test]
fn a_bert_that_stops_and_resumes_is_the_one_that_does_not() {
    let folder = folder_with_text();
    let path = folder.path();
    let options = ["--norm-placement", "post", "--hidden-dropout", "0.1", "--seed", "5"];
    let options = [BERT, &options, &["--attention-dropout", "0.1"]].concat();
    succeeded(train(path, &[&options[..], &["--save", "whole"]].concat()));
    // The checkpoint knows its architecture.
    succeeded(train(path, &[&options[..], &["--save", "parts", "--exit-interval", "7"]].concat()));
    for _ in 0..2 {
        succeeded(ferrotron(path, &["train", "--load", "parts", "--save", "parts"]));
    }
    let [whole, parts] = ["whole", "parts"].map(|run| path.join(run));
    let [want, got] = [&whole, &parts].map(|run| losses(run.join("metrics.jsonl")));
    assert_eq!((got, want.len()), (want, 20));
    assert!(weights(&whole, 20) == weights(&parts, 20), "weights or moments differ");
    // Other layouts resume it, too.
    let more = ["train", "--load", "whole", "--train-iters", "22", "--save", "more"];
    let layout = ["--nproc", "2", "--pipeline-model-parallel-size", "1"];
    succeeded(ferrotron(
        path,
        &[&more[..], &["--tensor-model-parallel-size", "2"], &layout].concat(),
    ));
    assert_eq!(metrics(path, "more").last().unwrap()["step"], 22);
}

#[test]
fn ranks_train_the_bert_that_one_rank_trains() {
    let folder = folder_with_text();
    let run = |name: &str, more: &[&str]| {
        let layers = ["--num-layers", "2", "--global-batch-size", "4", "--save", name];
        succeeded(train(folder.path(), &[BERT, &layers, more].concat()));
        metrics(folder.path(), name)
    };
    let want = run("one", &[]);
    let tensor = ["--nproc", "2", "--tensor-model-parallel-size", "2", "--sequence-parallel"];
    let pipeline = ["--nproc", "2", "--pipeline-model-parallel-size", "2"];
    let data = ["--nproc", "2", "--zero-stage", "2"];
    let context = ["--nproc", "2", "--context-parallel-size", "2"];
    for (name, layout) in [
        ("tensor", &tensor[..]),
        ("pipeline", &pipeline[..]),
        ("data", &data[..]),
        ("context", &context[..]),
    ] {
        let found = run(name, layout);
        assert_eq!(found.len(), want.len(), "{name}");
        for (got, want) in found.iter().zip(&want) {
            let [got, want] = [got, want].map(|line| line["loss"].as_f64().unwrap());
            assert!((got - want).abs() < 1e-5 * want, "{name}: {got} {want}");
        }
    }
}

/// The line by which `eval` refuses a run.
fn refused_eval(folder: &Path, run: &str) -> String {
    let output = ferrotron(folder, &["eval", "--load", run]);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!((output.status.code(), message.lines().count()), (Some(2), 1), "{message}");
    message
}

#[test]
fn sentences_of_a_data_set_train_as_their_text_does() {
    let folder = folder_with_text();
    let path = folder.path();
    let line =
        |i: usize| format!("Line {}. And more of it!\n{}", i * 7919 % 1000, ["", "\n"][i % 9 / 8]);
    std::fs::write(path.join("text.txt"), (0..300).map(line).collect::<String>()).unwrap();
    for more in ["--tokenizer byte --split-sentences", "--tokenizer gpt2 --append-eod"] {
        let tokenize = format!("tokenize --input text.txt --output-prefix a {more}");
        succeeded(ferrotron(path, &tokenize.split(' ').collect::<Vec<&str>>()));
    }
    let run = |name: &str, data: &str| {
        let words = format!("train --tokenizer byte --global-batch-size 4 --save {name} {data}");
        let words: Vec<&str> = words.split(' ').collect();
        succeeded(ferrotron(path, &[&words[..], TINY, BERT].concat()));
        losses(path.join(name).join("metrics.jsonl"))
    };
    let want = run("text", "--data text.txt --valid-data text.txt");
    let sets = "--train-data-path a_text_sentence --valid-data-path a_text_sentence";
    assert_eq!(run("sets", sets), want);
    assert_eq!(run("files", "--data a_text_sentence --valid-data text.txt"), want);
    assert!(weights(&path.join("text"), 20) == weights(&path.join("sets"), 20));
    let eval = |run: &str| {
        succeeded(ferrotron(path, &["eval", "--load", run, "--json", "--threads", "1"]))
    };
    assert_eq!(eval("sets"), eval("text"));
    // In another layout, by weight and with a test part; and through a stop.
    let blend = "--split 6,2,2 --data-path 30 a_text_sentence 70 a_text_sentence";
    let layout = "--nproc 2 --tensor-model-parallel-size 2";
    let whole = run("blend", &format!("{blend} {layout}"));
    run("cut", &format!("{blend} {layout} --exit-interval 7"));
    for _ in 0..2 {
        succeeded(ferrotron(path, &["train", "--load", "cut", "--save", "cut"]));
    }
    assert_eq!(losses(path.join("cut/metrics.jsonl")), whole);
    let line = succeeded(ferrotron(
        path,
        &["train", "--load", "blend", "--train-iters", "21", "--save", "more"],
    ));
    assert!(line.contains("test loss ") && line.contains("masked tokens (masked lm"), "{line}");

    let refused = |data: &str| {
        let words: Vec<&str> = data.split(' ').collect();
        let output = ferrotron(path, &[&["train"], &words[..], TINY, BERT].concat());
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!((output.status.code(), message.lines().count()), (Some(2), 1), "{message}");
        message
    };
    let line = refused("--tokenizer gpt2 --data-path a_text_document");
    for part in ["a bert takes sentences", "a_text_document", "tokenize --split-sentences"] {
        assert!(line.contains(part), "{part} is missing: {line}");
    }
    let sets = "--tokenizer byte --data-path a_text_sentence";
    let line = refused(&format!("{sets} --data-order megatron"));
    assert!(line.contains("--data-order: megatron is an order of a GPT's samples"), "{line}");
    let line = refused(&format!("{sets} --packing first-fit"));
    assert!(line.contains("--packing: packs prompts and completions of a GPT"), "{line}");
    // A test part of one document of one sentence, and a validation part, too.
    std::fs::write(path.join("b.txt"), "A. B.\n\n".repeat(9) + "One.\n\nOne.").unwrap();
    let words = "tokenize --input b.txt --output-prefix b --tokenizer byte --split-sentences";
    succeeded(ferrotron(path, &words.split(' ').collect::<Vec<&str>>()));
    run("small", "--split 9,1,1 --data-path b_text_sentence");
    let line = refused_eval(path, "small");
    assert!(
        line.contains("hold out for validation has two sentences: name data by --data"),
        "{line}"
    );
    run("some", "--split 9,1,1 --data-path 1 b_text_sentence 1 a_text_sentence");
    assert!(eval("some").contains("masked_lm"));
    let line = refused("--tokenizer gpt2 --data-path a_text_sentence");
    assert!(line.contains("made with the byte tokenizer"), "{line}");
}

#[test]
fn what_a_bert_has_not_is_refused_in_one_line() {
    let folder = folder_with_text();
    std::fs::write(folder.path().join("one.txt"), "One sentence").unwrap();
    let bert = |more: &[&str]| train(folder.path(), &[BERT, more].concat());
    let gpt = |more: &[&str]| train(folder.path(), more);
    let one_sentence = ["train", "--data", "one.txt", "--valid-fraction", "0"];
    let one_sentence = [&one_sentence, TINY, BERT].concat();
    let cases = [
        (bert(&["--swiglu"]), "--swiglu: does not go with --architecture bert: use --activation"),
        (bert(&["--activation", "swiglu"]), "activation swiglu is for gpt"),
        (bert(&["--normalization", "RMSNorm"]), "--normalization RMSNorm: does not go with"),
        (bert(&["--position-embedding-type", "rope"]), "--position-embedding-type rope: does not"),
        (bert(&["--rotary-percent", "0.5"]), "--rotary-percent: does not go with"),
        (bert(&["--rotary-base", "500000"]), "--rotary-base: does not go with"),
        (bert(&["--kv-channels", "4"]), "--kv-channels: does not go with"),
        (bert(&["--disable-bias-linear"]), "--disable-bias-linear: does not go with"),
        (
            bert(&["--untie-embeddings-and-output-weights"]),
            "--untie-embeddings-and-output-weights: does not go with",
        ),
        (bert(&["--sample-length", "9"]), "--sample-length: does not go with --architecture bert"),
        (bert(&["--enable-cuda-graph"]), "--enable-cuda-graph: does not go with"),
        (
            bert(&["--nproc", "2", "--tensor-model-parallel-size", "2", "--swiglu"]),
            "--swiglu: does not go with --architecture bert",
        ),
        (bert(&["--window-size", "8"]), "--window-size: does not go with --architecture bert"),
        (bert(&["--window-attn-skip-freq", "2"]), "--window-attn-skip-freq: does not go with"),
        (bert(&["--attn-logit-softcapping", "9"]), "--attn-logit-softcapping: does not go with"),
        (bert(&["--qk-layernorm"]), "--qk-layernorm: does not go with --architecture bert"),
        (bert(&["--add-qkv-bias"]), "--add-qkv-bias: does not go with --architecture bert"),
        (bert(&["--num-query-groups", "1"]), "--num-query-groups: does not go with"),
        (bert(&["--preset", "gpt2-124m"]), "--preset: does not go with --architecture bert"),
        (bert(&["--seq-length", "4"]), "--seq-length: must be at least 5"),
        (bert(&["--max-position-embeddings", "16"]), "16 is less than --seq-length 64"),
        (
            ferrotron(folder.path(), &one_sentence),
            "no document for training has two sentences: there are 1 sentences in 1 documents",
        ),
        (
            ferrotron(folder.path(), &["bench", "--architecture", "bert"]),
            "--architecture bert: this command is for GPTs",
        ),
        (gpt(&["--norm-placement", "post"]), "--norm-placement: is for --architecture bert"),
        (gpt(&["--bert-no-binary-head"]), "--bert-no-binary-head: is for --architecture bert"),
    ];
    for (output, part) in cases {
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "{part}: {message}");
        assert_eq!(message.lines().count(), 1, "{message}");
        assert!(message.contains(part), "{part}: {message}");
    }
}
