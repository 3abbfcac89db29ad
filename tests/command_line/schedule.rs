//! `ferrotron schedule`: what it draws and counts.

use super::{ferrotron, folder_with_text, succeeded};

#[test]
fn a_schedule_is_drawn_and_timed_beside_its_formulas() {
    let folder = folder_with_text();
    let run = |more: &[&str]| {
        let sizes = ["schedule", "--stages", "4", "--microbatches", "8"];
        succeeded(ferrotron(folder.path(), &[&sizes[..], more].concat()))
    };
    let text = run(&["--pipeline-schedule", "1f1b", "--svg", "a.svg"]);
    for part in [
        "time/s  0  ",
        "rank 3  .  .  .  F0 B0--- F1 B1---",
        "bubble          9 s, 0.3750 of the ideal 24 s",
        "(p-1) (tf+tb+tw) = 9 s, (p-1)/m = 0.3750",
        "iteration time  33 s",
        "(m+p-1) (tf+tb+tw) = 33 s",
        "rank 1        3",
    ] {
        assert!(text.contains(part), "{part} is missing: {text}");
    }
    let svg = std::fs::read_to_string(folder.path().join("a.svg")).unwrap();
    assert!(svg.starts_with("<svg") && svg.contains("1f1b, 4 stages, 8 microbatches"), "{svg}");
    // A common unit that no duration is, and a bound instead of a formula.
    let text = run(&["--pipeline-schedule", "zb-h1", "--tf", "1.5", "--tw", "2"]);
    assert!(text.contains("lower bound") && text.contains("W7------"), "{text}");

    let text = run(&["--pipeline-schedule", "interleaved", "--chunks", "4", "--json"]);
    let report: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(report["bubble_s"], 2.25, "{report}");
    assert_eq!(report["iteration_s"], report["iteration_formula_s"]);
    assert_eq!(report["ranks"][0]["peak_total"], 19);
    assert_eq!(report["ranks"][3]["timeline"].as_array().unwrap().len(), 2 * 8 * 4);
}

#[test]
fn a_schedule_without_a_flush_is_drawn_with_its_weight_versions() {
    let folder = folder_with_text();
    let run = |more: &[&str]| {
        succeeded(ferrotron(folder.path(), &[&["schedule", "--pipeline-schedule"], more].concat()))
    };
    let text = run(&["pipedream", "--stages", "3", "--steps", "5"]);
    for part in [
        "rank 2  .  .  F0 B0--- F1 B1---",
        "= 6 s",
        "weight versions of each rank",
        "rank 0        3",
    ] {
        assert!(text.contains(part), "{part} is missing: {text}");
    }
    let text =
        run(&["pipedream-2bw", "--stages", "3", "--microbatches", "2", "--steps", "3", "--json"]);
    let report: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&report["steps"], &report["microbatches"]), (&3.into(), &6.into()));
    assert_eq!(report["ranks"][2]["weight_versions"], 2);
    let weights = serde_json::json!([0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1]);
    assert_eq!(report["ranks"][2]["weights"], weights, "{report}");
}
