//! A run goes on with the data that it was started with, or is told to change it.

use super::{ferrotron, folder_with_text, succeeded, train};
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
    refused(path, &with(&["--split", "0.2"]), &["another split"]);
    refused(path, &with(&["--valid-data", "other.txt"]), &["another split"]);
    // The name of a file does not matter.
    succeeded(ferrotron(path, &with(&["--data", "same.txt"])));

    let other = ["train", "--load", "run", "--data", "other.txt", "--split", "0.2"];
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
