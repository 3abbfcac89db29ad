//! A run resumes with the data that it was started with, or is told to change it.

use super::{TINY, ferrotron, folder_with_text, succeeded, train};
use super::{checkpoint_file, write_checkpoint_file};
use std::path::Path;

fn refused(folder: &Path, arguments: &[&str], parts: &[&str]) {
    let output = ferrotron(folder, arguments);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {message}");
    for part in parts.iter().chain(&["--allow-data-change"]) {
        assert!(message.contains(part), "{arguments:?} lacks {part}: {message}");
    }
    assert_eq!(message.lines().count(), 1, "{message}");
}

#[test]
fn other_data_is_refused_or_recorded() {
    let folder = folder_with_text();
    let path = folder.path();
    let text = std::fs::read_to_string(path.join("text.txt")).unwrap();
    std::fs::write(path.join("same.txt"), &text).unwrap();
    std::fs::write(path.join("other.txt"), text.replacen("line 0", "line 1", 1)).unwrap();
    succeeded(train(path, &["--save", "run", "--train-iters", "4"]));
    let go_on = ["train", "--load", "run", "--train-iters", "8"];
    let with = |more: &[&'static str]| [&go_on[..], more].concat();
    refused(path, &with(&["--data", "other.txt"]), &["other tokens of the same number"]);
    refused(path, &with(&["--data", "text.txt", "text.txt"]), &["training tokens, not"]);
    refused(path, &with(&["--valid-fraction", "0.2"]), &["another split"]);
    refused(path, &with(&["--valid-data", "other.txt"]), &["another split"]);
    // The name of a file does not matter.
    succeeded(ferrotron(path, &with(&["--data", "same.txt"])));

    let other = ["train", "--load", "run", "--data", "other.txt", "--valid-fraction", "0.2"];
    let change = [&other[..], &["--train-iters", "12", "--allow-data-change"]].concat();
    succeeded(ferrotron(path, &change));
    // From now on, that is the run's data; the permission is not remembered.
    succeeded(ferrotron(path, &["train", "--load", "run", "--train-iters", "16"]));
    let back = ["train", "--load", "run", "--train-iters", "20", "--data", "text.txt"];
    refused(path, &back, &["other tokens of the same number"]);
    let output = train(path, &["--allow-data-change"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("--load"));
}

/// The text that the program carries changes between its versions.
#[test]
fn another_built_in_corpus_is_refused_as_such() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let tiny = [&["train", "--save", "run"], TINY, &["--train-iters", "1"]].concat();
    succeeded(ferrotron(path, &tiny));
    let go_on = ["train", "--load", "run", "--train-iters", "2"];
    let checkpoint = path.join("run/iter_0000001");
    let whole = checkpoint_file(&checkpoint, "progress.json");
    let mut other = whole.clone();
    other["data_fingerprint"]["stream_tokens"] = 99.into();
    other["data_fingerprint"]["training_tokens"] = 89.into();
    write_checkpoint_file(&checkpoint, "progress.json", &other);
    refused(path, &go_on, &["built-in corpus of another version", ", not 89; resume it with that"]);
    // A tokenizer that lacks a character of this version's text.
    write_checkpoint_file(&checkpoint, "progress.json", &whole);
    let name = "tokenizer.json";
    let mut fewer = checkpoint_file(&checkpoint, name);
    let chars = fewer["chars"].as_str().unwrap();
    assert!(chars.contains('#'), "{chars}");
    fewer["chars"] = (chars.replace('#', "") + "\u{4e00}").into();
    write_checkpoint_file(&checkpoint, name, &fewer);
    refused(path, &go_on, &["built-in corpus of another version", "'#'"]);
}
