//! Tasks during a run: WikiText, LAMBADA and samples of text.

use super::models_and_data::refused;
use super::validation_sets::{assert_close, contains, events, metrics};
use super::{TINY, ferrotron, folder_with_text, succeeded};
use serde_json::Value;
use std::path::{Path, PathBuf};

fn fixture(name: &str) -> String {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/hf/tasks").join(name);
    folder.to_str().unwrap().to_string()
}

/// The options of tasks, on the texts of the fixture.
fn task_options() -> Vec<String> {
    let data = [
        format!("wikitext={}", fixture("wiki.txt")),
        format!("lambada={}", fixture("lambada.jsonl")),
    ];
    let words = ["--eval-tasks", "wikitext,lambada", "--overlapping-eval", "4", "--task-data"];
    words.map(String::from).into_iter().chain(data).collect()
}

/// Trains the fixture's model for two steps with tasks behind each.
fn train_with_tasks(folder: &Path, name: &str, layout: &str) -> Vec<Value> {
    let (load, data, tasks) = (fixture(""), fixture("wiki.txt"), task_options());
    let mut words = vec!["train", "--load", &load, "--data", &data, "--save", name];
    words.extend(["--train-iters", "2", "--eval-tasks-interval", "1", "--eval-iters", "0"]);
    words.extend(["--dtype", "f64", "--global-batch-size", "4", "--micro-batch-size", "2"]);
    words.extend(["--sample-length", "0", "--threads", "1", "--save-interval", "1"]);
    words.extend(["--tensorboard-dir", "tb"]);
    words.extend(tasks.iter().map(String::as_str));
    words.extend(layout.split_whitespace());
    succeeded(ferrotron(folder, &words));
    metrics(&folder.join(name))
}

#[test]
fn tasks_have_the_numbers_of_eval_in_every_layout() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let lines = train_with_tasks(path, "one", "");
    for step in [1, 2] {
        let (load, tasks) = (format!("one/iter_{step:07}"), task_options());
        let mut words =
            vec!["eval", "--load", &load, "--json", "--micro-batch-size", "3", "--tasks"];
        words.extend(tasks[1..].iter().map(String::as_str));
        let found: Value = serde_json::from_str(&succeeded(ferrotron(path, &words))).unwrap();
        for (task, numbers) in found["results"].as_object().unwrap() {
            for (name, want) in numbers.as_object().unwrap() {
                let found = &lines[step - 1]["tasks"][task][name];
                assert_close(found, want, 1e-9, &format!("{task} {name}"));
            }
        }
    }
    for tag in ["wikitext/adjusted_ppl", "lambada/acc"] {
        assert!(contains(&events(&path.join("tb")), tag), "{tag}");
    }
    for (name, layout) in [
        ("dp", "--nproc 2 --zero-stage 3"),
        ("tp", "--nproc 2 --tensor-model-parallel-size 2 --sequence-parallel"),
        ("cp", "--nproc 2 --context-parallel-size 2"),
        ("pp", "--nproc 2 --pipeline-model-parallel-size 2"),
    ] {
        let found = train_with_tasks(path, name, layout);
        for task in ["wikitext", "lambada"] {
            for (number, want) in lines[1]["tasks"][task].as_object().unwrap() {
                let found = &found[1]["tasks"][task][number];
                assert_close(found, want, 1e-9, &format!("{name} {task} {number}"));
            }
        }
    }
    let line = train_with_tasks_refused(path, "--eval-tasks race --task-data race=x");
    assert!(line.contains("--eval-tasks: race is a task of a BERT"), "{line}");
    let line = train_with_tasks_refused(path, "--eval-tasks lambada");
    assert!(line.contains("--task-data: is missing: give lambada=PATH"), "{line}");
    std::fs::write(path.join("one-word.txt"), "alone\n").unwrap();
    let line =
        train_with_tasks_refused(path, "--eval-tasks lambada --task-data lambada=one-word.txt");
    assert!(line.contains("passage 1 has no word behind another"), "{line}");
}

/// A large vocabulary, whose logits take most of the memory.
#[test]
fn tasks_take_no_more_memory_than_a_step() {
    let folder = folder_with_text();
    let path = folder.path();
    let tasks = task_options();
    for (name, layout) in [
        ("one", ""),
        ("bf16", "--bf16"),
        ("tp", "--nproc 2 --tensor-model-parallel-size 2"),
        ("pp", "--nproc 2 --pipeline-model-parallel-size 2 --num-layers 2"),
    ] {
        let mut words = [&["--data", "text.txt", "--tokenizer", "gpt2"], TINY].concat();
        words.extend(["--train-iters", "4", "--eval-interval", "2", "--sample-length", "0"]);
        words.extend(layout.split_whitespace());
        words.extend(tasks.iter().map(String::as_str));
        let train = [&["train", "--save", name], &words[..]].concat();
        succeeded(ferrotron(path, &train));
        let memory = [&["memory", "--json"], &words[..]].concat();
        let memory: Value = serde_json::from_str(&succeeded(ferrotron(path, &memory))).unwrap();
        let last = metrics(&path.join(name)).pop().unwrap();
        assert!(last["tasks"]["wikitext"]["ppl"].as_f64().is_some(), "{last}");
        // The number is that of the rank that takes most.
        let [found, said] = [&last["mem_peak_bytes"], &memory["total_bytes"]].map(Value::as_u64);
        assert!(found.is_some() && found <= said, "{name}: {found:?} {said:?}");
    }
}

fn train_with_tasks_refused(folder: &Path, more: &str) -> String {
    let data = fixture("wiki.txt");
    let more: Vec<&str> = more.split_whitespace().collect();
    let output = ferrotron(folder, &[&["train", "--data", &data], TINY, &more].concat());
    assert!(!output.status.success());
    String::from_utf8_lossy(&output.stderr).lines().last().unwrap_or_default().to_string()
}

#[test]
fn samples_of_text_are_written_on_the_way() {
    let folder = folder_with_text();
    let path = folder.path();
    let train = |more: &[&str]| {
        let data = ["train", "--data", "text.txt", "--log-samples-to-tensorboard"];
        ferrotron(path, &[&data[..], TINY, more].concat())
    };
    let options = ["--tensorboard-dir", "tb", "--eval-tasks-interval", "5", "--nproc", "2"];
    succeeded(train(&options));
    // Behind steps 5, 10, 15 and 20.
    let found = events(&path.join("tb"));
    let tag = b"sample/text_summary";
    assert_eq!(found.windows(tag.len()).filter(|window| window == tag).count(), 4);
    assert!(metrics(&path.join("runs/0001"))[9].get("tasks").is_none());
    let line = refused(train(&["--tensorboard-dir", "tb", "--sample-length", "0"]), 2);
    assert!(line.contains("--log-samples-to-tensorboard: needs a --sample-length"), "{line}");
}

/// One sample behind each evaluation, the last step's too; and one rank has all weights whatever --zero-stage says.
#[test]
fn a_sample_behind_the_last_step_is_there_once() {
    let folder = folder_with_text();
    let path = folder.path();
    let count = |name: &str, more: &str| {
        let data = "train --data text.txt --log-samples-to-tensorboard --tensorboard-dir";
        let events_of = format!("tb-{name}");
        let data: Vec<&str> = data.split(' ').chain([&*events_of, "--save", name]).collect();
        let more: Vec<&str> = more.split_whitespace().collect();
        succeeded(ferrotron(path, &[&data[..], TINY, &more].concat()));
        let bytes = events(&path.join(&events_of));
        let tag = b"sample/text_summary";
        bytes.windows(tag.len()).filter(|window| window == tag).count()
    };
    assert_eq!(count("each", ""), 2); // steps 10 and 20
    assert_eq!(count("zero", "--zero-stage 3"), 2);
    assert_eq!(count("between", "--eval-tasks-interval 15"), 2); // steps 15 and 20
    let data = ["train", "--data", "text.txt", "--log-samples-to-tensorboard"];
    let cut = ["--tensorboard-dir", "x", "--nproc", "2", "--zero-stage", "3"];
    let output = ferrotron(path, &[&data[..], TINY, &cut].concat());
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{message}");
    let part = "--log-samples-to-tensorboard: no rank has the whole model";
    assert!(message.contains(part), "{message}");
}

/// A number of a task that is not finite is a warning; the other task and training go on, in every layout.
#[test]
fn a_task_whose_number_is_not_finite_warns_and_training_goes_on() {
    let folder = folder_with_text();
    let path = folder.path();
    // One word of many tokens: e^(loss x tokens of a word) is beyond every number.
    std::fs::write(path.join("wiki.txt"), format!("a {}\n", "tokens".repeat(400))).unwrap();
    std::fs::write(path.join("lambada.txt"), "a line of\nsome text\n").unwrap();
    let words = |line: &str| line.split_whitespace().map(String::from).collect::<Vec<_>>();
    for (name, layout) in [
        ("one", ""),
        ("tp", "--nproc 2 --tensor-model-parallel-size 2"),
        ("dp", "--nproc 2 --zero-stage 3"),
    ] {
        let line = format!(
            "train --data text.txt --tokenizer byte --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 \
             --save {name} --train-iters 4 --eval-tasks-interval 2 --eval-iters 0 --eval-tasks wikitext,lambada \
             --task-data lambada=lambada.txt wikitext=wiki.txt --global-batch-size 4 --micro-batch-size 2 \
             --sample-length 0 --threads 1 --overlapping-eval 8 {layout}"
        );
        let line = words(&line);
        let output = ferrotron(path, &line.iter().map(String::as_str).collect::<Vec<_>>());
        let notes = String::from_utf8_lossy(&output.stderr).into_owned();
        succeeded(output);
        let warnings: Vec<&str> = notes.lines().filter(|line| line.contains("warning")).collect();
        let [second, fourth] = warnings[..] else { panic!("{name}: {notes}") };
        assert!(
            second.contains("warning: step 2: wikitext: adjusted_ppl is inf: "),
            "{name}: {second}"
        );
        assert!(
            fourth.contains("warning: step 4: wikitext: adjusted_ppl is inf: "),
            "{name}: {fourth}"
        );
        let lines = metrics(&path.join(name));
        assert_eq!(lines.len(), 4, "{name}");
        for step in [2, 4] {
            let tasks = &lines[step - 1]["tasks"];
            assert!(tasks.get("wikitext").is_none(), "{name}: {tasks}");
            assert!(tasks["lambada"]["perplexity"].as_f64().unwrap() > 1.0, "{name}: {tasks}");
        }
        assert!(path.join(name).join("iter_0000004").exists(), "{name}");
    }
    // By itself it is an error, whatever the other numbers are.
    let line = "eval --load one --json --tasks wikitext --task-data wikitext=wiki.txt --seq-length 8 --overlapping-eval 8";
    let line = words(line);
    let output = ferrotron(path, &line.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(output.stdout.is_empty(), "{output:?}");
    let line = refused(output, 1);
    assert!(
        line.contains("wikitext: adjusted_ppl is inf: adjusted perplexity inf (perplexity "),
        "{line}"
    );
}
