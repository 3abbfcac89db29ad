//! Runs that go on in another precision.

use super::{ferrotron, folder_with_text, succeeded, train};

/// What a run was started with and the other precision does not have is forgotten.
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
