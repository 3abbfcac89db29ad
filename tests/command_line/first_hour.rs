//! A newcomer's mistakes, and the folders that they leave behind.

use super::models_and_data::refused;
use super::{TINY, ferrotron, folder_with_text, succeeded, train};

fn stderr(output: &std::process::Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_refused_run_leaves_no_folder_and_the_newest_run_has_a_checkpoint() {
    let folder = folder_with_text();
    let path = folder.path();
    let line = refused(ferrotron(path, &["generate"]), 2);
    assert!(line.contains("--load: there is no run with a checkpoint in runs/"), "{line}");
    std::fs::write(path.join("short.txt"), "hi\n").unwrap();
    let line = refused(ferrotron(path, &["train", "--data", "short.txt"]), 1);
    assert!(line.contains("the training data has "), "{line}");
    assert!(!path.join("runs/0001").exists());
    let line = refused(train(path, &["--save", "short.txt"]), 2);
    assert!(line.contains("--save: 'short.txt' is a file"), "{line}");

    succeeded(train(path, &["--train-iters", "1", "--eval-interval", "0"]));
    // A run that has begun and has saved nothing.
    std::fs::create_dir(path.join("runs/0002")).unwrap();
    let generate = ferrotron(path, &["generate", "--max-new-tokens", "3"]);
    let note = stderr(&generate);
    succeeded(generate);
    for part in ["runs/0002", "has no checkpoint yet", "runs/0001"] {
        assert!(note.contains(part), "{part} is missing: {note}");
    }
    let cold = ferrotron(path, &["generate", "--load", "runs/0001", "--temperature", "-1"]);
    assert!(cold.stdout.is_empty(), "{cold:?}");
    assert!(refused(cold, 2).contains("--temperature must be at least 0"));
    let list = succeeded(ferrotron(path, &["checkpoint", "ls"]));
    assert!(list.contains("iter_0000001"), "{list}");
    let line = refused(ferrotron(path, &["checkpoint", "verify", "runs/9999"]), 1);
    assert!(line.contains("there is no 'runs/9999'"), "{line}");
}

#[test]
fn a_run_that_has_taken_its_steps_says_so() {
    let folder = folder_with_text();
    let short = ["--train-iters", "2", "--eval-interval", "0", "--save", "run"];
    succeeded(train(folder.path(), &short));
    for (steps, want) in [("2", "at step 2 and ends at step 2"), ("1", "ends at step 1")] {
        let again = ferrotron(folder.path(), &["train", "--load", "run", "--train-iters", steps]);
        let note = stderr(&again);
        succeeded(again);
        for part in ["nothing to train", want, "--train-iters"] {
            assert!(note.contains(part), "{part} is missing: {note}");
        }
    }
}

#[test]
fn an_export_replaces_no_other_model_and_says_what_is_not_in_it() {
    let folder = folder_with_text();
    let path = folder.path();
    let short = ["--train-iters", "1", "--eval-interval", "0"];
    succeeded(train(path, &[&short[..], &["--save", "one"]].concat()));
    succeeded(train(path, &[&short[..], &["--save", "two", "--ffn-hidden-size", "24"]].concat()));
    for _ in 0..2 {
        let export = ferrotron(path, &["export", "--load", "one", "--output", "hf"]);
        assert!(stderr(&export).contains("no tokenizer.json: the char tokenizer"), "{export:?}");
        succeeded(export);
    }
    let before = std::fs::read(path.join("hf/model.safetensors")).unwrap();
    let line = refused(ferrotron(path, &["export", "--load", "two", "--output", "hf"]), 2);
    for part in ["--output: 'hf' has a model of another shape", "ffn_hidden_size 64 there, 24 here"]
    {
        assert!(line.contains(part), "{part} is missing: {line}");
    }
    assert!(std::fs::read(path.join("hf/model.safetensors")).unwrap() == before);
}

#[test]
fn token_files_are_read_with_the_tokenizer_that_made_them() {
    let folder = folder_with_text();
    let path = folder.path();
    let tokenize =
        ["tokenize", "--input", "text.txt", "--output-prefix", "t", "--tokenizer", "byte"];
    succeeded(ferrotron(path, &tokenize));
    let train = |option: &str, tokenizer: &str| {
        let data = ["train", option, "t_text_document", "--tokenizer", tokenizer];
        ferrotron(path, &[&data[..], TINY].concat())
    };
    for option in ["--data", "--data-path"] {
        let line = refused(train(option, "gpt2"), 2);
        for part in ["--tokenizer: ", "t_text_document", "byte tokenizer of 256", "gpt2 of 50257"] {
            assert!(line.contains(part), "{part} is missing: {line}");
        }
    }
    succeeded(train("--data", "byte"));
}

/// The presets that the pages name fit the layouts that they name them with.
#[test]
fn layouts_of_the_pages_suit_their_presets() {
    let folder = tempfile::tempdir().unwrap();
    let page = include_str!("../../docs/cluster.md").replace("\\\n", " ");
    let commands =
        page.lines().filter(|line| line.contains("ferrotron ") && line.contains("--preset"));
    let mut checked = 0;
    for command in commands {
        let words: Vec<&str> = command.split_whitespace().collect();
        let sizes = [
            "--preset",
            "--nproc",
            "--tensor-model-parallel-size",
            "--pipeline-model-parallel-size",
        ];
        let pairs = words.windows(2).filter(|pair| sizes.contains(&pair[0]));
        let arguments: Vec<&str> = ["memory"].into_iter().chain(pairs.flatten().copied()).collect();
        succeeded(ferrotron(folder.path(), &arguments));
        checked += 1;
    }
    assert!(checked >= 3, "{checked} commands name a preset");
}
