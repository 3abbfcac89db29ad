//! More files than a process may have open: data and the shards of a Hugging Face model.

use super::{TINY, ferrotron, folder_with_text, succeeded, train};
use serde_json::{Map, Value, json};
use std::path::Path;
use std::process::{Command, Output};

/// Runs the program where a process may have 64 files open.
fn limited(folder: &Path, arguments: &[&str]) -> Output {
    let mut shell = Command::new("sh");
    shell.current_dir(folder).args(["-c", "ulimit -n 64; exec \"$0\" \"$@\""]);
    shell.arg(env!("CARGO_BIN_EXE_ferrotron")).args(arguments).output().unwrap()
}

#[test]
fn two_thousand_data_files_train() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    std::fs::create_dir(path.join("data")).unwrap();
    for i in 0..2000 {
        let name = path.join(format!("data/{i:04}.txt"));
        std::fs::write(name, format!("file {i} of many.\n")).unwrap();
    }
    let arguments = [&["train", "--data", "data", "--save", "run"], TINY].concat();
    succeeded(limited(path, &arguments));
    assert!(path.join("run/iter_0000020").exists());
}

/// Cuts `model.safetensors` of `folder` into a file for each tensor, with the index that Hugging Face writes.
fn shard(folder: &Path) -> usize {
    let whole = folder.join("model.safetensors");
    let bytes = std::fs::read(&whole).unwrap();
    let end = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Map<String, Value> = serde_json::from_slice(&bytes[8..end]).unwrap();
    let mut map = Map::new();
    for (number, (name, record)) in
        header.iter().filter(|(name, _)| *name != "__metadata__").enumerate()
    {
        let [from, to] = [0, 1].map(|i| record["data_offsets"][i].as_u64().unwrap() as usize);
        let mut record = record.clone();
        record["data_offsets"] = json!([0, to - from]);
        let text = json!({ name: record }).to_string();
        let mut file = (text.len() as u64).to_le_bytes().to_vec();
        file.extend(text.as_bytes());
        file.extend(&bytes[end + from..end + to]);
        let shard = format!("model-{number:05}.safetensors");
        std::fs::write(folder.join(&shard), file).unwrap();
        map.insert(name.clone(), shard.into());
    }
    let count = map.len();
    let index = json!({ "metadata": {}, "weight_map": map });
    std::fs::write(folder.join("model.safetensors.index.json"), index.to_string()).unwrap();
    std::fs::remove_file(whole).unwrap();
    count
}

#[test]
fn a_hugging_face_model_of_a_hundred_files_is_read() {
    let folder = folder_with_text();
    let path = folder.path();
    succeeded(train(path, &["--save", "run", "--num-layers", "8", "--train-iters", "1"]));
    succeeded(ferrotron(path, &["export", "--load", "run", "--output", "hf"]));
    let tokenizer = path.join("run/iter_0000001/tokenizer.json");
    std::fs::copy(tokenizer, path.join("hf/tokenizer.json")).unwrap();
    let eval = ["eval", "--load", "hf", "--data", "text.txt", "--threads", "1"];
    let whole = succeeded(limited(path, &eval));
    assert!(shard(&path.join("hf")) > 90);
    assert_eq!(succeeded(limited(path, &eval)), whole);
}
