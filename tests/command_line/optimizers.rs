//! Optimizers by name, and the moving average of the weights.

use super::{ferrotron, folder_with_text, losses, succeeded, train, weights};

#[test]
fn every_optimizer_trains_and_resumes_to_the_last_bit() {
    let folder = folder_with_text();
    let path = folder.path();
    for (number, options) in [
        &["--optimizer", "lion", "--lr", "1e-4"][..],
        &["--optimizer", "sgd", "--sgd-nesterov"],
        &["--optimizer", "muon", "--muon-extra-scale-factor", "0.2", "--ema-decay", "0.9"],
        &[
            "--optimizer",
            "muon",
            "--muon-scale-mode",
            "unit_rms_norm",
            "--bf16",
            "--ema-decay",
            "0.9",
        ],
    ]
    .into_iter()
    .enumerate()
    {
        let [whole, half, rest] = ["whole", "half", "rest"].map(|name| format!("{name}-{number}"));
        let run = |more: &[&str]| succeeded(train(path, &[options, more].concat()));
        run(&["--save", &whole]);
        run(&["--save", &half, "--exit-interval", "10"]);
        succeeded(ferrotron(path, &["train", "--load", &half, "--save", &rest]));
        assert!(weights(&path.join(&whole), 20) == weights(&path.join(&rest), 20), "{options:?}");
        let last = |run: &str| losses(path.join(run).join("metrics.jsonl")).pop();
        assert_eq!(last(&whole), last(&rest), "{options:?}");
    }
}

#[test]
fn the_moving_average_is_evaluated_exported_and_asked_for_by_name() {
    let folder = folder_with_text();
    let path = folder.path();
    succeeded(train(path, &["--save", "run", "--ema-decay", "0.9"]));
    let eval = |more: &[&str]| {
        let words = ["eval", "--load", "run", "--json", "--threads", "1"];
        let report = succeeded(ferrotron(path, &[&words, more].concat()));
        serde_json::from_str::<serde_json::Value>(&report).unwrap()["loss"].as_f64().unwrap()
    };
    let (now, average) = (eval(&[]), eval(&["--ema"]));
    assert!(now != average && (now - average).abs() < 0.5 * now, "{now} and {average}");
    succeeded(ferrotron(path, &["export", "--load", "run", "--output", "hf", "--ema"]));
    let of_folder = ferrotron(path, &["export", "--load", "hf", "--output", "again", "--ema"]);
    let message = String::from_utf8_lossy(&of_folder.stderr);
    assert!(message.contains("--ema: hf has no moving average"), "{message}");

    succeeded(train(path, &["--save", "plain"]));
    let output = ferrotron(path, &["eval", "--load", "plain", "--ema"]);
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(message.contains("leave out --ema, or train with --ema-decay"), "{message}");
    let output = train(path, &["--ema-decay", "1"]);
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(message.contains("--ema-decay: must be in [0, 1), got 1"), "{message}");
}
