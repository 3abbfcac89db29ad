//! `--architecture gemma2`, alone and switch by switch, in layouts, and what is refused.

use super::models_and_data::refused;
use super::{ferrotron, folder_with_text, succeeded};
use serde_json::Value;
use std::path::Path;

fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

fn losses(path: &Path, run: &str) -> Vec<f64> {
    let text = std::fs::read_to_string(path.join(run).join("metrics.jsonl")).unwrap();
    let loss = |line| serde_json::from_str::<Value>(line).unwrap()["loss"].as_f64().unwrap();
    text.lines().map(loss).collect()
}

const TRAIN: &str = "train --data text.txt --num-layers 3 --hidden-size 24 --num-attention-heads 4 --num-query-groups 2 \
    --kv-channels 8 --seq-length 16 --window-size 5 --micro-batch-size 2 --global-batch-size 4 --train-iters 3 \
    --sample-length 0 --threads 1 --lr 1e-3 --dtype f64";

/// The same model by its name and by its switches, on one rank and on several.
#[test]
fn the_architecture_is_its_switches_in_every_layout() {
    let folder = folder_with_text();
    let path = folder.path();
    let switches = "--architecture llama --ffn-hidden-size 96 --activation geglu --apply-layernorm-1p --sandwich-norm \
        --scale-embeddings --window-attn-skip-freq 2 --attn-logit-softcapping 50 --final-logit-softcapping 30 \
        --norm-epsilon 1e-6";
    // Llama's head has a weight of its own, which no option takes back.
    let untied = "--untie-embeddings-and-output-weights";
    for (run, more) in [
        ("one", format!("--architecture gemma2 {untied}")),
        ("switches", switches.to_string()),
        (
            "tensor",
            format!(
                "--architecture gemma2 {untied} --nproc 2 --tensor-model-parallel-size 2 --sequence-parallel"
            ),
        ),
        (
            "pipeline",
            format!("--architecture gemma2 {untied} --nproc 3 --pipeline-model-parallel-size 3"),
        ),
        (
            "context",
            format!(
                "--architecture gemma2 {untied} --nproc 2 --context-parallel-size 2 --recompute-granularity full"
            ),
        ),
    ] {
        succeeded(ferrotron(path, &words(&format!("{TRAIN} {more} --save {run}"))));
        for (got, want) in losses(path, run).iter().zip(losses(path, "one")) {
            assert!((got - want).abs() < 1e-9, "{run}: {got} {want}");
        }
        assert_eq!(losses(path, run).len(), 3);
    }
    let generate = |run: &str| {
        succeeded(ferrotron(
            path,
            &words(&format!(
                "generate --load {run} --prompt line --max-new-tokens 30 --temperature 0"
            )),
        ))
    };
    assert_eq!(generate("tensor"), generate("one"));
}

#[test]
fn what_does_not_fit_is_refused_in_one_line() {
    let folder = folder_with_text();
    for (more, part) in [
        (
            "--window-attn-skip-freq 1,1",
            "window-attn-skip-freq lists 2 blocks, num-layers is 3: list every block",
        ),
        ("--window-attn-skip-freq 0", "window-attn-skip-freq must be positive, got 0"),
        ("--query-pre-attn-scalar 0", "query-pre-attn-scalar must be positive, got 0"),
        ("--final-logit-softcapping -1", "final-logit-softcapping must be positive, got -1"),
        (
            "--architecture bert --sandwich-norm",
            "--sandwich-norm: does not go with --architecture bert",
        ),
        (
            "--preset gemma2-2b --architecture llama",
            "--preset: 'gemma2-2b' is of --architecture gemma2",
        ),
    ] {
        // A BERT has neither groups nor widths of heads of its own.
        let start =
            if more.contains("bert") { "train --data text.txt --num-layers 3" } else { TRAIN };
        let line = refused(ferrotron(folder.path(), &words(&format!("{start} {more}"))), 2);
        assert!(line.contains(part), "{more}: {line}");
    }
}
