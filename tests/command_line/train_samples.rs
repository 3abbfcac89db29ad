//! `--train-samples` and the learning rate in samples.

use super::models_and_data::refused;
use super::{TINY, ferrotron, folder_with_text, losses, succeeded, weights};
use std::path::Path;
use std::process::Output;

/// Trains without the number of steps of [`TINY`].
fn train(folder: &Path, more: &[&str]) -> Output {
    let at = TINY.iter().position(|word| *word == "--train-iters").unwrap();
    let tiny = [&TINY[..at], &TINY[at + 2..]].concat();
    ferrotron(folder, &[&["train", "--data", "text.txt"], &tiny[..], more].concat())
}

#[test]
fn samples_are_steps_times_the_batch_to_the_last_bit() {
    let folder = folder_with_text();
    let path = folder.path();
    let batch = ["--global-batch-size", "4", "--lr-decay-style", "WSD"];
    let steps = "--train-iters 20 --lr-warmup-iters 6 --lr-decay-iters 18 --lr-wsd-decay-iters 5 --save steps";
    let samples = "--train-samples 83 --lr-warmup-samples 24 --lr-decay-samples 72 --lr-wsd-decay-samples 20 --save samples";
    for words in [steps, samples] {
        let words: Vec<&str> = words.split(' ').collect();
        succeeded(train(path, &[&batch[..], &words].concat()));
    }
    let want = losses(path.join("steps/metrics.jsonl"));
    assert_eq!(want.len(), 20);
    assert_eq!(losses(path.join("samples/metrics.jsonl")), want);

    // In two parts, the second in another layout: as many samples, not as many steps more.
    let words: Vec<&str> = samples.split(' ').collect();
    let words = [&batch[..], &words[..words.len() - 1], &["parts"]].concat();
    succeeded(train(path, &[&words[..], &["--exit-interval", "7"]].concat()));
    succeeded(ferrotron(path, &["train", "--load", "parts", "--nproc", "2"]));
    let parts = losses(path.join("parts/metrics.jsonl"));
    assert_eq!(parts.len(), 20);
    assert_eq!(parts[..7], want[..7]);
    for (part, want) in parts.iter().zip(&want) {
        let [part, want] = [&part.1, &want.1].map(|loss| loss.parse::<f64>().unwrap());
        assert!((part - want).abs() < 1e-4, "{part} {want}");
    }
    // Larger batches take the rest of the samples in fewer steps.
    succeeded(train(path, &[&words[..], &["--save", "larger", "--exit-interval", "7"]].concat()));
    succeeded(ferrotron(path, &["train", "--load", "larger", "--global-batch-size", "8"]));
    assert_eq!(losses(path.join("larger/metrics.jsonl")).len(), 7 + (83 - 28) / 8);
}

#[test]
fn a_batch_that_grows_takes_its_samples() {
    let folder = folder_with_text();
    let words = "--global-batch-size 8 --rampup-batch-size 2 2 24 --train-samples 60 --save run --sample-length 0";
    let words: Vec<&str> = words.split(' ').collect();
    succeeded(train(folder.path(), &words));
    // After 0, 2, 4, 6 and 8 samples: 2, 2, 2, 2, 4; after 12: 4; after 16: 6; after 22: 6; then 8 each to 60.
    let text = std::fs::read_to_string(folder.path().join("run/metrics.jsonl")).unwrap();
    let tokens = text.lines().map(|line| {
        serde_json::from_str::<serde_json::Value>(line).unwrap()["tokens"].as_u64().unwrap() / 8
    });
    let sizes: Vec<u64> = tokens.collect();
    assert_eq!(sizes, [2, 2, 2, 2, 4, 4, 6, 6, 8, 8, 8, 8]);
    assert_eq!(sizes.iter().sum::<u64>(), 60);
}

#[test]
fn a_batch_that_grows_resumes_at_its_size_in_every_layout() {
    let folder = folder_with_text();
    let path = folder.path();
    let run = |name: &str, more: &str| {
        let words = format!(
            "--global-batch-size 12 --rampup-batch-size 4 4 32 --train-samples 96 --hidden-dropout 0.1 --save {name}{more}"
        );
        succeeded(train(path, &words.split(' ').collect::<Vec<&str>>()));
        losses(path.join(name).join("metrics.jsonl"))
    };
    // 4 samples up to 16, 8 up to 32, then 12: the first stop is within the second size.
    let want = run("whole", "");
    assert_eq!(want.len(), 4 + 2 + 5);
    run("cut", " --exit-interval 5");
    succeeded(ferrotron(path, &["train", "--load", "cut", "--exit-interval", "7"]));
    succeeded(ferrotron(path, &["train", "--load", "cut"]));
    assert_eq!(losses(path.join("cut/metrics.jsonl")), want);
    assert!(weights(&path.join("cut"), 11) == weights(&path.join("whole"), 11));
    for layout in ["--tensor-model-parallel-size 2", "--context-parallel-size 2", "--zero-stage 2"]
    {
        let found = run("layout", &format!(" --nproc 2 {layout}"));
        assert_eq!(found.len(), want.len(), "{layout}");
        for (found, want) in found.iter().zip(&want) {
            let [found, want] = [&found.1, &want.1].map(|loss| loss.parse::<f64>().unwrap());
            assert!((found - want).abs() < 1e-4, "{layout}: {found} {want}");
        }
        std::fs::remove_dir_all(path.join("layout")).unwrap();
    }
}

#[test]
fn steps_and_samples_do_not_mix() {
    let folder = folder_with_text();
    for (words, part) in [
        ("--train-samples 1", "--train-samples: 1 is less than one global batch of 2"),
        (
            "--train-samples 40 --lr-decay-iters 20",
            "--lr-decay-iters: counts steps, and --train-samples counts samples: give --lr-decay-samples",
        ),
        (
            "--lr-warmup-samples 20",
            "--lr-warmup-samples: needs --train-samples: give that, or --lr-warmup-iters",
        ),
        (
            "--train-samples 40 --lr-warmup-samples 40",
            "--lr-warmup-samples 40 must be less than --lr-decay-samples 40",
        ),
        ("--train-samples 40 --train-iters 10", "cannot be used with"),
        (
            "--train-samples 40 --lr-warmup-samples 4 --lr-warmup-fraction 0.1",
            "cannot be used with",
        ),
    ] {
        let words: Vec<&str> = words.split(' ').collect();
        let output = train(folder.path(), &words);
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{told}");
        assert!(told.contains(part), "{told}");
    }
}

/// The steps of a run with what each reports of its samples: the learning rate, the loss, and that of validation.
fn steps(folder: &Path, run: &str) -> Vec<[String; 4]> {
    let text = std::fs::read_to_string(folder.join(run).join("metrics.jsonl")).unwrap();
    let line = |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap();
    let names = ["step", "lr", "loss", "validation_loss"];
    text.lines().map(|text| names.map(|name| line(text)[name].to_string())).collect()
}

#[test]
fn a_run_begins_behind_consumed_samples_as_one_that_has_consumed_them() {
    let folder = folder_with_text();
    let path = folder.path();
    let tokenize = "tokenize --input text.txt --output-prefix a --tokenizer byte --split-sentences";
    succeeded(ferrotron(path, &tokenize.split(' ').collect::<Vec<&str>>()));
    // With such a learning rate all steps have the weights of the first, so losses tell the samples.
    let still = "--global-batch-size 4 --lr 1e-30 --min-lr 0 --sample-length 0";
    let sets = "--tokenizer byte --split 8,2,0 --data-path a_text_sentence";
    for (number, (data, length, consumed)) in [
        ("--data text.txt", "--train-iters 20", (10, 40)),
        (&format!("{sets} --data-order megatron"), "--train-iters 20", (10, 40)),
        (&format!("{sets} --data-order megatron"), "--train-samples 80", (10, 40)),
        ("--data text.txt", "--train-samples 80 --rampup-batch-size 2 2 12", (3, 6)),
    ]
    .into_iter()
    .enumerate()
    {
        let at = TINY.iter().position(|word| *word == "--train-iters").unwrap();
        let train = |run: &str, more: &str| {
            let words = format!("train {still} {data} {length} --save {run}{more}");
            let words =
                [&words.split(' ').collect::<Vec<&str>>()[..], &TINY[..at], &TINY[at + 2..]];
            ferrotron(path, &words.concat())
        };
        let (step, samples) = consumed;
        let [whole, moved, ranks] = ["whole", "moved", "ranks"].map(|run| format!("{run}{number}"));
        succeeded(train(&whole, ""));
        succeeded(train(
            &moved,
            &format!(" --consumed-train-samples {samples} --exit-interval 15"),
        ));
        // The same command line resumes the run, whose checkpoint counts from then on.
        let again = format!(" --consumed-train-samples {samples} --load {moved}");
        succeeded(train(&moved, &again));
        let (want, found) = (steps(path, &whole), steps(path, &moved));
        assert_eq!(found, want[step..], "{data} {length}");
        let output = train(&moved, &format!(" --consumed-train-samples 12 --load {moved}"));
        assert_eq!(output.status.code(), Some(2));
        let line = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(line.contains("--consumed-train-samples: 12 samples, but"), "{line}");
        assert!(line.contains(&format!("from {samples} on")), "{line}");
        if number == 1 {
            succeeded(train(&ranks, &format!(" --consumed-train-samples {samples} --nproc 2")));
            for (found, want) in steps(path, &ranks).iter().zip(&want[step..]) {
                assert_eq!(found[..2], want[..2]);
                let [found, want] = [found, want].map(|step| step[2].parse::<f64>().unwrap());
                assert!((found - want).abs() < 1e-5, "{found} {want}");
            }
        }
    }
    let train = |more: &str| train(path, &more.split(' ').collect::<Vec<&str>>());
    for (words, why) in [
        ("--train-iters 20 --consumed-train-samples 80", "no step is left behind 80 samples"),
        ("--train-samples 80 --consumed-train-samples 77", "of a run of --train-samples 80"),
        ("--train-iters 20 --consumed-train-samples 42", "42 samples end within step 11"),
        ("--train-iters 20 --consumed-train-samples 42", "give 40 or 44, or the length by"),
    ] {
        let line = refused(train(&format!("--global-batch-size 4 {words}")), 2);
        assert!(line.contains("--consumed-train-samples: ") && line.contains(why), "{line}");
    }
}
