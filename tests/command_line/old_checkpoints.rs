//! Checkpoints of earlier versions of the format are resumed.

use super::{
    checkpoint_file, ferrotron, folder_with_text, losses, succeeded, train, write_checkpoint_file,
};

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

/// `--disable-bias-linear` took the biases of LayerNorms, too, and neither a field nor an option said so.
#[test]
fn a_checkpoint_without_biases_of_earlier_versions_goes_on_without_those_of_norms() {
    let folder = folder_with_text();
    let path = folder.path();
    succeeded(train(path, &["--disable-bias-linear", "--disable-bias-norm", "--save", "run"]));
    let checkpoint = path.join("run/iter_0000020");
    let mut config = checkpoint_file(&checkpoint, "config.json");
    assert!(config["model"].as_object_mut().unwrap().remove("add_norm_bias").is_some(), "{config}");
    let run = config["run"].as_object_mut().unwrap();
    assert!(run.remove("disable-bias-norm").is_some(), "{config}");
    write_checkpoint_file(&checkpoint, "config.json", &config);
    for given in [&[][..], &["--disable-bias-linear"]] {
        let resume = ["train", "--load", "run", "--train-iters", "22", "--save", "more"];
        succeeded(ferrotron(path, &[&resume, given].concat()));
        let config = checkpoint_file(&path.join("more/iter_0000022"), "config.json");
        assert_eq!(config["model"]["add_norm_bias"], serde_json::Value::Null, "{config}");
        assert_eq!(config["run"]["disable-bias-norm"], true, "{config}");
        std::fs::remove_dir_all(path.join("more")).unwrap();
    }
}
