//! Sources of options: the command line, a file, a checkpoint.

use super::write_checkpoint_file;
use super::{checkpoint_file, ferrotron, folder_with_text, succeeded, train};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Output;

/// The options that the newest checkpoint of a run remembers.
fn remembered(run: &Path) -> Value {
    let latest = std::fs::read_to_string(run.join("latest")).unwrap();
    let config = std::fs::read(run.join(latest.trim()).join("config.json")).unwrap();
    serde_json::from_slice::<Value>(&config).unwrap()["run"].clone()
}

/// Lets the newest checkpoint of a run remember something else, under a correct checksum.
fn rewrite(run: &Path, change: impl Fn(&mut Value)) {
    let latest = std::fs::read_to_string(run.join("latest")).unwrap();
    let folder = run.join(latest.trim());
    let mut config = checkpoint_file(&folder, "config.json");
    change(&mut config["run"]);
    write_checkpoint_file(&folder, "config.json", &config);
}

fn message(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Resumes the run `run` for `steps` steps in all.
fn resume(folder: &Path, steps: u64, more: &[&str]) -> Output {
    let steps = steps.to_string();
    let start = ["train", "--load", "run", "--train-iters", &steps];
    ferrotron(folder, &[&start, more].concat())
}

#[test]
fn a_run_without_a_tokenizer_option_resumes_with_its_tokenizer_by_name() {
    let folder = folder_with_text();
    succeeded(train(folder.path(), &["--save", "run"]));
    succeeded(resume(folder.path(), 21, &["--tokenizer", "char"]));
}

#[test]
fn what_is_typed_goes_before_the_file_and_the_file_before_the_checkpoint() {
    let folder = folder_with_text();
    let path = folder.path();
    succeeded(train(path, &["--save", "run", "--lr", "1e-4", "--min-lr", "0", "--seed", "7"]));
    std::fs::write(path.join("more.toml"), "lr = 2e-4\nmin_lr = 1e-5\nsample_length = 0\n")
        .unwrap();
    succeeded(resume(path, 21, &["--config", "more.toml", "--lr", "3e-4"]));
    let run = remembered(&path.join("run"));
    assert_eq!(run["lr"], "3e-4", "{run}");
    assert_eq!(run["min-lr"], 1e-5, "{run}");
    assert_eq!((&run["seed"], &run["train-iters"]), (&json!("7"), &json!("21")), "{run}");
    assert!(run.get("load").is_none() && run.get("save").is_none(), "{run}");
}

#[test]
fn a_remembered_flag_can_be_switched_off() {
    let folder = folder_with_text();
    let path = folder.path();
    let flags = [
        "--bf16",
        "--grad-reduce-in-bf16",
        "--stochastic-rounding",
        "--swiglu",
        "--ffn-hidden-size",
        "64",
    ];
    succeeded(train(path, &[&flags[..], &["--save", "run"]].concat()));
    let run = || remembered(&path.join("run"));
    assert_eq!(run()["grad-reduce-in-bf16"], true);
    succeeded(resume(path, 21, &["--grad-reduce-in-bf16=false"]));
    assert_eq!(run()["grad-reduce-in-bf16"], false);
    std::fs::write(path.join("off.toml"), "stochastic_rounding = false\n").unwrap();
    succeeded(resume(path, 22, &["--config", "off.toml"]));
    let found = run();
    assert_eq!(found["stochastic-rounding"], false, "{found}");
    assert_eq!(found["grad-reduce-in-bf16"], false, "{found}");
    // Without --bf16 the others mean nothing.
    succeeded(resume(path, 23, &["--bf16=false"]));
    assert!(run().get("grad-reduce-in-bf16").is_none(), "{}", run());
    // The flag decides: another model does not fit.
    let refused = resume(path, 24, &["--swiglu=false"]);
    assert_eq!(refused.status.code(), Some(2), "{}", message(&refused));
    assert!(message(&refused).contains("activation"), "{}", message(&refused));
    let typo = resume(path, 24, &["--swiglu=off"]);
    assert!(message(&typo).contains("'off' for '--swiglu"), "{}", message(&typo));
}

#[test]
fn a_refusal_says_where_the_option_comes_from() {
    let folder = folder_with_text();
    let path = folder.path();
    succeeded(train(path, &["--save", "run", "--clip-grad", "0.5", "--lr", "1e-3"]));
    let files = [
        ("low.toml", "lr = 1e-9\nmin_lr = 1e-8\n"),
        ("text.toml", "data = \"text.txt\"\nlr = \"fast\"\n"),
        ("both.toml", "swiglu = true\nactivation = \"relu\"\n"),
        ("flag.toml", "lr = true\n"),
    ];
    for (name, text) in files {
        std::fs::write(path.join(name), text).unwrap();
    }
    let folder_of_checkpoint = "run/iter_0000020'";
    rewrite(&path.join("run"), |run| run["clip-grad"] = json!("-1"));
    let checkpoint = format!("(--clip-grad is from the checkpoint '{folder_of_checkpoint})");
    for (words, parts) in [
        (&["train", "--load", "run"][..], &["--clip-grad: must be", "got -1", &checkpoint][..]),
        (&["memory", "--load", "run"], &["got -1", &checkpoint]),
        (
            &["train", "--config", "low.toml"],
            &["--min-lr 0.00000001 is above", "(--lr, --min-lr are from low.toml)"],
        ),
        (&["train", "--config", "low.toml", "--lr", "1e-10"], &["(--min-lr is from low.toml)"]),
        (&["train", "--config", "text.toml"], &["'fast'", "(--lr is from text.toml)"]),
        (&["train", "--config", "both.toml"], &["cannot be used with", "from both.toml)"]),
        (&["train", "--config", "flag.toml"], &["flag.toml: 'lr' needs a value"]),
        (&["train", "--load", "run", "--clip-grad", "-1"], &["--clip-grad: must be", "got -1\n"]),
    ] {
        let output = ferrotron(path, words);
        let message = message(&output);
        assert_eq!(output.status.code(), Some(2), "{words:?}: {message}");
        assert_eq!(message.lines().count(), 1, "{words:?}: {message}");
        for part in parts {
            assert!(message.contains(part), "{words:?}: {part} is missing: {message}");
        }
    }
    rewrite(&path.join("run"), |run| run["no-such-option"] = json!(1));
    let output = ferrotron(path, &["train", "--load", "run"]);
    let want = format!(
        "--load: the checkpoint '{folder_of_checkpoint}: there is no option --no-such-option"
    );
    assert!(message(&output).contains(&want), "{}", message(&output));
}

/// A user who gets a checkpoint from elsewhere gets no files overwritten.
#[test]
fn a_checkpoint_does_not_decide_which_files_are_written() {
    let folder = folder_with_text();
    let path = folder.path();
    succeeded(train(path, &["--save", "run", "--exit-interval", "10"]));
    let victims = ["victim", "other"].map(|name| path.join(name));
    let [victim, other] = victims.each_ref().map(|path| path.to_str().unwrap());
    let as_map = json!({
        "metrics": victim, "trace": victim, "save": other, "offload-folder": other,
        "memory-limit": 1, "device": "cuda:7", "load": other, "exit-interval": 11,
    });
    let as_words = ["--metrics", victim, "--trace", victim, "--save", other, "--exit-interval=11"];
    for (name, at_end, more) in [
        ("map", 20, &[][..]),
        ("words", 21, &[]),
        ("map", 22, &["--nproc", "2", "--tensor-model-parallel-size", "2"]),
    ] {
        std::fs::write(victim, "precious").unwrap();
        rewrite(&path.join("run"), |run| match name {
            "map" => run.as_object_mut().unwrap().extend(as_map.as_object().unwrap().clone()),
            _ => *run = words(run).into_iter().chain(as_words.map(Value::from)).collect(),
        });
        let output = resume(path, at_end, more);
        let told = message(&output);
        succeeded(output);
        assert_eq!(std::fs::read_to_string(victim).unwrap(), "precious", "{name}");
        assert!(!path.join("other").exists(), "{name}");
        assert!(path.join(format!("run/iter_00000{at_end}")).exists(), "{name}");
        assert_eq!(told.matches("ignored: ").count(), 1, "{name}: {told}");
        assert!(told.contains("--metrics"), "{name}: {told}");
    }
}

/// A map as the words that earlier versions remembered.
fn words(run: &Value) -> Vec<Value> {
    let map = run.as_object().unwrap().iter();
    let words = map.flat_map(|(name, value)| match value {
        Value::Bool(_) => vec![format!("--{name}")],
        Value::Array(values) => {
            let values = values.iter().map(|value| value.as_str().unwrap().to_string());
            [format!("--{name}")].into_iter().chain(values).collect()
        }
        Value::String(text) => vec![format!("--{name}={text}")],
        number => vec![format!("--{name}"), number.to_string()],
    });
    words.map(Value::from).collect()
}

#[test]
fn words_of_earlier_checkpoints_are_understood() {
    let folder = folder_with_text();
    let path = folder.path();
    succeeded(train(
        path,
        &[
            "--save",
            "run",
            "--swiglu",
            "--ffn-hidden-size",
            "64",
            "--rampup-batch-size",
            "2",
            "2",
            "8",
        ],
    ));
    let before = remembered(&path.join("run"));
    rewrite(&path.join("run"), |run| *run = words(run).into());
    succeeded(resume(path, 21, &[]));
    let mut after = remembered(&path.join("run"));
    assert_eq!(after["train-iters"], "21");
    after["train-iters"] = before["train-iters"].clone();
    after["global-batch-size"] = before["global-batch-size"].clone(); // a text and a number
    assert_eq!(after, before);
    let report = ferrotron(path, &["eval", "--load", "run"]);
    assert!(succeeded(report).contains("loss"), "the data is known");
    rewrite(&path.join("run"), |run| *run = json!(["--no-such-option"]));
    let output = resume(path, 22, &[]);
    assert_eq!(output.status.code(), Some(2), "{}", message(&output));
    assert!(message(&output).contains("the checkpoint 'run/iter_0000021'"), "{}", message(&output));
}

#[test]
fn a_run_resumes_from_another_folder_and_names_what_it_reads() {
    let folder = folder_with_text();
    let path = folder.path();
    succeeded(train(path, &["--save", "run", "--exit-interval", "10"]));
    std::fs::create_dir(path.join("below")).unwrap();
    let output = ferrotron(&path.join("below"), &["train", "--load", "../run"]);
    let told = message(&output);
    succeeded(output);
    let text = path.canonicalize().unwrap().join("text.txt");
    let want = format!("as the checkpoint remembers: --data {}\n", text.display());
    assert!(told.contains(&want), "{told}");
    assert!(path.join("run/iter_0000020").exists());
    // What is typed is not what is remembered.
    let told = message(&resume(path, 21, &["--data", "./text.txt"]));
    assert!(!told.contains("as the checkpoint remembers"), "{told}");
    std::fs::rename(path.join("text.txt"), path.join("moved.txt")).unwrap();
    let output = resume(path, 22, &[]);
    let told = message(&output);
    assert_eq!(output.status.code(), Some(1), "{told}");
    assert!(told.contains(&*text.to_string_lossy()), "{told}");
    assert!(told.contains("(--data is from the checkpoint 'run/iter_0000021')"), "{told}");
}

/// A checkpoint of an earlier version remembers `--swiglu` with a width of its own, and `--split` as a fraction.
#[test]
fn a_checkpoint_of_an_earlier_version_keeps_its_width_and_its_split() {
    let folder = folder_with_text();
    let path = folder.path();
    let start = ["--save", "run", "--swiglu", "--ffn-hidden-size", "40", "--valid-fraction", "0.2"];
    succeeded(train(path, &start));
    for (step, as_words) in [(21, false), (22, true)] {
        rewrite(&path.join("run"), |run| {
            let map = run.as_object_mut().unwrap();
            map.remove("ffn-hidden-size").unwrap();
            let share = map.remove("valid-fraction").unwrap();
            map.insert("split".into(), share);
            if as_words {
                *run = words(run).into();
            }
        });
        succeeded(resume(path, step, &[]));
        let run = remembered(&path.join("run"));
        assert_eq!(run["ffn-hidden-size"], 40, "{run}");
        assert_eq!(run["valid-fraction"], "0.2", "{run}");
        assert!(run.get("split").is_none(), "{run}");
    }
    let report = ferrotron(path, &["eval", "--load", "run", "--json"]);
    let report: Value = serde_json::from_str(&succeeded(report)).unwrap();
    let length = std::fs::metadata(path.join("text.txt")).unwrap().len();
    assert_eq!(report["tokens"], length - (length as f64 * 0.8) as u64 - 1);
}

/// Options as Megatron-LM and torchrun spell them train, and a checkpoint remembers this program's.
#[test]
fn options_of_megatron_train_and_are_remembered_as_ours() {
    let folder = folder_with_text();
    let path = folder.path();
    let theirs = "--data text.txt --split 90,5,5 --swiglu --hidden-size 48 --group-query-attention \
        --num-query-groups 1 --position-embedding-type learned_absolute --most-recent-k 3 --nproc-per-node 2 \
        --use-distributed-optimizer --dtype fp32 --pipeline-schedule 1F1B --profile --profile-step-start 3 \
        --profile-step-end 5 --save run";
    let words: Vec<&str> = theirs.split_whitespace().collect();
    let arguments = [&["train"], super::TINY, &words].concat();
    succeeded(ferrotron(path, &arguments));
    let run = remembered(&path.join("run"));
    for (name, value) in [
        ("split", json!(["90", "5", "5"])),
        ("zero-stage", json!("1")),
        ("save-retain", json!("3")),
        ("nproc", json!("2")),
        ("num-query-groups", json!("1")),
        ("pipeline-schedule", json!("1f1b")),
        ("position-embedding-type", json!("learned-absolute")),
        ("dtype", json!("f32")),
    ] {
        assert_eq!(run[name], value, "{name}: {run}");
    }
    for name in ["profile", "use-distributed-optimizer", "group-query-attention", "trace"] {
        assert!(run.get(name).is_none(), "{name}: {run}");
    }
    let model = checkpoint_file(&path.join("run/iter_0000020"), "config.json")["model"].clone();
    assert_eq!(model["ffn_hidden_size"], 128, "48 x 8/3, a multiple of 64");
    let trace = std::fs::read_to_string(path.join("trace.json")).unwrap();
    assert!(trace.contains("step 4") || trace.contains("\"step\":4"), "{}", &trace[..400]);
    for (more, part) in [
        (&["--split", "0.1"][..], "--split: 0.1 alone is a proportion"),
        (&["--split", "0.1"], "--valid-fraction 0.1"),
        (&["--split", "0"], "--split: 0,0,0 are no proportions"),
        (&["--split", "1,2,3,4"], "got 4 of them"),
        (&["--split", "0,1,1"], "--split: 0,1,1 are no proportions"),
        (&["--valid-fraction", "1"], "--valid-fraction: 1 is not the fraction"),
        (&["--swiglu"], "--swiglu: 8/3 of --hidden-size 16"),
    ] {
        let output = train(path, more);
        assert_eq!(output.status.code(), Some(2), "{more:?}");
        let told = message(&output);
        assert!(told.contains(part) && told.lines().count() == 1, "{part} is missing: {told}");
    }
}

#[test]
fn completions_know_the_options() {
    let folder = tempfile::tempdir().unwrap();
    for shell in ["bash", "zsh", "fish"] {
        let script = succeeded(ferrotron(folder.path(), &["completions", shell]));
        for part in ["num-layers", "doctor"] {
            assert!(script.contains(part), "{shell}: {part} is missing");
        }
    }
    for words in [&["completions"][..], &["completions", "tcsh"]] {
        let output = ferrotron(folder.path(), words);
        assert_eq!(output.status.code(), Some(2), "{}", message(&output));
    }
}

/// Options that are off by default can be switched off again.
#[test]
fn remembered_values_are_switched_off_by_zero() {
    let folder = folder_with_text();
    let path = folder.path();
    let start = "--save run --save-retain-interval 5 --loss-spike-factor 9 --on-bad-step skip";
    succeeded(train(path, &start.split(' ').collect::<Vec<_>>()));
    let off = "save_retain_interval = 0\n";
    std::fs::write(path.join("off.toml"), off).unwrap();
    let output = resume(path, 21, &["--config", "off.toml", "--loss-spike-factor", "0"]);
    let told = message(&output);
    succeeded(output);
    let want = "changed since the checkpoint: --loss-spike-factor 0 (was 9), --save-retain-interval 0 (was 5), \
        --train-iters 21 (was 20)\n";
    assert!(told.contains(want), "{told}");
}

#[test]
fn what_changes_since_the_checkpoint_is_named_and_nothing_else() {
    let folder = folder_with_text();
    let path = folder.path();
    succeeded(train(path, &["--save", "run", "--bf16", "--global-batch-size", "4"]));
    let defaults = "--lr 0.001 --seed 1234 --nproc 1 --num-query-groups 2 --ema-decay 0";
    let told = message(&resume(path, 20, &defaults.split(' ').collect::<Vec<_>>()));
    assert!(!told.contains("changed since"), "{told}");
    let told = message(&resume(path, 21, &["--dtype", "f32", "--weight-decay", "0.2"]));
    let want = "changed since the checkpoint: --dtype f32 (was bf16), --train-iters 21 (was 20), \
        --weight-decay 0.2 (was 0.1, the default)\n";
    assert!(told.contains(want), "{told}");
    let samples = ["train", "--load", "run", "--train-samples", "88"];
    let told = message(&ferrotron(path, &samples));
    assert!(told.contains("--train-samples 88 (was --train-iters 21)\n"), "{told}");
    let told = message(&resume(path, 24, &["--nproc", "4", "--micro-batch-size", "4"]));
    assert!(
        told.contains("= 16: use 16, for example, or keep it with --micro-batch-size 1"),
        "{told}"
    );
}
