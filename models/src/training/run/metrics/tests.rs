//! Lines of a metrics file: written, extended, cut off and refused.

use super::*;
use std::os::unix::fs::PermissionsExt;

fn metrics(step: u64) -> Metrics {
    Metrics {
        step,
        losses: BTreeMap::new(),
        loss: 1.0 / step as f64,
        lr: 1e-3,
        grad_norm: f64::INFINITY,
        loss_scale: None,
        skipped: true,
        bad_step: None,
        rewound_to: None,
        staleness: Vec::new(),
        samples: 1,
        tokens: 8,
        step_ms: 1.0,
        data_wait_ms: 0.0,
        tokens_per_s: 8e3,
        tflops: 1.0,
        mem_peak_bytes: 1,
        host_peak_bytes: None,
        stragglers: None,
        validation_loss: step.is_multiple_of(2).then_some(0.5),
        validation_losses: BTreeMap::new(),
        tasks: BTreeMap::new(),
    }
}

fn lines(steps: std::ops::RangeInclusive<u64>) -> String {
    steps.map(|step| serde_json::to_string(&metrics(step)).unwrap() + "\n").collect()
}

#[test]
fn only_later_lines_and_half_a_line_are_cut_off() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("new/metrics.jsonl");
    let mut log = MetricsLog::open(&path, 0).unwrap();
    (1..=5).for_each(|step| log.write(&metrics(step)).unwrap());
    drop(log);
    let whole = lines(1..=5);
    assert_eq!(std::fs::read_to_string(&path).unwrap(), whole);
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o640)).unwrap();
    // Every way in which a killed process may have left it.
    for length in 0..=whole.len() {
        std::fs::write(&path, &whole[..length]).unwrap();
        check_metrics(&path).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), whole[..length]);
        let mut log = MetricsLog::open(&path, 3).unwrap();
        let steps = whole[..length].matches('}').count().min(3) as u64;
        assert_eq!(log.curve.training.len() as u64, steps, "{length} bytes");
        log.write(&metrics(steps + 1)).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), lines(1..=steps + 1));
    }
    assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o640);
    let log = MetricsLog::open(Path::new("/dev/null"), 7).unwrap();
    assert!(log.curve.training.is_empty());
}

#[test]
fn the_line_of_a_step_is_there_once_and_gets_its_evaluations() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("metrics.jsonl");
    let mut log = MetricsLog::open(&path, 0).unwrap();
    let text = || std::fs::read_to_string(&path).unwrap();
    for step in 1..=4 {
        let bare = Metrics { validation_loss: None, ..metrics(step) };
        log.write(&bare).unwrap();
        let line = serde_json::to_string(&bare).unwrap();
        assert_eq!(text(), lines(1..=step - 1) + &line + "\n");
        for _ in 0..2 {
            log.write(&metrics(step)).unwrap();
            assert_eq!(text(), lines(1..=step));
        }
    }
    assert_eq!(log.curve.training.len(), 4);
    assert_eq!(log.curve.validation, [(2, 0.5), (4, 0.5)]);
}

#[test]
fn a_file_that_a_live_run_writes_is_refused_and_left() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("metrics.jsonl");
    let mut log = MetricsLog::open(&path, 0).unwrap();
    log.write(&metrics(1)).unwrap();
    for refused in [check_metrics(&path).err(), MetricsLog::open(&path, 0).err()] {
        let refused = refused.expect("it is in use").to_string();
        assert!(refused.contains("metrics.jsonl is being written by another run"), "{refused}");
    }
    assert_eq!(std::fs::read_to_string(&path).unwrap(), lines(1..=1));
    drop(log);
    check_metrics(&path).unwrap();
    assert_eq!(MetricsLog::open(&path, 1).unwrap().curve.training.len(), 1);
    let null = Path::new("/dev/null");
    let _both = [MetricsLog::open(null, 0).unwrap(), MetricsLog::open(null, 0).unwrap()];
    check_metrics(null).unwrap();
}

#[test]
fn foreign_lines_are_named_and_left() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notes");
    for (text, line) in [
        ("my notes".to_string(), 1),
        ("\n".to_string(), 1),
        (format!("{}{{\"step\":4,\"loss\":0.5}}\n", lines(1..=3)), 4),
        (format!("{}# the end\n", lines(1..=3)), 4),
        (lines(1..=2) + &lines(1..=2), 3),
        (lines(1..=2) + "\u{0}\n", 3),
    ] {
        std::fs::write(&path, &text).unwrap();
        // Even where they are behind what is cut off.
        for step in [0, 9] {
            let refused = MetricsLog::open(&path, step).err().expect("foreign").to_string();
            assert!(refused.contains(&format!("notes, line {line}, is no line")), "{refused}");
            assert_eq!(check_metrics(&path).unwrap_err().to_string(), refused);
        }
        assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
    }
}
