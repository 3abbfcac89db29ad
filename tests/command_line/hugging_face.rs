//! Folders of Hugging Face behind `--load`: trained on in every layout, evaluated, planned, written again, refused.

use super::models_and_data::refused;
use super::{TINY, ferrotron, folder_with_text, succeeded};
use serde_json::Value;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const BERTS: [&str; 4] = ["bert", "bert-mlm", "megatron-bert", "megatron-bert-mlm"];

/// Steps whose size is 0 in f32: they change no weight, not even one that is 0.
const STEPS: &[&str] = &[
    "--lr",
    "1e-60",
    "--train-iters",
    "2",
    "--micro-batch-size",
    "2",
    "--global-batch-size",
    "4",
    "--valid-fraction",
    "0.5",
    "--eval-iters",
    "all",
    "--sample-length",
    "0",
    "--threads",
    "1",
];

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hf").join(name)
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(from.join(file), to.join(file)).unwrap();
    }
}

/// A text of words of one letter, and the BERT `name` in `hf` with a vocabulary of 38 words: its embedding has 40 rows.
fn folder_with_bert(name: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let letter = |i: u32| char::from(b'a' + (i % 26) as u8);
    let sentence = |i: u32| (0..8).map(|j| format!("{} ", letter(i * 7 + j * j))).collect();
    let text: Vec<String> = (0..60).map(sentence).collect();
    std::fs::write(folder.path().join("text.txt"), text.join("\n")).unwrap();
    let hf = folder.path().join("hf");
    copy(&fixture("tiny-bert").join(name), &hf);
    let special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"].map(String::from);
    let letters = (0..33).map(|i| if i < 26 { letter(i).into() } else { format!("##{i}") });
    let words: Vec<String> = special.into_iter().chain(letters).collect();
    std::fs::write(hf.join("vocab.txt"), words.join("\n")).unwrap();
    folder
}

fn train(path: &Path, more: &[&str]) -> String {
    let start = ["train", "--load", "hf", "--data", "text.txt"];
    succeeded(ferrotron(path, &[&start, STEPS, more].concat()))
}

fn metrics(path: &Path, run: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(path.join(run).join("metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The weights of an export of `load`, as they are in the file.
fn exported(path: &Path, load: &str) -> Vec<u8> {
    let output = format!("{load}-exported");
    succeeded(ferrotron(path, &["export", "--load", load, "--output", &output]));
    std::fs::read(path.join(output).join("model.safetensors")).unwrap()
}

fn json(path: &Path, arguments: &[&str]) -> Value {
    serde_json::from_str(&succeeded(ferrotron(path, arguments))).unwrap()
}

#[test]
fn a_bert_is_trained_on_evaluated_planned_and_written_again() {
    for name in BERTS {
        let folder = folder_with_bert(name);
        let path = folder.path();
        train(path, &["--save", "run"]);
        let lines = metrics(path, "run");
        let want = exported(path, "hf");
        assert_eq!(want, exported(path, "run"), "{name}");

        let data = ["--data", "text.txt", "--valid-fraction", "0.5", "--threads", "1", "--json"];
        let of_folder = json(path, &[&["eval", "--load", "hf"], &data[..]].concat());
        let of_run = json(path, &["eval", "--load", "run", "--threads", "1", "--json"]);
        assert_eq!(of_folder, of_run, "{name}");
        let [got, want] = [&of_folder["loss"], &lines[1]["validation_loss"]];
        let [got, want] = [got, want].map(|loss| loss.as_f64().unwrap());
        assert!((got - want).abs() < 1e-5 * want, "{name}: {got} {want}");
        assert_eq!(of_folder["losses"]["sentence_order"].is_null(), name.ends_with("mlm"));

        let plan = |load: &str| {
            let plan = ["memory", "--load", load, "--json", "--threads", "1"];
            let batch = ["--micro-batch-size", "2", "--global-batch-size", "4"];
            json(path, &[&plan[..], &batch[..]].concat())["total_bytes"].clone()
        };
        assert_eq!((plan("hf"), plan("run")), (lines[1]["mem_peak_bytes"].clone(), plan("hf")));

        // A run that began with a folder is resumed as any other.
        let more = ["train", "--load", "run", "--train-iters", "3", "--threads", "1"];
        succeeded(ferrotron(path, &more));
        assert_eq!(metrics(path, "run").last().unwrap()["step"], 3);
    }
}

#[test]
fn every_layout_begins_with_the_same_weights() {
    let folder = folder_with_bert("megatron-bert");
    let path = folder.path();
    train(path, &["--save", "one"]);
    let (want, weights) = (metrics(path, "one"), exported(path, "one"));
    for (name, layout) in [
        ("tensor", &["--tensor-model-parallel-size", "2", "--sequence-parallel"][..]),
        ("pipeline", &["--pipeline-model-parallel-size", "2"]),
        ("context", &["--context-parallel-size", "2"]),
        ("zero-1", &["--zero-stage", "1"]),
        ("zero-3", &["--zero-stage", "3"]),
    ] {
        train(path, &[&["--nproc", "2", "--save", name], layout].concat());
        for (got, want) in metrics(path, name).iter().zip(&want) {
            let [got, want] = [got, want].map(|line| line["loss"].as_f64().unwrap());
            assert!((got - want).abs() < 1e-5 * want, "{name}: {got} {want}");
        }
        assert!(exported(path, name) == weights, "{name}: weights differ");
    }
    // Master weights begin with what the file says, not with what bf16 keeps of it.
    train(
        path,
        &["--nproc", "2", "--zero-stage", "2", "--bf16", "--ema-decay", "0.9", "--save", "bf16"],
    );
    let export = ["export", "--load", "bf16", "--dtype", "f32", "--output", "master"];
    succeeded(ferrotron(path, &export));
    let file = path.join("master/model.safetensors");
    assert!(std::fs::read(file).unwrap() == weights, "master weights differ");
    let eval = |more: &[&str]| {
        let eval = ["eval", "--load", "bf16", "--dtype", "f32", "--threads", "1", "--json"];
        json(path, &[&eval[..], more].concat())["loss"].as_f64().unwrap()
    };
    let (got, want) = (eval(&["--ema"]), eval(&[]));
    assert!((got - want).abs() < 1e-5 * want, "{got} {want}");
}

#[test]
fn a_gpt_is_trained_on() {
    let folder = folder_with_bert("bert");
    let path = folder.path();
    copy(&fixture("tiny-gpt2"), &path.join("hf"));
    std::fs::remove_file(path.join("hf/vocab.txt")).unwrap();
    let tokenizer = ["--tokenizer", "char"];
    train(path, &[&["--save", "one"], &tokenizer[..]].concat());
    let weights = exported(path, "hf");
    assert!(exported(path, "one") == weights);
    for (name, axis) in [("tensor", "tensor"), ("pipeline", "pipeline")] {
        let axis = format!("--{axis}-model-parallel-size");
        train(path, &[&["--nproc", "2", "--save", name, &axis, "2"], &tokenizer[..]].concat());
        assert!(exported(path, name) == weights, "{name}: weights differ");
    }
}

#[test]
fn what_contradicts_a_folder_is_refused_in_one_line() {
    let folder = folder_with_bert("bert");
    let path = folder.path();
    let with = |command: &str, load: &str, more: &[&str]| {
        let data = ["--data", "text.txt", "--threads", "1"];
        ferrotron(path, &[&[command, "--load", load], &data[..], more].concat())
    };
    let refuses = |output, code: i32, part: &str| {
        let line = refused(output, code);
        assert!(line.contains(part), "{part}: {line}");
    };
    for (option, word, own) in [
        ("--architecture", "gpt2", "bert"),
        ("--num-layers", "3", "2"),
        ("--hidden-size", "32", "16"),
        ("--norm-placement", "pre", "post"),
        ("--activation", "relu", "gelu-erf"),
        ("--max-position-embeddings", "32", "16"),
    ] {
        let part = format!(
            "{option}: {word} contradicts the Hugging Face folder 'hf', whose model has {own}: leave it out"
        );
        for command in ["train", "memory"] {
            refuses(with(command, "hf", &[option, word]), 2, &part);
        }
    }
    refuses(with("train", "hf", &["--bert-no-binary-head"]), 2, "--bert-no-binary-head: true");
    refuses(
        with("train", "hf", &["--preset", "gpt2-124m"]),
        2,
        "--preset: the Hugging Face folder",
    );
    refuses(with("train", "hf", &["--save", "./hf"]), 2, "--save: is the Hugging Face folder 'hf'");
    refuses(with("train", "hf", &["--tokenizer", "byte"]), 2, "the tokenizer has 260 token ids");
    refuses(with("train", "hf", &["--seq-length", "32"]), 2, "16 is less than --seq-length 32");
    refuses(with("eval", "hf", &["--ema"]), 2, "hf has no moving average");
    refuses(ferrotron(path, &["eval", "--load", "hf"]), 2, "--data: must be given");
    let export = ["export", "--load", "hf", "--output", "./hf"];
    refuses(ferrotron(path, &export), 2, "is the folder of --load, which would be replaced");
    let generate = ["generate", "--load", "hf", "--prompt", "a"];
    refuses(ferrotron(path, &generate), 2, "'hf' holds a BERT, which continues no text");

    std::fs::remove_file(path.join("hf/vocab.txt")).unwrap();
    for command in ["train", "eval"] {
        refuses(
            with(command, "hf", &[]),
            2,
            "has no tokenizer: put its tokenizer.json or vocab.txt",
        );
    }
    succeeded(ferrotron(path, &["memory", "--load", "hf"]));

    // Another family, with and without the name of its type.
    let config = std::fs::read_to_string(path.join("hf/config.json")).unwrap();
    let roberta = config.replace("\"bert\"", "\"roberta\"").replace("BertFor", "RobertaFor");
    let untyped = roberta.replace("\"model_type\": \"roberta\",", "");
    for (text, name) in [(roberta, "roberta"), (untyped, "RobertaForPreTraining")] {
        std::fs::write(path.join("hf/config.json"), text).unwrap();
        for (command, more) in [
            ("train", &["--tokenizer", "byte"][..]),
            ("memory", &[]),
            ("eval", &[]),
            ("generate", &[]),
            ("export", &["--output", "out"]),
        ] {
            let data = if ["train", "eval"].contains(&command) {
                &["--data", "text.txt"][..]
            } else {
                &[]
            };
            let output = ferrotron(path, &[&[command, "--load", "hf"], data, more].concat());
            refuses(
                output,
                1,
                &format!("describes model_type '{name}': supported are gpt2, llama, mistral, "),
            );
        }
    }
    // A BERT whose type is not named is known by its class.
    std::fs::write(path.join("hf/config.json"), config.replace("\"model_type\": \"bert\",", ""))
        .unwrap();
    succeeded(ferrotron(path, &["export", "--load", "hf", "--output", "out"]));
}

/// Tokens of a made text, as nanoGPT's files hold them.
fn folder_with_tokens(vocab_size: u16) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let tokens = (0..2000_u32).map(|i| (i * i % 97) as u16 % vocab_size);
    let bytes: Vec<u8> = tokens.flat_map(u16::to_le_bytes).collect();
    std::fs::write(folder.path().join("text.bin"), bytes).unwrap();
    folder
}

#[test]
fn every_family_is_trained_on_in_layouts_and_written_again() {
    let folder = folder_with_tokens(32);
    let path = folder.path();
    let layouts = [
        &["--tensor-model-parallel-size", "2", "--sequence-parallel"][..],
        &["--pipeline-model-parallel-size", "2"],
        &["--context-parallel-size", "2", "--zero-stage", "3"],
    ];
    let names = [
        "gpt2",
        "smollm",
        "mistral",
        "qwen2",
        "qwen2-windows",
        "qwen3",
        "gemma2",
        "pythia",
        "neox-sequential",
        "llama",
        "llama-biases",
    ];
    for (name, layout) in names.iter().zip(layouts.iter().cycle()) {
        copy(&fixture("families").join(name), &path.join(name));
        let losses = |run: &str, more: &[&str]| -> Vec<f64> {
            let run = format!("{name}-{run}");
            let start = ["train", "--load", name, "--data", "text.bin", "--vocab-size", "32"];
            let save = ["--seq-length", "16", "--save", &run];
            succeeded(ferrotron(path, &[&start, STEPS, &save, more].concat()));
            metrics(path, &run).iter().map(|line| line["loss"].as_f64().unwrap()).collect()
        };
        let one = losses("one", &[]);
        let two = losses("two", &[&["--nproc", "2"], *layout].concat());
        for (one, two) in one.iter().zip(&two) {
            assert!((one - two).abs() < 1e-5 * one, "{name}: {one} {two}");
        }
        let want = exported(path, name);
        for run in ["one", "two"] {
            assert!(exported(path, &format!("{name}-{run}")) == want, "{name} {run}");
        }
    }
    // The folder decides the scaling, too: its original length is not the 8192 of Llama 3.1.
    copy(&fixture("families/llama"), &path.join("llama"));
    let config = std::fs::read_to_string(path.join("llama/config.json")).unwrap();
    assert!(config.contains("\"original_max_position_embeddings\": 16"), "{config}");
    let start = ["train", "--load", "llama", "--data", "text.bin", "--vocab-size", "32"];
    succeeded(ferrotron(path, &["memory", "--load", "llama", "--vocab-size", "32"]));
    let other = ["--use-rope-scaling", "--rope-scaling-original-length", "8192"];
    let other = [&start[..], &other].concat();
    let line = refused(ferrotron(path, &other), 2);
    assert!(line.contains("--rope-scaling-original-length: 8192 contradicts"), "{line}");
    succeeded(ferrotron(path, &[&start, STEPS, &["--save", "scaled"]].concat()));
    assert!(exported(path, "scaled") == exported(path, "llama"));
}

/// A vocabulary may be padded, but not by thousands of token ids.
#[test]
fn a_tokenizer_that_is_too_small_for_its_model_is_told() {
    let folder = folder_with_text();
    let path = folder.path();
    let run = |words: &str| {
        let output = ferrotron(path, &words.split_whitespace().collect::<Vec<_>>());
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        succeeded(output);
        told
    };
    let tiny = TINY.join(" ").replace("--sample-length 20", "--sample-length 0");
    run("tokenize --input text.txt --output-prefix a --tokenizer byte --format nanogpt");
    let tokens = std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path());
    let tokens = tokens.filter(|file| file.extension().is_some_and(|end| end == "bin"));
    let tokens = tokens.map(|file| file.display().to_string()).collect::<String>();
    for (ids, warned) in [(1280, false), (1281, true)] {
        run(&format!("train --data {tokens} --vocab-size {ids} --save run{ids} {tiny}"));
        run(&format!("export --load run{ids} --output hf{ids}"));
        let load = format!("train --load hf{ids} --tokenizer byte --data text.txt --save new{ids}");
        let told = run(&format!("{load} --train-iters 1 --sample-length 0"));
        let line = "warning: the tokenizer has 256 token ids, and the model has 1281: is it the model's own?";
        assert_eq!(told.contains(line), warned, "{told}");
    }
    let told = run("train --load new1281 --save new1281 --train-iters 2 --sample-length 0");
    assert!(!told.contains("warning: the tokenizer"), "it was told when the run began: {told}");
    run("export --load run1280 --output wide --dtype f64");
    let wide =
        "train --load wide --tokenizer byte --data text.txt --train-iters 1 --sample-length 0";
    for (more, rounds) in [("--save f32", true), ("--save f64 --dtype f64", false)] {
        let told = run(&format!("{wide} {more}"));
        let line = "weights of 'wide' are f64 and are rounded: --dtype f64 keeps them";
        assert_eq!(told.contains(line), rounds, "{told}");
    }
    let own = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/hf/tasks/tokenizer.json");
    std::fs::copy(own, path.join("hf1281/tokenizer.json")).unwrap();
    let told = run("eval --load hf1281 --data text.txt --valid-fraction 0.1");
    assert!(!told.contains("warning: the tokenizer"), "312 and 1024 are not fewer: {told}");
}
