//! Checkpoints of earlier versions of the format are resumed.

use super::{ferrotron, losses, succeeded};

/// Saved after step 3 of 6 by the first version of the format, with the text that it was trained on.
const VERSION_1: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/checkpoints/version-1");

#[test]
fn a_checkpoint_of_version_1_is_resumed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let (text, saved) = (format!("{VERSION_1}/text.txt"), format!("{VERSION_1}/iter_0000003"));
    let resumed = ["train", "--load", &saved, "--data", &text, "--save", "run"];
    succeeded(ferrotron(path, &resumed));
    let steps = losses(path.join("run/metrics.jsonl"));
    // Bits depend on the instruction set; the run that continued in version 1 ended with this loss.
    let (step, loss) = steps.last().expect("a step");
    assert_eq!(*step, 6);
    assert!((loss.parse::<f64>().unwrap() - 2.595_361).abs() < 1e-4, "{loss}");
    let config = std::fs::read_to_string(path.join("run/iter_0000006/config.json")).unwrap();
    assert!(config.contains("\"architecture\": \"gpt\""), "{config}");
}
