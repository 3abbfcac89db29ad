//! `bench --profile`.

use super::{ferrotron, succeeded};

const BENCH: &[&str] = &[
    "bench",
    "--num-layers",
    "1",
    "--hidden-size",
    "16",
    "--num-attention-heads",
    "2",
    "--seq-length",
    "8",
    "--vocab-size",
    "32",
    "--micro-batch-size",
    "2",
    "--steps",
    "2",
    "--threads",
    "1",
    "--profile",
];

/// The option is the bench's own, although it is a spelling of `--trace` for `train`.
#[test]
fn a_profile_is_a_table_or_part_of_the_json() {
    let folder = tempfile::tempdir().unwrap();
    let told = succeeded(ferrotron(folder.path(), BENCH));
    assert!(told.starts_with("operation "), "{told}");
    for row in ["linear_weight_gradient ", "adamw ", "outside of operations ", "step "] {
        assert!(told.lines().any(|line| line.starts_with(row)), "no {row}in {told}");
    }
    let line = succeeded(ferrotron(folder.path(), &[BENCH, &["--json"]].concat()));
    let report: serde_json::Value = serde_json::from_str(&line).unwrap();
    let profile = &report["profile"];
    assert_eq!(profile["steps"], 2);
    let rows = profile["operations"].as_array().unwrap();
    let sum: f64 = rows.iter().map(|row| row["ms"].as_f64().unwrap()).sum();
    let step = 1e3 * profile["s_per_step"].as_f64().unwrap();
    let other = profile["other_ms"].as_f64().unwrap();
    assert!((sum + other - step).abs() < 1e-6 * step, "{line}");
    let plain = succeeded(ferrotron(folder.path(), &BENCH[..BENCH.len() - 1]));
    assert!(!plain.contains("profile"), "{plain}");
}

/// Products in another order of sums have other bits, but the losses are close.
#[test]
fn a_lesser_instruction_set_computes_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let loss = |limit: &[&str]| {
        let line = succeeded(ferrotron(folder.path(), &[BENCH, &["--json"], limit].concat()));
        let report: serde_json::Value = serde_json::from_str(&line).unwrap();
        report["last_loss"].as_f64().unwrap()
    };
    let (best, portable) = (loss(&[]), loss(&["--instruction-set", "Portable"]));
    assert!((best - portable).abs() < 1e-5, "{best}, {portable}");
}
