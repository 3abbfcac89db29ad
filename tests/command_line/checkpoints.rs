//! `ferrotron checkpoint`: list, verify, compare, delete.

use ferrotron::models::run_lock::RunLock;
use serde_json::Value;
use std::path::Path;
use std::process::Output;

use super::{
    checkpoint_file, ferrotron, folder_with_text, succeeded, train, write_checkpoint_file,
};

/// The exit code, and all that was printed.
fn ended(output: &Output) -> (Option<i32>, String) {
    let text = [&output.stdout[..], &output.stderr].concat();
    (output.status.code(), String::from_utf8_lossy(&text).into_owned())
}

fn copy_folder(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let name = entry.unwrap().file_name();
        std::fs::copy(from.join(&name), to.join(&name)).unwrap();
    }
}

/// The names of the checkpoints of the first run.
fn names(folder: &Path) -> Vec<String> {
    let listed = succeeded(ferrotron(folder, &["checkpoint", "ls", "runs/0001", "--json"]));
    let listed: Vec<Value> = serde_json::from_str(&listed).unwrap();
    let name = |entry: &Value| entry["folder"].as_str().unwrap().rsplit('/').next().unwrap().into();
    listed.iter().map(name).collect()
}

#[test]
fn checkpoints_are_listed_and_a_damaged_one_is_found() {
    let folder = folder_with_text();
    let path = folder.path();
    succeeded(train(path, &[]));
    let table = succeeded(ferrotron(path, &["checkpoint", "ls"]));
    let rows: Vec<&str> = table.lines().collect();
    assert_eq!(rows.len(), 5, "{table}");
    assert!(rows[0].starts_with("checkpoint ") && rows[1].starts_with("iter_0000005 "), "{table}");
    assert!(rows[4].starts_with("iter_0000020 ") && rows[4].ends_with("latest"), "{table}");
    let listed = ["checkpoint", "ls", "runs/0001", "--json"];
    let listed: Value = serde_json::from_str(&succeeded(ferrotron(path, &listed))).unwrap();
    assert_eq!((&listed[0]["step"], &listed[3]["latest"]), (&5.into(), &true.into()));
    assert_eq!(listed[1]["contents"]["optimizer"], true);
    assert!(listed[1]["contents"]["parameters"].as_u64().unwrap() > 1000);

    let all = ["checkpoint", "verify", "runs/0001", "--all"];
    assert_eq!(succeeded(ferrotron(path, &all)).matches(": ok\n").count(), 4);
    let file = path.join("runs/0001/iter_0000010/optimizer.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let (code, text) = ended(&ferrotron(path, &all));
    assert_eq!((code, text.matches(": ok\n").count()), (Some(1), 3), "{text}");
    assert!(text.contains("1 of 4 checkpoints are damaged"), "{text}");
    succeeded(ferrotron(path, &["checkpoint", "verify"]));

    std::fs::remove_file(&file).unwrap();
    std::fs::create_dir(path.join("runs/0001/iter_0000099.tmp")).unwrap();
    let table = succeeded(ferrotron(path, &["checkpoint", "ls", "runs/0001"]));
    let row = |name: &str| table.lines().find(|row| row.starts_with(name)).unwrap();
    assert!(row("iter_0000010 ").contains("optimizer.safetensors"), "{table}");
    assert!(row("iter_0000099.tmp ").contains("incomplete"), "{table}");

    let (code, text) = ended(&ferrotron(path, &["checkpoint", "ls", "nowhere"]));
    assert_eq!((code, text.lines().count()), (Some(1), 1), "{text}");
}

#[test]
fn checkpoints_of_any_layouts_are_compared() {
    let folder = folder_with_text();
    let path = folder.path();
    let common = ["--sample-length", "0", "--dtype", "f64"];
    succeeded(train(path, &[&common[..], &["--save", "one"]].concat()));
    let cut = ["--nproc", "2", "--tensor-model-parallel-size", "2", "--save", "two"];
    succeeded(train(path, &[&common[..], &cut].concat()));
    let diff = |more: &[&str]| ended(&ferrotron(path, &[&["checkpoint", "diff"], more].concat()));

    let (code, text) = diff(&["one", "one/iter_0000020"]);
    assert_eq!(code, Some(0), "{text}");
    // Sums of two halves round otherwise.
    let (code, text) = diff(&["one", "two", "--atol", "1e-12"]);
    assert_eq!(code, Some(0), "{text}");
    let (code, text) = diff(&["one/iter_0000015", "two", "--json"]);
    let found: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(code, Some(1));
    let step =
        found["fields"].as_array().unwrap().iter().find(|field| field["name"] == "progress.step");
    assert_eq!(step.unwrap()["values"], serde_json::json!([15, 20]));
    let tensors = found["tensors"].as_array().unwrap();
    assert!(tensors.len() > 10 && tensors[0]["kind"] == "values", "{text}");
    assert!(tensors[0]["largest"].as_f64().unwrap() > 0.0 && found["equal_tensors"] == 0);

    succeeded(train(path, &[&common[..], &["--num-layers", "2", "--save", "deeper"]].concat()));
    let (code, text) = diff(&["one", "deeper", "--rtol", "1e3", "--atol", "1e3"]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("model.num_layers: 1 | 2"), "{text}");
    assert!(text.contains("blocks.1.") && text.contains("missing in 'one/iter_0000020'"), "{text}");
    // A field that an earlier version did not write has its default; another tokenizer is a difference.
    copy_folder(&path.join("two/iter_0000020"), &path.join("older/iter_0000020"));
    let older = path.join("older/iter_0000020");
    let mut config = checkpoint_file(&older, "config.json");
    assert!(config["model"].as_object_mut().unwrap().remove("qk_layernorm").is_some(), "{config}");
    write_checkpoint_file(&older, "config.json", &config);
    let (code, text) = diff(&["two", "older/iter_0000020"]);
    assert_eq!(code, Some(0), "{text}");
    let mut tokenizer = checkpoint_file(&older, "tokenizer.json");
    tokenizer["chars"] = tokenizer["chars"].as_str().unwrap().replace('x', "X").into();
    write_checkpoint_file(&older, "tokenizer.json", &tokenizer);
    let (code, text) = diff(&["two", "older/iter_0000020"]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.lines().next().unwrap().starts_with("tokenizer: \"char of "), "{text}");

    let (code, text) = diff(&["one", "two", "--atol", "nan"]);
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("--atol: must be at least 0, got NaN"), "{text}");
}

#[test]
fn older_checkpoints_are_deleted_unless_a_run_goes_on() {
    let folder = folder_with_text();
    let path = folder.path();
    succeeded(train(path, &["--sample-length", "0"]));
    let prune = |more: &[&str]| {
        ended(&ferrotron(path, &[&["checkpoint", "prune", "runs/0001"], more].concat()))
    };
    // What killed runs leave goes, too.
    std::fs::create_dir(path.join("runs/0001/iter_0000025.tmp")).unwrap();
    std::fs::create_dir(path.join("runs/0001/iter_0000005.tmp")).unwrap();
    let (code, text) = prune(&["--save-retain", "1", "--dry-run"]);
    assert_eq!((code, text.matches("would delete").count()), (Some(0), 5), "{text}");
    assert_eq!(names(path).len(), 6);
    let lock = RunLock::acquire(&path.join("runs/0001")).unwrap();
    let (code, text) = prune(&[]);
    assert!(code == Some(1) || code == Some(2), "{text}");
    assert!(text.contains("is used by another run"), "{text}");
    drop(lock);
    let (code, text) = prune(&["--save-retain", "1", "--save-retain-interval", "10"]);
    assert_eq!((code, text.matches("deleted ").count()), (Some(0), 4), "{text}");
    assert_eq!(names(path), ["iter_0000010", "iter_0000020"]);
    let (code, text) = prune(&["--save-retain", "0"]);
    assert_eq!((code, names(path).len()), (Some(2), 2), "{text}");
    assert!(text.contains("--save-retain: must be positive, got 0"), "{text}");
    let (code, text) = prune(&["--save-retain", "1", "--save-retain-interval", "0"]);
    assert_eq!((code, names(path)), (Some(0), vec!["iter_0000020".to_string()]), "{text}");
}

#[test]
fn damaged_checkpoints_are_never_the_ones_that_stay() {
    let folder = folder_with_text();
    let path = folder.path();
    succeeded(train(path, &["--sample-length", "0", "--save-retain", "5"]));
    let prune =
        || ended(&ferrotron(path, &["checkpoint", "prune", "runs/0001", "--save-retain", "1"]));
    let file = |step| path.join(format!("runs/0001/iter_{step:07}/optimizer.safetensors"));

    // A checksum alone tells that the newest is damaged.
    let whole = std::fs::read(file(20)).unwrap();
    let mut bytes = whole.clone();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(file(20), &bytes).unwrap();
    let (code, text) = prune();
    assert_eq!((code, text.lines().count(), names(path).len()), (Some(1), 1, 4), "{text}");
    assert!(text.contains("the newest checkpoint is damaged: "), "{text}");
    assert!(text.trim_end().ends_with(": nothing was deleted"), "{text}");

    // Its length tells.
    std::fs::write(file(20), &whole[..whole.len() / 2]).unwrap();
    let (code, text) = prune();
    assert_eq!((code, text.matches("deleted runs").count()), (Some(0), 2), "{text}");
    assert!(text.contains("iter_0000020' is neither counted nor deleted"), "{text}");
    assert_eq!(names(path), ["iter_0000015", "iter_0000020"]);

    // A run that goes on from the other one says so once.
    let (load, more) = ("runs/0001/iter_0000015", ["--save", "runs/0001", "--save-retain", "1"]);
    std::fs::rename(path.join("runs/0001/iter_0000020"), path.join("runs/0001/iter_0000010"))
        .unwrap();
    let (code, text) =
        ended(&train(path, &[&["--load", load, "--train-iters", "26"], &more[..]].concat()));
    assert_eq!((code, text.matches("neither counted nor deleted").count()), (Some(0), 1), "{text}");
    assert_eq!(names(path), ["iter_0000010", "iter_0000026"]);
}

#[test]
fn a_folder_without_a_checkpoint_is_not_damaged() {
    let folder = folder_with_text();
    let path = folder.path();
    std::fs::create_dir_all(path.join("run/iter_0000005.tmp")).unwrap();
    for all in [&[][..], &["--all"]] {
        let (code, text) =
            ended(&ferrotron(path, &[&["checkpoint", "verify", "run"], all].concat()));
        assert_eq!(code, Some(1), "{text}");
        assert_eq!(text, "ferrotron: checkpoint: 'run' holds no checkpoint\n");
    }
}

/// The copy's files have other times than the run's.
#[test]
fn a_copy_of_a_run_goes_on_from_its_newest_checkpoint() {
    let folder = folder_with_text();
    let path = folder.path();
    succeeded(train(path, &["--sample-length", "0", "--save", "run", "--save-retain", "5"]));
    for step in [20, 10, 5, 15] {
        let name = format!("iter_{step:07}");
        copy_folder(&path.join("run").join(&name), &path.join("x").join(&name));
    }
    let (code, text) = start_or_go_on(path, &["--global-batch-size", "2", "--train-iters", "21"]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("going on from its newest, 'x/iter_0000020'"), "{text}");
}

#[test]
fn a_run_keeps_multiples_of_an_interval() {
    let folder = folder_with_text();
    let path = folder.path();
    let more = ["--sample-length", "0", "--save-retain", "1", "--save-retain-interval", "10"];
    succeeded(train(path, &[&more[..], &["--train-iters", "15"]].concat()));
    assert_eq!(names(path), ["iter_0000010", "iter_0000015"]);
    let prune = ["checkpoint", "prune", "runs/0001", "--save-retain", "1"];
    let (code, text) = ended(&ferrotron(path, &prune));
    assert_eq!((code, names(path).len()), (Some(0), 2), "{text}");
    assert_eq!(text, "--save-retain-interval 10, which the run remembers\n");
    let typed = ["--save-retain-interval", "4"];
    let (code, text) = ended(&ferrotron(path, &[&prune[..], &typed].concat()));
    assert_eq!((code, text), (Some(0), "deleted runs/0001/iter_0000010\n".into()));
}

/// Trains with one and the same command line.
fn start_or_go_on(folder: &Path, more: &[&str]) -> (Option<i32>, String) {
    let same = ["--save", "x", "--load", "x", "--sample-length", "0", "--global-batch-size", "4"];
    ended(&train(folder, &[&same[..], more].concat()))
}

#[test]
fn one_command_line_starts_a_run_and_goes_on_with_it() {
    let folder = folder_with_text();
    let path = folder.path();
    let (code, text) = ended(&train(path, &["--load", "x", "--save", "y"]));
    assert_eq!(code, Some(1), "{text}");
    assert!(
        text.contains("--load: there is no 'x'; to start a run there, give --save x"),
        "{text}"
    );

    for (nproc, exit) in [("1", "5"), ("2", "10"), ("1", "7"), ("2", "20")] {
        let (code, text) = start_or_go_on(path, &["--nproc", nproc, "--exit-interval", exit]);
        assert_eq!(code, Some(0), "{text}");
        let changed = text.lines().find(|line| line.starts_with("changed since"));
        let layout = format!("changed since the checkpoint: --nproc {nproc} (was ");
        assert!(
            changed.is_none_or(|line| line.starts_with(&layout) && !line.contains(',')),
            "{text}"
        );
    }
    let batch = ["--global-batch-size", "4"];
    succeeded(train(path, &[&batch[..], &["--sample-length", "0", "--save", "unbroken"]].concat()));
    let unbroken = super::losses(path.join("unbroken/metrics.jsonl"));
    assert_eq!(unbroken.len(), super::losses(path.join("x/metrics.jsonl")).len());
    let diff = ["checkpoint", "diff", "x", "unbroken", "--atol", "1e-5"];
    succeeded(ferrotron(path, &diff));

    // Killed in its first save, between the two renames.
    std::fs::remove_file(path.join("x/latest")).unwrap();
    let (code, text) = start_or_go_on(path, &["--train-iters", "25", "--lr", "1e-4"]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("'x' has no file latest: going on from its newest"), "{text}");
    assert!(
        text.contains("--lr 0.0001 (was ") && text.contains("--train-iters 25 (was 20)"),
        "{text}"
    );
    assert_eq!(super::losses(path.join("x/metrics.jsonl")).len(), 25);

    let (code, text) = start_or_go_on(path, &["--hidden-size", "32"]);
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("hidden_size"), "{text}");
}

#[test]
fn a_run_ends_when_its_time_is_over() {
    let folder = folder_with_text();
    let path = folder.path();
    let over = ["--train-iters", "100000000", "--exit-duration-in-mins", "0.02"];
    let over = [&over[..], &["--distributed-timeout-minutes", "0.5"]].concat();
    for nproc in ["1", "2"] {
        let (code, text) = start_or_go_on(path, &[&over[..], &["--nproc", nproc]].concat());
        assert_eq!(code, Some(0), "{text}");
    }
    assert!(path.join("x/latest").exists());
    let (code, text) = start_or_go_on(path, &["--exit-duration-in-mins", "0"]);
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("--exit-duration-in-mins: must be positive, got 0"), "{text}");
    let (code, text) = start_or_go_on(path, &["--distributed-timeout-minutes", "0"]);
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("must be a number of minutes from 0.01 to 525600"), "{text}");
}

/// Ranks that hold the same state each write a share of it: no file is larger than an equal share and one tensor.
#[test]
fn data_parallel_ranks_write_equal_shares() {
    let folder = folder_with_text();
    let path = folder.path();
    let layout = ["--nproc", "4", "--global-batch-size", "8", "--num-layers", "3"];
    let common = ["--sample-length", "0", "--train-iters", "5", "--dtype", "f64", "--save", "run"];
    succeeded(train(path, &[&common[..], &layout].concat()));
    for kind in ["model", "optimizer"] {
        let checkpoint = path.join("run/iter_0000005");
        let size = |rank: usize| {
            let file = checkpoint.join(format!("{kind}-{rank:05}-of-00004.safetensors"));
            file.metadata().unwrap().len()
        };
        let sizes: Vec<u64> = (1..=4).map(size).collect();
        let (largest, sum) = (sizes.iter().max().unwrap(), sizes.iter().sum::<u64>());
        // The largest tensor has 16 x 64 elements, and a header of names is a few kilobytes.
        assert!(*largest < sum / 4 + 1024 * 8 + 4000, "{kind}: {sizes:?}");
    }
    succeeded(ferrotron(path, &["checkpoint", "verify", "run"]));
    let more = ["--save", "run", "--load", "run", "--train-iters", "8", "--sample-length", "0"];
    succeeded(train(
        path,
        &[&more[..], &["--dtype", "f64", "--nproc", "1", "--num-layers", "3"]].concat(),
    ));
}

/// A stage of a pipeline has some of the weights: those of the whole model decide.
#[test]
fn a_weight_that_the_model_has_not_is_refused_in_every_layout() {
    let folder = folder_with_text();
    let path = folder.path();
    succeeded(train(path, &["--num-layers", "3", "--save", "run"]));
    let checkpoint = path.join("run/iter_0000020");
    let mut config = checkpoint_file(&checkpoint, "config.json");
    config["model"]["num_layers"] = 2.into();
    write_checkpoint_file(&checkpoint, "config.json", &config);
    for layout in [
        "",
        "--nproc 2 --tensor-model-parallel-size 2",
        "--nproc 2 --pipeline-model-parallel-size 2",
    ] {
        let mut arguments = vec!["eval", "--load", "run", "--data", "text.txt"];
        arguments.extend(layout.split_whitespace());
        let (code, text) = ended(&ferrotron(path, &arguments));
        assert_eq!(code, Some(1), "{layout}: {text}");
        let line = "iter_0000020' is a checkpoint of another shape: it has 'blocks.2.attn.";
        assert!(text.contains(line), "{layout}: {text}");
        assert!(text.contains("which the model has not"), "{layout}: {text}");
    }
    let (code, text) = ended(&ferrotron(path, &["generate", "--load", "run"]));
    assert!(code == Some(1) && text.contains("which the model has not"), "{text}");
}
