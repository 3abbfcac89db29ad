//! `ferrotron export`: the family that is asked for.

use super::models_and_data::refused;
use super::{ferrotron, succeeded};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hf").join(name)
}

/// A copy of a fixture as `hf`.
fn folder_with(name: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let hf = folder.path().join("hf");
    fs::create_dir(&hf).unwrap();
    for file in ["config.json", "model.safetensors"] {
        fs::copy(fixture(name).join(file), hf.join(file)).unwrap();
    }
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
        ("mamba", "describes model_type 'mamba': supported are gpt2, llama, mistral, "),
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

