//! Validation sets of a BERT, each evaluated by itself, and sets without a pair of sentences.

use super::models_and_data::refused;
use super::validation_sets::{assert_close, contains, events, metrics};
use super::{TINY, ferrotron, succeeded};
use serde_json::Value;
use std::path::Path;
use std::process::Output;
use tempfile::TempDir;

const BERT: &str = "--architecture bert --tokenizer byte --seq-length 64 --sample-length 0 --global-batch-size 4 --dtype f64";

fn run(folder: &Path, words: &str) -> Output {
    ferrotron(folder, &words.split_whitespace().collect::<Vec<_>>())
}

fn train(folder: &Path, words: &str) -> Output {
    run(
        folder,
        &format!("train {} {BERT} {words}", TINY.join(" ").replace("--sample-length 20", "")),
    )
}

/// Texts `a`, `b` and `c` of documents with several sentences, and `d`, whose documents have one but for the first; and the
/// same as data sets.
fn folder_with_sets() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, documents, factor) in [("a", 60, 7), ("b", 20, 11), ("c", 9, 13), ("d", 9, 3)] {
        let document = |i: usize| match name == "d" && i > 0 {
            true => format!("Only number {}.\n\n", i * factor % 17),
            false => format!("Number {}. And more of it!\nThe end of {i}.\n\n", i * factor % 97),
        };
        let text: String = (0..documents).map(document).collect();
        std::fs::write(folder.path().join(format!("{name}.txt")), text).unwrap();
        let words = format!(
            "tokenize --input {name}.txt --output-prefix {name} --tokenizer byte --split-sentences"
        );
        succeeded(run(folder.path(), &words));
    }
    folder
}

#[test]
fn each_set_of_a_bert_has_its_loss_by_name_in_every_layout() {
    let folder = folder_with_sets();
    let path = folder.path();
    let several = "--multiple-validation-sets --eval-iters all";
    let sets =
        "--train-data-path a_text_sentence --valid-data-path b_text_sentence c_text_sentence";
    let files = "--data a.txt --valid-data b.txt c.txt";
    for (data, names) in
        [(sets, ["b_text_sentence", "c_text_sentence"]), (files, ["b.txt", "c.txt"])]
    {
        let run_folder = format!("run-{}", names[0]);
        let save = format!("{several} --save {run_folder} --tensorboard-dir tb");
        let out = succeeded(train(path, &format!("{data} {save}")));
        let last = metrics(&path.join(&run_folder)).pop().unwrap();
        for name in names {
            assert!(out.contains(&format!("validation of {name}: loss ")), "{out}");
            assert!(contains(&events(&path.join("tb")), &format!("validation-{name}")));
            let alone = format!("eval --load {run_folder} --data {name} --valid-fraction 1 --json");
            let found: Value = serde_json::from_str(&succeeded(run(path, &alone))).unwrap();
            assert_close(&last["validation_losses"][name], &found["loss"], 1e-12, name);
        }
        for (name, layout) in [
            ("micro", "--micro-batch-size 4"),
            ("dp", "--nproc 2"),
            ("tp", "--nproc 2 --tensor-model-parallel-size 2 --sequence-parallel"),
            ("cp", "--nproc 2 --context-parallel-size 2"),
        ] {
            let save = format!("{run_folder}-{name}");
            succeeded(train(path, &format!("{data} {several} {layout} --save {save}")));
            let found = metrics(&path.join(&save)).pop().unwrap();
            for set in names {
                let [found, want] = [&found, &last].map(|line| &line["validation_losses"][set]);
                assert_close(found, want, 1e-10, &format!("{name} {set}"));
            }
        }
    }
    // The checkpoint remembers them.
    let resumed = run(path, "train --load run-b.txt --train-iters 21");
    let told = String::from_utf8_lossy(&resumed.stderr).into_owned();
    succeeded(resumed);
    assert!(told.contains("step     21  validation c.txt loss"), "{told}");
    let report = "report run-b.txt run-b_text_sentence --output page.html";
    succeeded(run(path, report));
    let page = std::fs::read_to_string(path.join("page.html")).unwrap();
    assert!(page.contains("loss of c.txt"));
}

#[test]
fn a_set_without_pairs_is_named() {
    let folder = folder_with_sets();
    let path = folder.path();
    // The last documents of `d` have one sentence, and a share of 1 % holds none of its documents out. Those of `e` have one.
    std::fs::write(path.join("e.txt"), "One.\n\nTwo.").unwrap();
    let words = "tokenize --input e.txt --output-prefix e --tokenizer byte --split-sentences";
    succeeded(run(path, words));
    let shared = "--data-path a_text_sentence d_text_sentence --split";
    let several = "--multiple-validation-sets";
    for (words, part) in [
        (
            format!("{shared} 7,3,0 {several}"),
            "--split holds no document with two sentences of 'd_text_sentence' out for validation: give",
        ),
        (
            format!("{shared} 99,1,0 {several}"),
            "--split holds nothing of 'd_text_sentence' out for validation: give a larger share",
        ),
        (
            format!("--train-data-path a_text_sentence {several}"),
            "--multiple-validation-sets: needs sets for validation",
        ),
        (
            format!(
                "--train-data-path a_text_sentence --valid-data-path 1 b_text_sentence {several}"
            ),
            "--multiple-validation-sets: sets with weights are one",
        ),
        (
            "--train-data-path a_text_sentence --valid-data-path b_text_sentence e_text_sentence"
                .to_string(),
            "a bert takes sentences, but 'e_text_sentence.bin' has none: each of its 2 documents is one sequence",
        ),
        (
            format!("--data a.txt --valid-data b.txt e.txt {several}"),
            "e.txt: data: no document for validation has two sentences",
        ),
        (
            "--data a.txt --valid-data e.txt".to_string(),
            "no document for validation has two sentences: there are 2 sentences in 2 documents, which blank lines \
             separate in text: hold out more with --valid-fraction or --split, or name files by --valid-data",
        ),
    ] {
        let output = train(path, &format!("{words} --save refused"));
        let code = output.status.code().unwrap();
        let line = refused(output, code);
        assert!(line.contains(part) && code != 0, "{words}: {line}");
    }
    let warned = |words: &str| {
        let output = train(path, words);
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        succeeded(output);
        told
    };
    let told = warned(&format!("{shared} 7,3,0 --save some"));
    let line = "warning: --split holds no document with two sentences of 'd_text_sentence' out for validation, which goes \
                without";
    assert_eq!(told.matches(line).count(), 1, "{told}");
    let told = warned(&format!("{shared} 99,1,0 --save few --nproc 2"));
    let line = "warning: --split holds nothing of 'd_text_sentence' out for validation, which goes without";
    assert_eq!(told.matches(line).count(), 1, "{told}");
}
