//! `ferrotron eval --tasks` against numbers that transformers finds for the same weights, in every layout.

use super::{ferrotron, succeeded};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Relative difference of sums in f64 that are added in another order.
const ROUNDING: f64 = 1e-9;

/// The model, the data and the expected numbers that `tests/hf/make_tiny_tasks.py` made.
fn fixture() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/hf/tasks")
}

fn file(name: &str) -> String {
    fixture().join(name).to_str().unwrap().to_string()
}

fn expected() -> Value {
    serde_json::from_str(&std::fs::read_to_string(file("expected.json")).unwrap()).unwrap()
}

/// The results of the tasks, on their data.
fn results(data: &[(&str, &str)], more: &[&str]) -> Value {
    let folder = tempfile::tempdir().unwrap();
    let load = fixture();
    let mut arguments = vec!["eval", "--load", load.to_str().unwrap(), "--json", "--threads", "1"];
    arguments.extend(["--dtype", "f64", "--overlapping-eval", "4", "--tasks"]);
    arguments.extend(data.iter().map(|(task, _)| *task));
    let named: Vec<String> = data.iter().map(|(task, path)| format!("{task}={path}")).collect();
    arguments.push("--task-data");
    arguments.extend(named.iter().map(String::as_str));
    arguments.extend(more);
    let out = succeeded(ferrotron(folder.path(), &arguments));
    serde_json::from_str::<Value>(&out).unwrap()["results"].clone()
}

fn assert_close(found: &Value, wanted: &Value, tolerance: f64, what: &str) {
    for (name, found) in found.as_object().unwrap() {
        let (found, wanted) = (found.as_f64().unwrap(), wanted[name].as_f64().unwrap());
        let difference = (found - wanted).abs();
        assert!(difference <= tolerance * wanted.abs(), "{what}, {name}: {found}, not {wanted}");
    }
}

fn all_tasks() -> [(&'static str, String); 3] {
    [("wikitext", "wiki.txt"), ("lambada", "lambada.jsonl"), ("lambada_openai", "lambada.jsonl")]
        .map(|(task, name)| (task, file(name)))
}

/// The fixture's numbers for windows of a stride.
fn wanted(task: &str, stride: &str) -> Value {
    let expected = expected();
    if task == "wikitext" { expected[task][stride].clone() } else { expected[task].clone() }
}

#[test]
fn the_numbers_of_tasks_are_those_of_transformers_in_every_layout() {
    let tasks = all_tasks();
    let data: Vec<(&str, &str)> = tasks.iter().map(|(task, path)| (*task, &path[..])).collect();
    for layout in [
        "",
        "--micro-batch-size 3",
        "--nproc 2",
        "--nproc 2 --tensor-model-parallel-size 2",
        "--nproc 2 --pipeline-model-parallel-size 2",
        "--nproc 4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
        "--nproc 2 --context-parallel-size 2",
        "--nproc 4 --context-parallel-size 2 --tensor-model-parallel-size 2",
    ] {
        let found = results(&data, &layout.split_whitespace().collect::<Vec<_>>());
        assert_eq!(found.as_object().unwrap().len(), 3, "{layout}");
        for (task, _) in &data {
            assert_close(&found[task], &wanted(task, "4"), ROUNDING, &format!("{task} {layout}"));
        }
    }
    let disjoint = results(&data[..1], &["--overlapping-eval", "24", "--dtype", "f32"]);
    // A perplexity multiplies the rounding of f32 by the loss and the ratio, here about 15.
    assert_close(&disjoint["wikitext"], &wanted("wikitext", "24"), 1e-4, "disjoint windows");
}

#[test]
fn every_form_of_the_data_gives_the_same_numbers() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: String| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_string()
    };
    let text = std::fs::read_to_string(file("wiki.txt")).unwrap();
    let rows = text.lines().map(|line| serde_json::json!({ "text": line }).to_string() + "\n");
    let rows = write("wiki.jsonl", rows.collect());
    let passages = std::fs::read_to_string(file("lambada.jsonl")).unwrap();
    let passages = passages.lines().map(|line| {
        let object: Value = serde_json::from_str(line).unwrap();
        format!("{}\n", object["text"].as_str().unwrap())
    });
    let passages = write("lambada.txt", passages.collect());
    let found = results(&[("wikitext", &rows), ("lambada_openai", &passages)], &[]);
    for task in ["wikitext", "lambada_openai"] {
        assert_close(&found[task], &wanted(task, "4"), ROUNDING, task);
    }
}

#[test]
fn the_loss_of_data_is_the_same_in_every_layout() {
    let folder = tempfile::tempdir().unwrap();
    let (load, data) = (fixture(), file("wiki.txt"));
    let loss = |layout: &str| {
        let mut arguments = vec!["eval", "--load", load.to_str().unwrap(), "--data", &data];
        arguments.extend(["--valid-fraction", "1", "--json", "--dtype", "f64", "--threads", "1"]);
        arguments.extend(layout.split_whitespace());
        let out = succeeded(ferrotron(folder.path(), &arguments));
        serde_json::from_str::<Value>(&out).unwrap()
    };
    let alone = loss("");
    for layout in [
        "--nproc 2 --tensor-model-parallel-size 2",
        "--nproc 4 --pipeline-model-parallel-size 2",
        "--nproc 2 --context-parallel-size 2",
        "--nproc 4 --context-parallel-size 2 --pipeline-model-parallel-size 2",
    ] {
        assert_close(&loss(layout), &alone, ROUNDING, layout);
    }
}

#[test]
fn bad_requests_for_tasks_are_one_line_with_the_option() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    write("broken.jsonl", "{\"text\": \"a b\"}\n{\"passage\": \"a b\"}\n");
    write("short.txt", "a b c\nalone\n");
    let load = fixture();
    let refused = |options: &str, code: i32, words: &[&str]| {
        let mut arguments = vec!["eval", "--load", load.to_str().unwrap(), "--threads", "1"];
        arguments.extend(options.split_whitespace());
        let output = ferrotron(Path::new(folder.path()), &arguments);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{options}: {error}");
        assert_eq!(error.lines().count(), 1, "{options}: {error}");
        words.iter().for_each(|word| assert!(error.contains(word), "{options}: {error}"));
    };
    let lambada = "--tasks lambada --task-data";
    refused("--tasks lambada", 2, &["--task-data", "lambada=PATH"]);
    refused("--task-data lambada=x", 2, &["--task-data", "not one of --tasks"]);
    refused(&format!("{lambada} short.txt"), 2, &["--task-data", "TASK=PATH"]);
    refused(&format!("{lambada} lambada=short.txt lambada=short.txt"), 2, &["twice"]);
    refused(&format!("{lambada} lambada=short.txt --data x"), 2, &["--data", "--tasks"]);
    refused(
        &format!("{lambada} lambada=short.txt"),
        1,
        &["--task-data lambada", "passage 2", "alone"],
    );
    refused(&format!("{lambada} lambada=none.txt"), 1, &["--task-data lambada", "none.txt"]);
    refused(
        &format!("{lambada} lambada=broken.jsonl"),
        1,
        &["broken.jsonl", "line 2", "'passage'"],
    );
    refused(
        "--tasks wikitext --task-data wikitext=short.txt --overlapping-eval 0",
        2,
        &["--overlapping-eval"],
    );
    refused(
        "--tasks lambada --task-data lambada=short.txt --tensor-model-parallel-size 2",
        2,
        &["--nproc", "tensor"],
    );
}
