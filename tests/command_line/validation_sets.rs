//! Evaluations during a run: several validation sets by name, and Megatron's order of validation samples.

use super::models_and_data::refused;
use super::{TINY, ferrotron, folder_with_text, succeeded};
use ferrotron::models::data::{IndexedDatasetBuilder, TokenType};
use serde_json::Value;
use std::path::Path;

/// Writes documents of 20 tokens below 50 as a data set.
fn write(folder: &Path, name: &str, documents: u32, factor: u32) {
    let mut builder = IndexedDatasetBuilder::new(&folder.join(name), TokenType::U16).unwrap();
    for document in 0..documents {
        let tokens: Vec<u32> = (0..20).map(|i| (document * factor + i * i) % 50).collect();
        builder.add_sequence(&tokens).unwrap();
        builder.end_document().unwrap();
    }
    builder.finish().unwrap();
}

fn folder_with_sets() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, documents, factor) in [("a", 200, 7), ("b", 31, 11), ("c", 17, 13)] {
        write(folder.path(), name, documents, factor);
    }
    folder
}

/// Trains on `a` and returns the lines of the metrics.
fn run(folder: &Path, name: &str, more: &str) -> Vec<Value> {
    let more: Vec<&str> = more.split_whitespace().collect();
    let save = ["train", "--vocab-size", "50", "--global-batch-size", "4", "--save", name];
    succeeded(ferrotron(folder, &[&save[..], TINY, &more].concat()));
    metrics(&folder.join(name))
}

pub(super) fn metrics(run: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

pub(super) fn assert_close(found: &Value, wanted: &Value, tolerance: f64, what: &str) {
    let (found, wanted) = (found.as_f64().unwrap(), wanted.as_f64().unwrap());
    assert!((found - wanted).abs() <= tolerance * wanted.abs(), "{what}: {found}, not {wanted}");
}

/// The bytes of all event files of a folder.
pub(super) fn events(folder: &Path) -> Vec<u8> {
    let files = std::fs::read_dir(folder).unwrap();
    files.flat_map(|file| std::fs::read(file.unwrap().path()).unwrap()).collect()
}

pub(super) fn contains(bytes: &[u8], text: &str) -> bool {
    bytes.windows(text.len()).any(|window| window == text.as_bytes())
}

const SETS: &str =
    "--train-data-path a --valid-data-path b c --multiple-validation-sets --dtype f64";

#[test]
fn each_validation_set_has_its_loss_by_name_in_every_layout() {
    let folder = folder_with_sets();
    let path = folder.path();
    let all = format!("{SETS} --full-validation --tensorboard-dir tb");
    let lines = run(path, "one", &all);
    let last = &lines[19];
    for set in ["b", "c"] {
        let eval = ["eval", "--load", "one", "--data", set, "--valid-fraction", "1", "--json"];
        let found: Value = serde_json::from_str(&succeeded(ferrotron(path, &eval))).unwrap();
        assert_close(&last["validation_losses"][set], &found["loss"], 1e-12, set);
        assert!(contains(&events(&path.join("tb")), &format!("lm loss validation-{set}")));
    }
    // The mean over all tokens is that of the sets as one blend.
    let blend = "--train-data-path a --valid-data-path b c --dtype f64 --eval-iters all";
    let together = run(path, "together", blend);
    assert_close(&last["validation_loss"], &together[19]["validation_loss"], 1e-12, "blend");
    assert!(together[19].get("validation_losses").is_none());
    for (name, layout) in [
        ("micro", "--micro-batch-size 4"),
        ("dp", "--nproc 2"),
        ("tp", "--nproc 2 --tensor-model-parallel-size 2 --sequence-parallel"),
        ("cp", "--nproc 2 --context-parallel-size 2"),
    ] {
        let found = run(path, name, &format!("{SETS} --eval-iters all {layout}"));
        for step in [9, 19] {
            for set in ["b", "c"] {
                let [found, want] =
                    [&found, &lines].map(|lines| &lines[step]["validation_losses"][set]);
                assert_close(found, want, 1e-12, &format!("{name} {set}"));
            }
        }
    }
    let report = ["report", "one", "--output", "page.html"];
    succeeded(ferrotron(path, &report));
    let page = std::fs::read_to_string(path.join("page.html")).unwrap();
    assert!(page.contains("loss of b") && page.contains("Validation sets and tasks"));
}

#[test]
fn the_options_of_evaluations_are_remembered() {
    let folder = folder_with_sets();
    let path = folder.path();
    // Batches of evaluations have a size of their own: 3 of 6 samples of 8 tokens.
    let options = format!("{SETS} --eval-iters 3 --eval-global-batch-size 6");
    let whole = run(path, "whole", &options);
    run(path, "cut", &format!("{options} --exit-interval 10"));
    succeeded(ferrotron(path, &["train", "--load", "cut"]));
    let cut = metrics(&path.join("cut"));
    for step in [9, 19] {
        assert_eq!(cut[step]["validation_losses"], whole[step]["validation_losses"]);
    }
    let again = ["train", "--load", "cut", "--train-iters", "22"];
    let output = ferrotron(path, &again);
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    let out = succeeded(output);
    assert!(
        told.contains("step     22  validation b loss") && told.contains("over 144 tokens"),
        "{told}"
    );
    assert!(out.contains("validation loss of c"), "{out}");
}

#[test]
fn files_for_validation_have_names_too() {
    let folder = folder_with_text();
    let path = folder.path();
    std::fs::create_dir(path.join("other")).unwrap();
    for (name, lines) in [("other/text.txt", 50), ("more.txt", 20)] {
        let text: String =
            (0..lines).map(|i| format!("line {} of a text.\n", i * 31 % 50)).collect();
        std::fs::write(path.join(name), text).unwrap();
    }
    let train = |more: &[&str]| {
        ferrotron(path, &[&["train", "--data", "text.txt", "--save", "run"], TINY, more].concat())
    };
    let sets = ["--valid-data", "other", "more.txt", "--multiple-validation-sets"];
    succeeded(train(&sets));
    let lines = metrics(&path.join("run"));
    let names: Vec<&String> = lines[9]["validation_losses"].as_object().unwrap().keys().collect();
    assert_eq!(names, ["more.txt", "other"]);
    let line = refused(train(&["--multiple-validation-sets", "--save", "x"]), 2);
    assert!(line.contains("--multiple-validation-sets: needs sets for validation"), "{line}");
}

#[test]
fn megatron_s_order_gives_each_evaluation_its_own_samples() {
    let folder = folder_with_sets();
    let path = folder.path();
    let data = "--data-path 1 a 2 b --split 7,2,1 --data-order megatron --eval-iters 2 --dtype f64";
    let whole = run(path, "whole", &format!("{data} --eval-interval 5"));
    let losses: Vec<f64> =
        whole.iter().filter_map(|line| line["validation_loss"].as_f64()).collect();
    assert_eq!(losses.len(), 4);
    // A run that is interrupted goes on with the samples behind, in another layout too.
    run(path, "cut", &format!("{data} --eval-interval 5 --exit-interval 10"));
    succeeded(ferrotron(path, &["train", "--load", "cut", "--nproc", "2"]));
    for (found, want) in metrics(&path.join("cut")).iter().zip(&whole) {
        if let Some(want) = want["validation_loss"].as_f64() {
            let found = found["validation_loss"].as_f64().unwrap();
            assert!((found - want).abs() <= 1e-9 * want, "{found}, not {want}");
        }
    }
    // The weights do not change the samples: with a learning rate of 0 the losses differ by these alone.
    let still = format!("{data} --eval-interval 5 --lr 0 --min-lr 0 --weight-decay 0");
    let still = run(path, "still", &still);
    let mut losses: Vec<u64> =
        still.iter().filter_map(|line| Some(line["validation_loss"].as_f64()?.to_bits())).collect();
    losses.sort_unstable();
    losses.dedup();
    assert_eq!(losses.len(), 4, "each evaluation has other samples");
    let line = refused(
        ferrotron(
            path,
            &[
                &["train", "--vocab-size", "50", "--eval-iters", "all", "--data-order", "megatron"],
                TINY,
                &["--data-path", "1", "a", "2", "b"],
            ]
            .concat(),
        ),
        2,
    );
    assert!(line.contains("a blend with weights has no end in Megatron's order"), "{line}");
}

#[test]
fn eval_measures_the_part_that_train_has_measured() {
    let folder = folder_with_sets();
    let path = folder.path();
    for (name, order, iters) in
        [("all", "computed", "all"), ("some", "computed", "2"), ("megatron", "megatron", "2")]
    {
        let data = format!(
            "--train-data-path a --valid-data-path b --test-data-path 1 b 3 c --data-order {order} --eval-iters {iters}"
        );
        let train = ["train", "--vocab-size", "50", "--global-batch-size", "4", "--save", name];
        let words: Vec<&str> = data.split(' ').collect();
        let out = succeeded(ferrotron(path, &[&train[..], TINY, &words].concat()));
        let eval = ["eval", "--load", name, "--split-part", "test", "--eval-iters", iters];
        let found = succeeded(ferrotron(path, &eval));
        let line = found.lines().find(|line| line.starts_with("loss ")).unwrap();
        assert!(out.contains(&format!("test {line}")), "{name}: {out}\n{found}");
    }
    let loss = |more: &[&str]| -> Value {
        let out =
            succeeded(ferrotron(path, &[&["eval", "--load", "all", "--json"], more].concat()));
        serde_json::from_str(&out).unwrap()
    };
    assert_eq!(loss(&[])["tokens"], 31 * 20 - 1);
    assert_eq!(loss(&["--split-part", "train"])["tokens"], 200 * 20 - 1);
    let lines = metrics(&path.join("all"));
    assert_close(&loss(&[])["loss"], &lines[19]["validation_loss"], 1e-6, "valid");
    for (more, part) in [
        ("--split-part test --data a", "--split-part: test is a part of data sets"),
        (
            "--split-part test --valid-fraction 1 --data a",
            "--valid-fraction: says what is evaluated",
        ),
        ("--eval-iters 0", "--eval-iters: must be positive or 'all'"),
    ] {
        let more: Vec<&str> = more.split(' ').collect();
        let line = refused(ferrotron(path, &[&["eval", "--load", "all"], &more[..]].concat()), 2);
        assert!(line.contains(part), "{more:?}: {line}");
    }
}

/// The words of a command that is refused: the last line of its standard error.
fn refusal(folder: &Path, words: &str) -> String {
    let start = ["train", "--vocab-size", "50", "--global-batch-size", "4", "--save", "refused"];
    let words: Vec<&str> = words.split_whitespace().collect();
    refused(ferrotron(folder, &[&start[..], TINY, &words].concat()), 2)
}

#[test]
fn full_validation_stands_beside_the_batches_of_the_test_part() {
    let folder = folder_with_sets();
    let start = ["train", "--vocab-size", "50", "--global-batch-size", "4", "--save", "run"];
    let data = "--train-data-path a --valid-data-path b --test-data-path c";
    let words = format!("{data} --eval-iters 2 --full-validation");
    let words: Vec<&str> = words.split(' ').collect();
    let out = succeeded(ferrotron(folder.path(), &[&start[..], TINY, &words].concat()));
    let line = |start: &str| out.lines().find(|line| line.starts_with(start)).unwrap().to_string();
    assert!(line("validation loss").contains("619 tokens"), "{out}");
    assert!(line("test loss").contains("over 64 tokens"), "{out}");
}

#[test]
fn options_of_evaluations_without_effect_are_refused_unless_they_are_remembered() {
    let folder = folder_with_sets();
    let path = folder.path();
    let tasks = "--train-data-path a --eval-tasks wikitext --task-data wikitext=x";
    for (words, part) in [
        (format!("{tasks} --eval-tasks-interval 0"), "--eval-tasks: has no effect with --eval-tasks-interval 0"),
        (format!("{tasks} --eval-interval 0"), "--eval-tasks: has no effect with --eval-interval 0"),
        (
            "--train-data-path a --log-samples-to-tensorboard --tensorboard-dir tb --eval-interval 0".into(),
            "--log-samples-to-tensorboard: has no effect with --eval-interval 0",
        ),
        (
            "--train-data-path a --eval-tasks-interval 5".into(),
            "--eval-tasks-interval: has no effect without --eval-tasks",
        ),
        (format!("{SETS} --eval-iters 0"), "--multiple-validation-sets: has no effect with"),
        (format!("{SETS} --eval-interval 0"), "--multiple-validation-sets: has no effect with"),
    ] {
        let line = refusal(path, &words);
        assert!(line.contains(part), "{words}: {line}");
    }
    // Nobody typed the sets that this checkpoint remembers.
    run(path, "cut", &format!("{SETS} --exit-interval 10"));
    succeeded(ferrotron(path, &["train", "--load", "cut", "--eval-interval", "0"]));
}

#[test]
fn a_set_of_which_nothing_is_held_out_is_refused_by_name() {
    let folder = folder_with_sets();
    write(folder.path(), "small", 2, 3);
    let line =
        refusal(folder.path(), "--data-path a small --split 98,1,1 --multiple-validation-sets");
    assert!(line.contains("holds nothing of 'small' out for validation"), "{line}");
}
