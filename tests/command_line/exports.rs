//! `ferrotron export`: the family that is asked for, and the files that travel along.

use super::models_and_data::refused;
use super::{ferrotron, succeeded};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hf").join(name)
}

/// A copy of a fixture as `hf`, and tokens to train on.
fn folder_with(name: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let hf = folder.path().join("hf");
    fs::create_dir(&hf).unwrap();
    for file in ["config.json", "model.safetensors"] {
        fs::copy(fixture(name).join(file), hf.join(file)).unwrap();
    }
    let tokens: Vec<u8> = (0..800_u16).flat_map(|i| (i % 32).to_le_bytes()).collect();
    fs::write(folder.path().join("text.bin"), tokens).unwrap();
    folder
}

fn export(path: &Path, load: &str, more: &[&str]) -> std::process::Output {
    ferrotron(path, &[&["export", "--load", load], more].concat())
}

#[test]
fn a_family_is_written_if_it_holds_the_model() {
    let folder = folder_with("families/smollm");
    let path = folder.path();
    let family = |output: &str| -> Value {
        let text = fs::read_to_string(path.join(output).join("config.json")).unwrap();
        serde_json::from_str::<Value>(&text).unwrap()["model_type"].clone()
    };
    succeeded(export(path, "hf", &["--output", "first"]));
    succeeded(export(path, "hf", &["--output", "mistral", "--family", "mistral"]));
    assert_eq!((family("first"), family("mistral")), ("llama".into(), "mistral".into()));
    succeeded(export(path, "mistral", &["--output", "back", "--family", "llama"]));
    let weights = |output: &str| fs::read(path.join(output).join("model.safetensors")).unwrap();
    assert!(weights("back") == weights("hf"));
    for (name, part) in [
        (
            "qwen3",
            "cannot be a Hugging Face qwen3, where it would have qk_layernorm true instead of false",
        ),
        ("gemma2", "cannot be a Hugging Face gemma2, where it would have "),
        ("bert", "cannot be a Hugging Face bert: it is a GPT"),
        (
            "mamba",
            "cannot export model_type 'mamba', which needs state-space layers: supported are gpt2, llama, ",
        ),
    ] {
        let line = refused(export(path, "hf", &["--output", "no", "--family", name]), 2);
        assert!(line.contains(part), "{line}");
        assert!(!path.join("no").exists());
    }
    let folder = folder_with("tiny-bert/bert");
    let path = folder.path();
    succeeded(export(path, "hf", &["--output", "bert", "--family", "bert"]));
    let line = refused(export(path, "hf", &["--output", "no", "--family", "llama"]), 2);
    assert!(
        line.contains("cannot be a Hugging Face llama: a BERT with its norm-placement is a bert")
    );
}

/// The files go from the folder through training, and through a run that goes on from its checkpoint.
#[test]
fn files_beside_the_weights_travel_along() {
    let folder = folder_with("families/gemma2");
    let path = folder.path();
    let files = [
        ("generation_config.json", "{\"temperature\": 0.7, \"eos_token_id\": [1, 107]}\n"),
        ("tokenizer_config.json", "{\"model_max_length\": 8192}"),
        ("special_tokens_map.json", "{}"),
        ("chat_template.jinja", "{{ bos_token }}"),
    ];
    for (name, text) in files {
        fs::write(path.join("hf").join(name), text).unwrap();
    }
    // The model itself decides this one, and no other file travels.
    fs::write(path.join("hf/README.md"), "of the model").unwrap();
    let check = |output: &str| {
        for (name, text) in files {
            assert_eq!(fs::read_to_string(path.join(output).join(name)).unwrap(), text, "{output}");
        }
        assert!(!path.join(output).join("README.md").exists());
    };
    succeeded(export(path, "hf", &["--output", "direct"]));
    check("direct");
    let train = |words: &str| {
        let words: Vec<&str> = words.split(' ').collect();
        succeeded(ferrotron(path, &words));
    };
    train(
        "train --load hf --data text.bin --vocab-size 32 --seq-length 16 --lr 1e-3 --train-iters 2 \
         --micro-batch-size 2 --sample-length 0 --threads 1 --save run",
    );
    succeeded(export(path, "run", &["--output", "trained"]));
    check("trained");
    train("train --load run --train-iters 3 --threads 1 --save more");
    succeeded(export(path, "more", &["--output", "resumed"]));
    check("resumed");

    fs::write(path.join("hf/generation_config.json"), [0xff, 0xfe]).unwrap();
    let line = refused(export(path, "hf", &["--output", "no"]), 1);
    assert!(line.contains("generation_config.json' cannot be read"), "{line}");
}
