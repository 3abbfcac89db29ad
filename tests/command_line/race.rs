//! `--task race`: a BERT fine-tuned on questions, evaluated, resumed, exported, and what is refused.

use super::{ferrotron, folder_with_text, losses, succeeded};
use serde_json::{Value, json};
use std::path::Path;
use tempfile::TempDir;

const MODEL: &str =
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 24 --threads 1";
const PRETRAIN: &str =
    "train --architecture bert --tokenizer byte --data text.txt --train-iters 3 --save pre";
const TUNE: &str = "train --task RACE --pretrained-checkpoint pre --train-data race/train --valid-data race/dev \
                    --seq-length 24 --threads 1";

/// A line of options in `folder`.
fn run(folder: &Path, line: &str) -> std::process::Output {
    ferrotron(folder, &line.split_whitespace().collect::<Vec<_>>())
}

/// A text, and files of questions whose right option has a z.
fn folder_with_questions() -> TempDir {
    let folder = folder_with_text();
    for (name, first) in [("train/middle/1", 0), ("train/high/2", 100), ("dev/3", 300)] {
        let path = folder.path().join("race").join(name).with_extension("txt");
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let article = |number: u64| {
            let letter = |i: u64| char::from(b'a' + (number * 7919 % 8161 * (i + 3) % 25) as u8);
            let answer = number * 31 % 97 % 4;
            let option = |i: u64| match i == answer {
                true => format!("{}z", letter(i)),
                false => format!("{}{}", letter(i), letter(i + 9)),
            };
            let options: Vec<String> = (0..4).map(option).collect();
            let question = if number.is_multiple_of(2) { "It is _ ." } else { "What?" };
            let answer = ["A", "B", "C", "D"][answer as usize];
            let article = format!("A text\n{}.", letter(20));
            json!({ "article": article, "questions": [question], "options": [options], "answers": [answer] })
                .to_string()
        };
        let lines: Vec<String> = (first..first + 50).map(article).collect();
        std::fs::write(path, lines.join("\n")).unwrap();
    }
    folder
}

fn results(folder: &Path, more: &str) -> Value {
    let line = "eval --tasks race --task-data race=race/dev --json --threads 1";
    let out = succeeded(run(folder, &format!("{line} {more}")));
    serde_json::from_str::<Value>(&out).unwrap()["results"]["race"].clone()
}

#[test]
fn a_pretrained_bert_learns_to_answer_and_is_evaluated_in_every_layout() {
    let folder = folder_with_questions();
    let path = folder.path();
    succeeded(run(path, &format!("{PRETRAIN} {MODEL}")));
    let line = format!("{TUNE} --micro-batch-size 10 --train-iters 150 --lr 3e-3 --eval-iters all");
    let output = run(path, &format!("{line} --save tuned"));
    let notes = String::from_utf8_lossy(&output.stderr).into_owned();
    let part = "new: multichoice_head.bias, multichoice_head.weight\n";
    assert!(notes.contains(part), "{notes}");
    let out = succeeded(output);
    assert!(out.contains("validation accuracy 1.0000, loss"), "{out}");
    assert!(out.contains("over 50 questions"), "{out}");
    let metrics = std::fs::read_to_string(path.join("tuned/metrics.jsonl")).unwrap();
    let last: Value = serde_json::from_str(metrics.lines().last().unwrap()).unwrap();
    assert_eq!((&last["samples"], &last["tokens"]), (&json!(10), &json!(10 * 4 * 24)));
    assert_eq!(last["losses"]["accuracy"], 1.0, "{last}");

    let memory = line.replacen("train", "memory --json", 1);
    let report: Value = serde_json::from_str(&succeeded(run(path, &memory))).unwrap();
    assert_eq!(report["total_bytes"], last["mem_peak_bytes"]);

    let want = last["validation_loss"].as_f64().unwrap();
    for layout in [
        "",
        "--micro-batch-size 3",
        "--nproc 2",
        "--nproc 2 --tensor-model-parallel-size 2",
        "--nproc 2 --pipeline-model-parallel-size 2",
    ] {
        let found = results(path, &format!("--load tuned {layout}"));
        assert_eq!((&found["acc"], &found["examples"]), (&json!(1.0), &json!(50)), "{layout}");
        let loss = found["loss"].as_f64().unwrap();
        assert!((loss - want).abs() < 1e-4 * want, "{layout}: {loss} {want}");
    }

    // Several validation sets have a loss each.
    let sets = TUNE.replace("race/dev", "race/dev race/train/high --multiple-validation-sets");
    let out = succeeded(run(path, &format!("{sets} --train-iters 2 --eval-iters all --save sets")));
    let last = std::fs::read_to_string(path.join("sets/metrics.jsonl")).unwrap();
    let last: Value = serde_json::from_str(last.lines().last().unwrap()).unwrap();
    for set in ["dev", "high"] {
        assert!(out.contains(&format!("validation of {set}: accuracy")), "{out}");
        assert!(last["validation_losses"][set].as_f64().is_some(), "{last}");
    }

    // The checkpoint knows its task.
    let resume = "train --load tuned --save tuned --train-iters 152 --nproc 2 --tensor-model-parallel-size 2";
    succeeded(run(path, resume));
    succeeded(run(path, "export --load tuned --output hf"));
    let config = std::fs::read_to_string(path.join("hf/config.json")).unwrap();
    assert!(config.contains("MegatronBertForMultipleChoice"), "{config}");

    // The encoder of a Hugging Face folder begins with another new head.
    succeeded(run(path, "export --load pre --output encoder"));
    let folder = "train --task race --pretrained-checkpoint encoder --tokenizer byte --data race/train \
                  --train-iters 2 --threads 1";
    let first_loss = |save: &str, layout: &str| {
        let output = run(path, &format!("{folder} --global-batch-size 12 --save {save} {layout}"));
        let notes = String::from_utf8_lossy(&output.stderr).into_owned();
        succeeded(output);
        assert!(notes.contains(part), "{notes}");
        losses(path.join(save).join("metrics.jsonl"))[0].1.parse::<f64>().unwrap()
    };
    let alone = first_loss("alone", "");
    let stages = first_loss("stages", "--nproc 2 --pipeline-model-parallel-size 2");
    assert!((alone - stages).abs() < 1e-5 * alone, "{alone} {stages}");
    refuses(path);
}

/// Expects an error of one line.
fn refuses(path: &Path) {
    succeeded(run(
        path,
        "train --data text.txt --train-iters 1 --num-layers 1 --hidden-size 16 --threads 1 --save gpt",
    ));
    std::fs::write(path.join("broken.txt"), "{\"article\": 1}").unwrap();
    let mut wrong = Vec::new();
    for (line, part) in [
        (
            "train --task race --data race/train",
            "--tokenizer: a task has no text for a char vocabulary: give --pretrained-checkpoint",
        ),
        (
            "train --task race --load pre --data race/train",
            "--task: needs --pretrained-checkpoint ",
        ),
        (
            "train --task race --load encoder --data race/train",
            "--task: goes with --pretrained-checkpoint encoder",
        ),
        (
            "train --pretrained-checkpoint pre --data race/train",
            "--pretrained-checkpoint: needs --task race",
        ),
        (
            "train --task race --pretrained-checkpoint gpt --data race/train",
            "--pretrained-checkpoint: ",
        ),
        (
            "train --task race --pretrained-checkpoint absent --data race/train",
            "--pretrained-checkpoint: there is no 'absent'",
        ),
        (
            "train --task race --pretrained-checkpoint encoder --data race/train",
            "--pretrained-checkpoint: 'encoder' has no tokenizer",
        ),
        (
            "train --task race --pretrained-checkpoint pre --tokenizer gpt2 --data race/train",
            "brings its own: leave it out",
        ),
        (
            "train --task race --pretrained-checkpoint pre --hidden-size 16 --data race/train",
            "--hidden-size: 16 contradicts",
        ),
        (
            "train --task race --pretrained-checkpoint pre",
            "--task: race needs its files: name them by --data",
        ),
        (
            "train --task race --pretrained-checkpoint pre --data absent",
            "--data: race: there is no 'absent'",
        ),
        (
            "train --task race --pretrained-checkpoint pre --data broken.txt",
            "'broken.txt': not an article of RACE: invalid type",
        ),
        (
            "train --task race --pretrained-checkpoint pre --data race/train --valid-fraction 0.2",
            "name them by --valid-data",
        ),
        (
            "train --task race --architecture bert --data race/train",
            "--tokenizer: a task has no text for a char vocabulary",
        ),
        ("eval --load tuned", "--tasks: is missing: 'tuned' chooses among answers"),
        (
            "eval --load pre --tasks race --task-data race=race/dev",
            "--tasks: 'pre' has no head for 4 choices",
        ),
        (
            "eval --load gpt --tasks race --task-data race=race/dev",
            "'gpt' holds a GPT, and race is a task of a BERT",
        ),
        (
            "eval --load tuned --tasks lambada --task-data lambada=text.txt",
            "'tuned' holds a BERT, and lambada is a task of a GPT",
        ),
        (
            "eval --load tuned --tasks race --task-data race=absent",
            "--task-data race: race: there is no 'absent'",
        ),
    ] {
        let output = run(path, line);
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        if output.status.success() || message.lines().count() != 1 || !message.contains(part) {
            wrong.push(format!("{line}: {message}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
