//! Blends of Megatron's data sets on the command line, in both orders, and through resuming.

use super::models_and_data::refused;
use super::{TINY, ferrotron, losses, succeeded, weights};
use ferrotron::models::data::{IndexedDatasetBuilder, TokenType};
use serde_json::json;
use std::path::Path;

/// Writes 200 documents of 20 tokens below 50 as a data set.
fn write(folder: &Path, name: &str, factor: u32) {
    let mut builder = IndexedDatasetBuilder::new(&folder.join(name), TokenType::U16).unwrap();
    for document in 0..200_u32 {
        let tokens: Vec<u32> = (0..20).map(|i| (document * factor + i * i) % 50).collect();
        builder.add_sequence(&tokens).unwrap();
        builder.end_document().unwrap();
    }
    builder.finish().unwrap();
}

fn run(folder: &Path, name: &str, more: &str) {
    let more: Vec<&str> = more.split(' ').collect();
    let save = ["train", "--vocab-size", "50", "--global-batch-size", "4", "--save", name];
    succeeded(ferrotron(folder, &[&save[..], TINY, &more].concat()));
}

#[test]
fn a_blend_in_either_order_resumes_bit_for_bit() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    write(path, "a", 7);
    write(path, "b", 11);
    let mut first = Vec::new();
    for order in ["computed", "megatron"] {
        let data = format!("--data-path 30 a 70 b --data-order {order}");
        run(path, &format!("{order}-whole"), &data);
        run(path, &format!("{order}-cut"), &format!("{data} --exit-interval 10"));
        let again = format!("{order}-cut");
        succeeded(ferrotron(path, &["train", "--load", &again]));
        let whole = path.join(format!("{order}-whole"));
        assert_eq!(
            losses(whole.join("metrics.jsonl")),
            losses(path.join(&again).join("metrics.jsonl"))
        );
        assert_eq!(weights(&whole, 20), weights(&path.join(&again), 20), "{order}");
        first.push(losses(whole.join("metrics.jsonl"))[1].1.clone());
        let eval = ["eval", "--load", &again, "--json", "--threads", "1"];
        // 3 % of 200 sequences are 6, of 20 tokens, in each set; the first token of a set is not predicted.
        assert!(succeeded(ferrotron(path, &eval)).contains("\"tokens\":238"));
    }
    assert_ne!(first[0], first[1]);
    // The order depends on the data's weights, and Megatron's on the number of samples where it changes the epochs.
    let go_on = |more: &[&str]| {
        let resume = ["train", "--load", "megatron-cut", "--train-iters", "22"];
        ferrotron(path, &[&resume[..], more].concat())
    };
    for more in [
        &["--data-path", "50", "a", "50", "b"][..],
        &["--data-order", "computed"],
        &["--train-iters", "2000"],
    ] {
        let resume = ["train", "--load", "megatron-cut"];
        let line = refused_last(ferrotron(path, &[&resume[..], more].concat()));
        assert!(
            line.contains("another order of the same tokens")
                && line.contains("--allow-data-change"),
            "{line}"
        );
    }
    succeeded(go_on(&[]));
}

/// The last line of a refusal, whatever notes are in front of it.
fn refused_last(output: std::process::Output) -> String {
    assert_eq!(output.status.code(), Some(2));
    String::from_utf8_lossy(&output.stderr).lines().last().unwrap_or_default().to_string()
}

#[test]
fn every_layout_draws_the_same_samples() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    write(path, "a", 7);
    write(path, "b", 11);
    let data =
        "--data-path 30 a 70 b --data-order megatron --dtype f64 --train-iters 4 --eval-iters 0";
    run(path, "one", data);
    let losses_of = |name: &str| -> Vec<f64> {
        let lines = losses(path.join(name).join("metrics.jsonl"));
        lines.iter().map(|line| line.1.parse().unwrap()).collect()
    };
    let want = losses_of("one");
    for (name, layout) in [
        ("dp", "--nproc 2"),
        ("tp", "--nproc 2 --tensor-model-parallel-size 2 --sequence-parallel"),
        ("cp", "--nproc 2 --context-parallel-size 2"),
        ("pp", "--nproc 2 --pipeline-model-parallel-size 2 --num-layers 2"),
    ] {
        let same = name != "pp";
        run(path, name, &format!("{data} {layout}"));
        if !same {
            run(path, "two-layers", &format!("{data} --num-layers 2"));
        }
        let want = if same { want.clone() } else { losses_of("two-layers") };
        for (found, want) in losses_of(name).iter().zip(&want) {
            assert!((found - want).abs() < 1e-12, "{name}: {found} and {want}");
        }
    }
}

#[test]
fn lists_in_files_and_parts_of_their_own_are_the_same_data() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    write(path, "a", 7);
    write(path, "b", 11);
    std::fs::write(path.join("list"), "30 a\n70 b\n").unwrap();
    let parts = json!({ "train": ["30", "a", "70", "b"], "valid": "b", "test": null });
    std::fs::write(path.join("parts.json"), parts.to_string()).unwrap();
    let loss = |name: &str, data: &str| {
        run(path, name, data);
        losses(path.join(name).join("metrics.jsonl"))
    };
    let words = loss("words", "--data-path 30 a 70 b --split 969,30,1");
    assert_eq!(loss("list-run", "--data-args-path list"), words);
    let typed = "--train-data-path 30 a 70 b --valid-data-path b --test-data-path a";
    assert_eq!(loss("typed", typed), loss("parts", "--per-split-data-args-path parts.json"));
    // A name that stays the short form.
    loss("short", "--data a b");
}

#[test]
fn a_run_ends_with_the_loss_of_its_test_sets() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    write(path, "a", 7);
    write(path, "b", 11);
    let train = |name: &str, more: &str| {
        let run =
            ["train", "--vocab-size", "50", "--global-batch-size", "4", "--eval-iters", "all"];
        let more: Vec<&str> = more.split(' ').collect();
        succeeded(ferrotron(path, &[&run[..], &["--save", name], TINY, &more].concat()))
    };
    let sets = "--train-data-path a --valid-data-path a --test-data-path b";
    let evaluated = |load: &str| {
        let eval = ["eval", "--load", load, "--data", "b", "--valid-fraction", "1"];
        let out = succeeded(ferrotron(path, &eval));
        let loss = out.lines().find(|line| line.starts_with("loss ")).map(str::to_string);
        format!("test {}", loss.unwrap_or(out))
    };
    let out = train("run", sets);
    assert!(out.contains(&evaluated("run")), "{out}");
    // In any layout, to the digits that are printed; and not before the last step.
    let layout = "--nproc 2 --pipeline-model-parallel-size 2 --num-layers 2";
    let out = train("layout", &format!("{sets} {layout}"));
    assert!(out.contains(&evaluated("layout")), "{out}");
    assert!(!train("cut", &format!("{sets} --exit-interval 10")).contains("test loss"));
    assert!(!train("none", "--data-path a --split 9,1,0").contains("test loss"));
}

#[test]
fn what_contradicts_is_refused_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    write(path, "a", 7);
    std::fs::write(path.join("words.txt"), "words").unwrap();
    for (more, code, part) in [
        ("--data a --data-path a", 2, "--data-path: --data names the training data too"),
        (
            "--data-path a --train-data-path a",
            2,
            "--train-data-path: --data-path names the training",
        ),
        ("--data a --valid-data-path a", 2, "--valid-data-path: needs --train-data-path"),
        ("--test-data-path a", 2, "--test-data-path: needs --train-data-path"),
        ("--data-path a --valid-data a", 2, "--valid-data: goes with --data: beside --data-path"),
        (
            "--data-path a --valid-fraction 0.1",
            2,
            "--valid-fraction: goes with --data: with --data-path give --split",
        ),
        ("--train-data-path a --split 9,1,0", 2, "--split: divides the sets of --data-path"),
        ("--data a --data-order megatron", 2, "--data-order: megatron is an order of data sets"),
        (
            "--data-path 3 a 4",
            2,
            "--data-path: '3' is no data set, and weights need one in front of each",
        ),
        ("--data-path 3 a 0 a", 2, "--data-path: 0 is no weight"),
        ("--data-path words.txt", 1, "--data-path: 'words.txt' is no indexed data set"),
        ("--data-path nowhere", 1, "--data-path: there is no data set 'nowhere'"),
        ("--data-args-path nowhere", 1, "--data-args-path: cannot read 'nowhere'"),
        ("--per-split-data-args-path words.txt", 2, "'words.txt': it is no JSON"),
        (
            "--data-path a --data-order megatron --seed 4294967296",
            2,
            "--seed: 4294967296 is beyond the 32 bits of --data-order megatron",
        ),
        (
            "--data-path a a --data-order megatron --train-iters 1000",
            2,
            "--data-path: without weights each data set is read once, which makes",
        ),
        (
            "--data-path a --data-order megatron --rampup-batch-size 2 2 20 --global-batch-size 4",
            2,
            "--rampup-batch-size: with --data-order megatron needs --train-samples",
        ),
    ] {
        let more: Vec<&str> = more.split(' ').collect();
        let line = refused(
            ferrotron(path, &[&["train", "--vocab-size", "50"], TINY, &more].concat()),
            code,
        );
        assert!(line.contains(part), "{more:?}: {line}");
    }
    let line = refused(ferrotron(path, &[&["train", "--data-path", "a"], TINY].concat()), 2);
    assert!(
        line.contains("data sets hold tokens, not text") && line.contains("--vocab-size"),
        "{line}"
    );
}
