//! Pipelines without a flush from the command line.

use super::{MODEL, assert_same, command, finished, folder_with_text, metrics, succeeded, texts};

/// A pipeline of two processes, and the numbers of samples of a step's micro-batches.
fn run(schedule: &str, samples: usize, microbatches: usize) -> String {
    let sizes =
        format!("--micro-batch-size {samples} --global-batch-size {}", samples * microbatches);
    let model = MODEL.replace("--micro-batch-size 2 --global-batch-size 8", &sizes);
    format!(
        "{model} --nproc 2 --pipeline-model-parallel-size 2 --clip-grad 0 --untie-embeddings-and-output-weights \
         --pipeline-drain-interval 3 --pipeline-schedule {schedule}"
    )
}

#[test]
fn a_run_that_is_resumed_where_it_is_drained_is_the_unbroken_one() {
    let folder = folder_with_text();
    let path = folder.path();
    for (schedule, microbatches) in
        [("pipedream", 1), ("pipedream-vertical-sync", 1), ("pipedream-2bw", 2)]
    {
        let train = |options: String| {
            let line = format!("{} {options}", run(schedule, 2, microbatches));
            succeeded(finished(command(path, &line)))
        };
        let text = train(format!("--train-iters 9 --save {schedule}"));
        assert!(text.contains(&format!("pipeline 2 ({schedule}")), "{text}");
        train(format!("--train-iters 9 --save half-{schedule} --exit-interval 6"));
        // The checkpoint remembers the schedule and its interval.
        let line = format!(
            "train --load half-{schedule} --save half-{schedule} --nproc 2 --exit-interval 12"
        );
        succeeded(finished(command(path, &line)));
        // It keeps the schedule in a layout that does not go with it.
        let line = format!("train --load half-{schedule} --save other --nproc 1");
        let output = finished(command(path, &line));
        let (_, message) = texts(&output);
        assert!(!output.status.success() && message.contains("use 1f1b"), "{message}");
        let (whole, resumed) = (path.join(schedule), path.join(format!("half-{schedule}")));
        assert_eq!(metrics(&whole).len(), 9);
        assert_same(schedule, &resumed, &whole, 0.0);
    }
}

#[test]
fn what_needs_a_flush_is_refused_before_ranks_start() {
    let folder = folder_with_text();
    let pipeline = run("pipedream", 2, 1) + " --train-iters 9";
    let without = |part: &str| pipeline.replace(part, "");
    let with = |part: &str| format!("{pipeline} {part}");
    let cases: [(String, &[&str]); 11] = [
        (without("--clip-grad 0"), &["--pipeline-schedule", "add --clip-grad 0"]),
        (
            without("--untie-embeddings-and-output-weights"),
            &["add --untie-embeddings-and-output-weights"],
        ),
        (run("pipedream", 1, 4), &["after each microbatch", "pipedream-2bw"]),
        (
            pipeline.replace("--nproc 2 --pipeline-model-parallel-size 2", "--nproc 1"),
            &["at least 2 stages; with 1 use 1f1b"],
        ),
        (
            pipeline.replace("--eval-interval 3", "--eval-interval 4"),
            &["eval-interval 4", "pipeline-drain-interval 3", "in flight: take 3 or 6"],
        ),
        (
            pipeline.replace("--train-iters 9", "--train-iters 10"),
            &["train-iters 10", "take 9 or 12"],
        ),
        (with("--fp16"), &["constant --loss-scale"]),
        (with("--on-bad-step skip"), &["--on-bad-step"]),
        (
            with("--num-virtual-stages-per-pipeline-rank 2")
                .replace("--num-layers 3", "--num-layers 4"),
            &["one chunk on each rank"],
        ),
        (
            pipeline.replace("drain-interval 3", "drain-interval 0"),
            &["--pipeline-drain-interval", "must be positive"],
        ),
        (
            pipeline.replace("--pipeline-schedule pipedream", ""),
            &["--pipeline-drain-interval", "needs --pipeline-schedule pipedream"],
        ),
    ];
    // The head of a BERT cannot be untied, so that is no remedy.
    let bert = "memory --architecture bert --num-layers 4 --hidden-size 16 --num-attention-heads 4 --seq-length 8 \
                --vocab-size 64 --micro-batch-size 2 --global-batch-size 2 --nproc 2 --pipeline-model-parallel-size 2 \
                --pipeline-schedule pipedream --clip-grad 0";
    let output = finished(command(folder.path(), bert));
    let (_, err) = texts(&output);
    assert!(err.contains("always its token embedding, so use another schedule, as 1f1b"), "{err}");
    assert!(!err.contains("--untie") && err.trim_end().lines().count() == 1, "{err}");
    for (line, parts) in cases {
        let output = finished(command(folder.path(), &format!("{line} --save refused")));
        let (out, err) = texts(&output);
        assert_eq!(output.status.code(), Some(2), "{line}: {out}{err}");
        assert_eq!(err.trim_end().lines().count(), 1, "{line}: {err}");
        parts.iter().for_each(|part| assert!(err.contains(part), "{line}: {part}: {err}"));
    }
}
