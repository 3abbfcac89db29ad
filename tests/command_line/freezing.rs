//! `--freeze-parameters`: what stays as it was, what a resumed run may change, and what is refused.

use super::{ferrotron, folder_with_text, succeeded, train};
use ferrotron::models::checkpoint::Checkpoint;
use ferrotron::models::gpt::Gpt;
use ferrotron::models::trainer::Model;
use ferrotron::nn::{Module, Scope};
use ferrotron::{DType, Device};
use std::path::Path;

/// The names and values of all weights of a checkpoint.
fn weights(checkpoint: &Path) -> Vec<(String, Vec<f64>)> {
    let checkpoint = Checkpoint::open(checkpoint).unwrap();
    let config = Gpt::config_from(&checkpoint).unwrap();
    let scope = Scope::new(&Device::cpu(1).unwrap(), DType::F32, 0);
    let gpt = Gpt::new(&scope, &config).unwrap();
    checkpoint.load_params(&gpt.params()).unwrap();
    let value = |param: &ferrotron::nn::Param| param.leaf().value()?.to_f64();
    gpt.params().iter().map(|param| (param.name().to_string(), value(param).unwrap())).collect()
}

#[test]
fn frozen_parameters_stay_and_a_resumed_run_remembers_them() {
    let folder = folder_with_text();
    let path = folder.path();
    succeeded(train(path, &["--save", "run"]));
    let before = weights(&path.join("run"));
    let start = ["train", "--load", "run", "--save", "tuned", "--freeze-parameters"];
    let patterns = ["*,!norm_f", "!blocks.0.mlp", "--train-iters", "25"];
    succeeded(ferrotron(path, &[&start[..], &patterns].concat()));
    // The patterns are in the checkpoint now.
    succeeded(ferrotron(path, &["train", "--load", "tuned", "--train-iters", "30"]));
    let after = weights(&path.join("tuned"));
    for ((name, before), (_, after)) in before.iter().zip(&after) {
        let trained = name.starts_with("norm_f.") || name.starts_with("blocks.0.mlp.");
        assert_eq!(before != after, trained, "{name}");
    }
    let thawed = ["--freeze-parameters", "wte", "--train-iters", "35"];
    let output = ferrotron(path, &[&["train", "--load", "tuned"][..], &thawed].concat());
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("which was frozen when it was saved: freeze it again"), "{error}");
}

#[test]
fn patterns_that_make_no_sense_are_one_line() {
    let folder = folder_with_text();
    for (patterns, shown) in [
        (&["blocks.7"][..], "--freeze-parameters: 'blocks.7' matches none of 16 parameters"),
        (&["*"], "freeze-parameters: all 16 parameters are frozen: nothing is left to train"),
        (&["wte,,wpe"], "--freeze-parameters: one of [\"wte\", \"\", \"wpe\"] is empty"),
        (&["!wte"], "--freeze-parameters: '!wte' takes parameters out before any is chosen"),
    ] {
        let output = train(folder.path(), &[&["--freeze-parameters"][..], patterns].concat());
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains(shown.trim_start_matches("--")), "{error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
}
