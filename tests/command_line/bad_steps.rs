//! `--on-bad-step` and `--loss-spike-factor`: outliers in the data, on the terminal and in the metrics.

use serde_json::Value;
use std::path::Path;
use tempfile::TempDir;

use super::{ferrotron, folder_with_text, succeeded, train};

/// Text that is learnt in a few steps, with a rare outlier.
pub fn folder_with_outliers() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let line = |i: usize| if i % 40 == 39 { "cbbaaccbbcaa" } else { "abcabcabcabc" };
    std::fs::write(folder.path().join("text.txt"), (0..400).map(line).collect::<String>()).unwrap();
    folder
}

/// Options under which the outliers are spikes.
pub const SPIKES: &[&str] = &[
    "--train-iters",
    "120",
    "--lr",
    "1e-2",
    "--eval-interval",
    "0",
    "--sample-length",
    "0",
    "--loss-spike-factor",
    "4",
];

fn metrics(folder: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(folder.join("metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The numbers of bad steps.
fn bad(metrics: &[Value]) -> Vec<u64> {
    let bad = metrics.iter().filter(|line| line["bad_step"].is_string());
    bad.map(|line| line["step"].as_u64().unwrap()).collect()
}

#[test]
fn spikes_are_refused_skipped_or_rewound_in_every_layout() {
    let folder = folder_with_outliers();
    let path = folder.path();
    let run = |name: &str, more: &[&str]| {
        let output = train(path, &[SPIKES, &["--save", name], more].concat());
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code(), told)
    };
    let (code, told) = run("stopped", &[]);
    assert_eq!(code, Some(1), "{told}");
    assert!(told.contains(" is over 4 times its running mean "), "{told}");
    assert!(told.contains("add --on-bad-step skip or rewind"), "{told}");
    let first = metrics(&path.join("stopped")).len() as u64 + 1;

    for reaction in ["skip", "rewind"] {
        let (code, told) = run(reaction, &["--on-bad-step", reaction]);
        assert_eq!(code, Some(0), "{told}");
        let one = metrics(&path.join(reaction));
        assert_eq!(one.len(), 120);
        let found = bad(&one);
        assert_eq!(found[0], first, "{told}");
        let line = &one[first as usize - 1];
        let (said, rewound_to) = match reaction {
            "skip" => ("; skipped".to_string(), None),
            _ => {
                let step = (first - 1) / 5 * 5;
                (format!("; rewound to the checkpoint of step {step}"), Some(step))
            }
        };
        assert_eq!((&line["skipped"], line["rewound_to"].as_u64()), (&true.into(), rewound_to));
        let said_first = format!("step {first:>6}  bad: loss ");
        assert!(told.lines().any(|l| l.starts_with(&said_first) && l.ends_with(&said)), "{told}");
        let name = format!("{reaction}-2");
        let (code, told) = run(
            &name,
            &["--on-bad-step", reaction, "--nproc", "2", "--tensor-model-parallel-size", "2"],
        );
        assert_eq!(code, Some(0), "{told}");
        assert_eq!(bad(&metrics(&path.join(name))), found, "{told}");
    }
    // The checkpoint remembers the reaction.
    succeeded(ferrotron(path, &["train", "--load", "skip", "--train-iters", "200"]));
    let later = bad(&metrics(&path.join("skip")));
    assert!(later.last().unwrap() > &120, "{later:?}");
}

#[test]
fn gradients_that_overflow_under_a_dynamic_scale_are_no_bad_steps() {
    let folder = folder_with_text();
    let more = ["--fp16", "--on-bad-step", "skip", "--loss-spike-factor", "3", "--save", "run"];
    let more = [&more[..], &["--train-iters", "40", "--sample-length", "0"]].concat();
    let output = train(folder.path(), &more);
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    succeeded(output);
    let found = metrics(&folder.path().join("run"));
    assert!(bad(&found).is_empty(), "{told}");
    let skipped = found.iter().filter(|line| line["skipped"] == true).count();
    assert!((11..40).contains(&skipped), "more than ten in a row are no error: {skipped}");
}

#[test]
fn a_run_of_bad_steps_ends() {
    let folder = folder_with_text();
    let path = folder.path();
    succeeded(train(path, &["--save", "run"]));
    let explode = "train --load run --train-iters 60 --lr 1e30 --lr-decay-style constant --lr-warmup-iters 0 --clip-grad 0";
    for reaction in ["skip", "rewind"] {
        let words: Vec<&str> = explode.split(' ').chain(["--on-bad-step", reaction]).collect();
        let words = [&words[..], &["--save-interval", "0"]].concat();
        let output = ferrotron(path, &words);
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{told}");
        assert!(told.contains("there are too many bad steps"), "{told}");
        assert_eq!(std::fs::read_to_string(path.join("run/latest")).unwrap(), "iter_0000020\n");
    }
}

#[test]
fn what_makes_no_sense_is_one_line() {
    let folder = folder_with_text();
    for (words, part) in [
        ("--on-bad-step ignore", "--on-bad-step: must be stop, skip or rewind, got 'ignore'"),
        ("--loss-spike-factor 1", "--loss-spike-factor: must be a number above 1, got 1"),
        (
            "--nproc 2 --local-sgd-steps 5 --on-bad-step skip",
            "--on-bad-step: skip does not go with replicas that take 5 steps of their own",
        ),
    ] {
        let words: Vec<&str> = words.split(' ').collect();
        let output = train(folder.path(), &words);
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{told}");
        assert!(told.contains(part) && told.lines().count() == 1, "{told}");
    }
}
