//! Local SGD from the command line.

use super::{MODEL, assert_same, command, finished, folder_with_text, succeeded};

/// Default numbers of steps are such that replicas are the same after them.
#[test]
fn local_steps_go_with_the_defaults() {
    let folder = folder_with_text();
    let path = folder.path();
    let line = |options: &str| format!("{MODEL} --nproc 2 --train-iters 6 {options}");
    let model = MODEL.replace("--eval-interval 3", "");
    let local = format!("{model} --nproc 2 --train-iters 270 --local-sgd-steps 9 --save local");
    let text = succeeded(finished(command(path, &local)));
    assert!(text.contains("rank 0 sends every 9 steps: "), "{text}");
    let metrics_text = std::fs::read_to_string(path.join("local/metrics.jsonl")).unwrap();
    let evaluated = metrics_text.lines().enumerate().filter(|(_, l)| l.contains("validation_loss"));
    // 250 steps, the default, rounded up to a multiple of 9; and the last.
    assert_eq!(evaluated.map(|(i, _)| i + 1).collect::<Vec<_>>(), [252, 270]);

    let text = succeeded(finished(command(path, &line("--save sums --local-sgd-steps 1"))));
    assert!(text.contains("rank 0 sends in a step: "), "{text}");
    succeeded(finished(command(path, &line("--save plain"))));
    assert_same("local steps of one", &path.join("sums"), &path.join("plain"), 0.0);
}
