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
    // Nor does a run that goes on without it.
    let more =
        ["train", "--load", "run", "--save", "without", "--ema-decay", "0", "--train-iters", "22"];
    succeeded(ferrotron(path, &more));
    let output = ferrotron(path, &["eval", "--load", "without", "--ema"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let output = train(path, &["--ema-decay", "1"]);
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(message.contains("--ema-decay: must be in [0, 1), got 1"), "{message}");
}

/// Refuses options that were typed for another optimizer, but not those that a checkpoint remembers.
#[test]
fn options_of_another_optimizer_are_refused_by_name() {
    let folder = folder_with_text();
    let path = folder.path();
    for (options, line) in [
        (
            &["--optimizer", "lion", "--muon-momentum", "0.9"][..],
            "--muon-momentum is an option of --optimizer muon, and this run has --optimizer lion",
        ),
        (
            &["--optimizer", "sgd", "--adam-beta1", "0.8"],
            "--adam-beta1 is an option of --optimizer adam and muon, and this run has --optimizer sgd",
        ),
        (&["--lion-beta2", "0.8"], "and this run has --optimizer adam: leave it out"),
    ] {
        let output = train(path, options);
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{message}");
        assert!(message.contains(line), "{message}");
    }
    let lion = ["--optimizer", "lion", "--lion-beta2", "0.9", "--lr", "1e-4", "--save", "lion"];
    succeeded(train(path, &lion));
    succeeded(ferrotron(path, &["train", "--load", "lion", "--train-iters", "22"]));
}

/// Weights that stay in f32 in a run of 16 bits: resumed, evaluated and shown, and refused without 16 bits.
#[test]
fn parameters_are_kept_in_f32_by_name() {
    let folder = folder_with_text();
    let path = folder.path();
    let options = ["--bf16", "--keep-in-fp32", "*norm*,wte"];
    let run = |more: &[&str]| succeeded(train(path, &[&options, more].concat()));
    run(&["--save", "whole"]);
    run(&["--save", "half", "--exit-interval", "10"]);
    succeeded(ferrotron(path, &["train", "--load", "half", "--save", "rest"]));
    assert!(weights(&path.join("whole"), 20) == weights(&path.join("rest"), 20));
    succeeded(train(path, &["--bf16", "--save", "plain"]));
    let eval = |run: &str| {
        succeeded(ferrotron(path, &["eval", "--load", run, "--json", "--threads", "1"]))
    };
    assert_ne!(eval("whole"), eval("plain"));
    // A run in f32 has no use for it.
    let more = ["train", "--load", "whole", "--dtype", "f32", "--train-iters", "22"];
    succeeded(ferrotron(path, &more));
    for (options, line) in [
        (&["--keep-in-fp32", "*norm*"][..], "--keep-in-fp32: needs --bf16 or --fp16, got f32"),
        (&["--bf16", "--keep-in-fp32", "layernorm"], "keep-in-fp32: 'layernorm' matches none of"),
        (&["--bf16", "--keep-in-fp32", "!wte"], "--keep-in-fp32: '!wte' takes parameters out"),
    ] {
        let output = train(path, options);
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{message}");
        assert!(message.contains(line), "{message}");
    }
}
