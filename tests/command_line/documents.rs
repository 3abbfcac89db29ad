//! Documents that attention, positions and loss keep apart.

use super::models_and_data::refused;
use super::{TINY, ferrotron, succeeded};
use ferrotron::models::data::{IndexedDatasetBuilder, TokenType};
use serde_json::Value;
use std::path::Path;

/// Writes 200 documents of up to 6 tokens, each ended by token 0.
fn write(folder: &Path) {
    let mut builder = IndexedDatasetBuilder::new(&folder.join("a"), TokenType::U16).unwrap();
    for document in 0..200_u32 {
        let tokens = (0..document % 7).map(|i| (document * 11 + i * i) % 49 + 1);
        builder.add_sequence(&tokens.chain([0]).collect::<Vec<u32>>()).unwrap();
        builder.end_document().unwrap();
    }
    builder.finish().unwrap();
}

#[test]
fn a_run_and_its_evaluation_keep_documents_apart() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    write(path);
    let mut losses = Vec::new();
    for (name, flags) in [
        ("plain", &["--eval-iters", "all"][..]),
        ("mask", &["--reset-attention-mask", "--eod-id", "0", "--eval-iters", "all"]),
        (
            "all",
            &[
                "--reset-attention-mask",
                "--reset-position-ids",
                "--eod-mask-loss",
                "--eod-id",
                "0",
                "--eval-iters",
                "all",
            ],
        ),
    ] {
        let data = ["train", "--data", "a", "--vocab-size", "50", "--save", name];
        succeeded(ferrotron(path, &[&data[..], TINY, flags].concat()));
        let metrics = std::fs::read_to_string(path.join(name).join("metrics.jsonl")).unwrap();
        let last: Value = serde_json::from_str(metrics.lines().last().unwrap()).unwrap();
        assert!(last["data_wait_ms"].as_f64().is_some_and(|wait| wait >= 0.0), "{last}");
        let eval = ["eval", "--load", name, "--json", "--threads", "1", "--seq-length", "8"];
        let found: Value = serde_json::from_str(&succeeded(ferrotron(path, &eval))).unwrap();
        let (run, eval) =
            (last["validation_loss"].as_f64().unwrap(), found["loss"].as_f64().unwrap());
        assert!((run - eval).abs() < 1e-5, "{name}: {run} and {eval}");
        losses.push((run, found["tokens"].as_u64().unwrap()));
    }
    assert!(losses[0].0 != losses[1].0 && losses[1].0 != losses[2].0, "{losses:?}");
    assert!(losses[0].1 == losses[1].1 && losses[2].1 < losses[1].1, "{losses:?}");
}

#[test]
fn the_memory_number_counts_what_documents_take() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    write(path);
    let mut totals = Vec::new();
    for (name, flags) in [
        ("plain", ""),
        ("mask", "--reset-attention-mask --eod-id 0"),
        ("positions", "--reset-position-ids --eod-id 0"),
        ("both", "--reset-attention-mask --reset-position-ids --eod-id 0 --global-batch-size 6"),
    ] {
        let flags: Vec<&str> = flags.split_whitespace().collect();
        let data = [&["--data", "a", "--vocab-size", "50"], TINY, &flags].concat();
        succeeded(ferrotron(path, &[&["train", "--save", name], &data[..]].concat()));
        let metrics = std::fs::read_to_string(path.join(name).join("metrics.jsonl")).unwrap();
        let last: Value = serde_json::from_str(metrics.lines().last().unwrap()).unwrap();
        let memory = succeeded(ferrotron(path, &[&["memory", "--json"], &data[..]].concat()));
        let memory: Value = serde_json::from_str(&memory).unwrap();
        assert_eq!(last["mem_peak_bytes"], memory["total_bytes"], "{name}");
        totals.push(memory["total_bytes"].as_u64().unwrap());
        // On a GPU that is only counted, each query has a range of keys: 8 bytes.
        let gpu = [&["memory", "--json", "--device", "cuda"], &data[..]].concat();
        let gpu = ferrotron(path, &gpu);
        println!("{name}: {}", String::from_utf8_lossy(&gpu.stdout));
    }
    assert!(totals[2] > totals[0], "{totals:?}");
}

#[test]
fn what_does_not_fit_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    write(path);
    for (more, part) in [
        ("--reset-attention-mask", "--reset-attention-mask: needs the token that ends a document"),
        ("--eod-id 3", "--eod-id: needs --reset-attention-mask"),
        ("--eod-mask-loss --eod-id 50", "--eod-id: 50 is no token id of 0 to 49"),
    ] {
        let more: Vec<&str> = more.split(' ').collect();
        let data = ["train", "--data", "a", "--vocab-size", "50"];
        let line = refused(ferrotron(path, &[&data[..], TINY, &more].concat()), 2);
        assert!(line.contains(part), "{more:?}: {line}");
    }
}
