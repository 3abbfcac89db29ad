//! Whole calls: what they write, refuse and verify.

mod inputs;
mod limits;
mod parquet_codecs;
mod resume;

use super::*;
use crate::IndexedDataset;
use crate::tokenizer::Tokenizer;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// A config that reads `input` of `folder` and writes `folder/out`.
fn config(folder: &Path, input: &str) -> PreprocessConfig {
    let journal_interval = Duration::ZERO;
    let config = PreprocessConfig::new(vec![folder.join(input)], folder.join("out"));
    PreprocessConfig { workers: 2, journal_interval, ..config }
}

fn run(
    config: &PreprocessConfig,
    tokenizer: &Tokenizer,
) -> ferrotron_tensor::Result<PreprocessReport> {
    let report = preprocess(config, tokenizer, &AtomicBool::new(false), &mut |_| {})?;
    Ok(report.expect("nobody stops it"))
}

fn refused(config: &PreprocessConfig, tokenizer: &Tokenizer) -> String {
    run(config, tokenizer).unwrap_err().to_string()
}

/// The documents of a set as text, each a list of its sequences.
fn documents(prefix: &Path, tokenizer: &Tokenizer) -> Vec<Vec<String>> {
    let dataset = IndexedDataset::open(prefix).unwrap();
    dataset.check().unwrap();
    let text = |sequence| tokenizer.decode(&dataset.sequence(sequence).unwrap());
    (0..dataset.num_documents())
        .map(|document| dataset.document(document).unwrap().map(text).collect())
        .collect()
}

/// The names and bytes of the files of a folder that begin with `out`, and nothing that is left over.
fn written(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let (name, path) = (entry.as_ref().unwrap().file_name(), entry.unwrap().path());
        let name = name.to_string_lossy().into_owned();
        if name.starts_with("out") {
            assert!(!name.contains(".part") && !name.contains("journal"), "{name} is left over");
            files.push((name, std::fs::read(path).unwrap()));
        }
    }
    files.sort();
    files
}

fn remove_written(folder: &Path) {
    for (name, _) in written(folder) {
        std::fs::remove_file(folder.join(name)).unwrap();
    }
}

#[test]
fn lines_become_documents() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let lines = "\u{feff}{\"text\": \"One.\\nTwo\", \"id\": 3}\r\n\n{\"text\": \"\"}\n{\"id\": 4, \"text\": \"caf\\u00e9\"}";
    std::fs::write(path.join("a.jsonl"), lines).unwrap();
    let report = run(&config(path, "a.jsonl"), &Tokenizer::Gpt2).unwrap();
    let prefix = path.join("out_text_document");
    assert_eq!((&report.outputs[0].0, report.outputs[0].1), (&prefix, 3));
    // The empty document has no sequence.
    let want = [vec!["One.\nTwo"], vec![], vec!["caf\u{e9}"]];
    assert_eq!(documents(&prefix, &Tokenizer::Gpt2), want);

    // The same by the builder.
    let plain = written(path);
    let mut builder =
        crate::IndexedDatasetBuilder::new(&path.join("want"), crate::TokenType::U16).unwrap();
    for texts in want {
        for text in texts {
            builder.add_sequence(&Tokenizer::Gpt2.encode(text).unwrap()).unwrap();
        }
        builder.end_document().unwrap();
    }
    builder.finish().unwrap();
    for (number, extension) in [(0, "bin"), (2, "idx")] {
        let want = std::fs::read(path.join(format!("want.{extension}"))).unwrap();
        assert_eq!(plain[number].1, want, "{}", plain[number].0);
    }
    remove_written(path);

    let with_end = PreprocessConfig { append_eod: true, ..config(path, "a.jsonl") };
    run(&with_end, &Tokenizer::Gpt2).unwrap();
    let end = "<|endoftext|>";
    let want = [vec![format!("One.\nTwo{end}")], vec![], vec![format!("caf\u{e9}{end}")]];
    assert_eq!(documents(&prefix, &Tokenizer::Gpt2), want);
}

#[test]
fn each_key_has_files_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    std::fs::write(path.join("a.jsonl"), r#"{"q": "Why?", "a": "So. There."}"#).unwrap();
    let json_keys = vec!["q".to_string(), "a".to_string()];
    let both = PreprocessConfig {
        json_keys,
        sequence_level: SequenceLevel::Sentence,
        ..config(path, "a.jsonl")
    };
    run(&both, &Tokenizer::Byte).unwrap();
    let found = |key| documents(&path.join(format!("out_{key}_sentence")), &Tokenizer::Byte);
    assert_eq!(found("q"), [["Why?"]]);
    assert_eq!(found("a"), [["So.", "There."]]);
}

#[test]
fn sentences_become_sequences() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    std::fs::write(path.join("a.txt"), "\n\nOne. Two!\nThree\n\n\nFour.\n").unwrap();
    let split =
        PreprocessConfig { sequence_level: SequenceLevel::Sentence, ..config(path, "a.txt") };
    run(&split, &Tokenizer::Byte).unwrap();
    let prefix = path.join("out_text_sentence");
    let want = [vec!["One.", "Two!", "Three"], vec!["Four."]];
    assert_eq!(documents(&prefix, &Tokenizer::Byte), want);
    remove_written(path);
    let with_end = PreprocessConfig { append_eod: true, ..split };
    run(&with_end, &Tokenizer::Gpt2).unwrap();
    let found = documents(&prefix, &Tokenizer::Gpt2);
    assert_eq!(found[0], ["One.", "Two!", "Three<|endoftext|>"]);
    assert_eq!(found[1], ["Four.<|endoftext|>"]);
}

#[test]
fn files_and_options_that_do_not_fit_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    std::fs::write(path.join("a.jsonl"), "{\"text\": \"a\"}\n").unwrap();
    let plain = config(path, "a.jsonl");
    let keys = |keys: &[&str]| keys.iter().map(|key| key.to_string()).collect();
    for (config, words) in [
        (
            PreprocessConfig { append_eod: true, ..plain.clone() },
            "--append-eod: the tokenizer byte has no",
        ),
        (PreprocessConfig { workers: 0, ..plain.clone() }, "--workers: must be positive"),
        (PreprocessConfig { json_keys: keys(&["a", "a"]), ..plain.clone() }, "'a' is named twice"),
        (
            PreprocessConfig { json_keys: keys(&["a/b"]), ..plain.clone() },
            "cannot be part of a file",
        ),
        (PreprocessConfig { shard_tokens: 0, ..plain.clone() }, "--shard-size: 0 tokens"),
        (
            PreprocessConfig { output_prefix: path.join("no/out"), ..plain.clone() },
            "--output-prefix: there is no folder",
        ),
        (config(path, "b.jsonl"), "b.jsonl': No such file"),
        (
            PreprocessConfig { inputs: vec![path.join("a.jsonl"); 2], ..plain.clone() },
            "a.jsonl' is named twice",
        ),
    ] {
        let line = refused(&config, &Tokenizer::Byte);
        assert!(line.contains(words), "{line}");
    }
    run(&plain, &Tokenizer::Byte).unwrap();
    let before = written(path);
    let line = refused(&plain, &Tokenizer::Byte);
    assert!(line.contains("out_text_document.bin' exists: give another prefix"), "{line}");
    assert_eq!(written(path), before);
}

#[test]
fn verification_finds_what_was_changed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    std::fs::write(path.join("a.jsonl"), "{\"text\": \"abc\"}\n{\"text\": \"de\"}\n").unwrap();
    run(&config(path, "a.jsonl"), &Tokenizer::Byte).unwrap();
    let prefix = path.join("out_text_document");
    let stop = AtomicBool::new(false);
    let right = verify(&prefix, &stop).unwrap().unwrap();
    assert_eq!((right.documents, right.tokens, right.has_fingerprint), (2, 5, true));
    let files = written(path);
    // Every byte of both files, each by itself.
    for (name, bytes) in files.iter().filter(|(name, _)| !name.ends_with(".json")) {
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 1;
            std::fs::write(path.join(name), changed).unwrap();
            verify(&prefix, &stop).expect_err(&format!("byte {at} of {name} was changed"));
        }
        std::fs::write(path.join(name), &bytes[..bytes.len() - 1]).unwrap();
        verify(&prefix, &stop).unwrap_err();
        std::fs::write(path.join(name), bytes).unwrap();
    }
    std::fs::write(path.join("out_text_document.fingerprint.json"), "{}").unwrap();
    let line = verify(&prefix, &stop).unwrap_err().to_string();
    assert!(line.contains("is no fingerprint"), "{line}");
    std::fs::remove_file(path.join("out_text_document.fingerprint.json")).unwrap();
    let index_alone = verify(&path.join("out_text_document.idx"), &stop).unwrap().unwrap();
    assert!(!index_alone.has_fingerprint && index_alone.tokens == 5);
    std::fs::remove_file(path.join("out_text_document.idx")).unwrap();
    let line = verify(&prefix, &stop).unwrap_err().to_string();
    assert!(line.contains("--verify: cannot read"), "{line}");
}
