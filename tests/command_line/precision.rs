//! Runs that resume in another precision.

use super::{ferrotron, folder_with_text, succeeded, train};

/// A resumed run forgets options that the other precision does not have.
#[test]
fn a_run_goes_on_in_another_precision() {
    let folder = folder_with_text();
    let bf16: &[&str] =
        &["--bf16", "--grad-reduce-in-bf16", "--no-master-weights", "--stochastic-rounding"];
    let f32: &[&str] = &["--saved-activations-dtype", "bf16"];
    for (name, start) in [("bf16", bf16), ("f32", f32)] {
        succeeded(train(folder.path(), &[start, &["--save", name]].concat()));
    }
    for (number, (name, other)) in [
        ("bf16", &["--bf16"][..]),
        ("bf16", &["--fp16"]),
        ("bf16", &["--dtype", "f16"]),
        ("bf16", &["--dtype=f32"]),
        ("f32", &["--bf16"]),
        ("f32", &["--fp16"]),
    ]
    .into_iter()
    .enumerate()
    {
        let save = format!("run-{number}");
        let go_on = ["train", "--load", name, "--train-iters", "22", "--save", &save];
        succeeded(ferrotron(folder.path(), &[&go_on[..], other].concat()));
    }
    // What is typed with it is not.
    let go_on = ["train", "--load", "bf16", "--fp16", "--grad-reduce-in-bf16"];
    let output = ferrotron(folder.path(), &go_on);
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(message.contains("--grad-reduce-in-bf16: needs --bf16, got f16"), "{message}");
}

/// A checkpoint in f64 is read in any precision, and resumed in its own.
#[test]
fn weights_in_f64_are_rounded_where_asked_and_not_resumed_in_less() {
    let folder = folder_with_text();
    let path = folder.path();
    succeeded(train(path, &["--dtype", "f64", "--save", "run"]));
    let eval = |dtype: &str| {
        let words = ["eval", "--load", "run", "--json", "--threads", "1", "--dtype", dtype];
        let report = succeeded(ferrotron(path, &words));
        serde_json::from_str::<serde_json::Value>(&report).unwrap()["loss"].as_f64().unwrap()
    };
    let whole = eval("f64");
    for (dtype, tolerance) in [("f32", 1e-6), ("bf16", 2e-2), ("f16", 2e-3)] {
        let loss = eval(dtype);
        assert!((loss - whole).abs() <= tolerance * whole, "{dtype}: {loss}, in f64 {whole}");
    }
    succeeded(ferrotron(path, &["export", "--load", "run", "--output", "hf", "--dtype", "f32"]));
    let output = ferrotron(path, &["train", "--load", "run", "--dtype", "f32"]);
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{message}");
    for part in ["--dtype: the checkpoint holds f64", "resumed in f32", "--dtype f64"] {
        assert!(message.contains(part), "{part} is missing: {message}");
    }
    assert_eq!(message.lines().count(), 1, "{message}");
}
