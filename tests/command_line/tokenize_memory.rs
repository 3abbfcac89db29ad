//! The largest resident memory of `ferrotron tokenize`, whatever it reads.

use super::models_and_data::refused;
use super::tokenize::{write_long_words, written};
use super::{ferrotron, succeeded};
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// The largest resident memory of a call in bytes, as Linux counts it.
fn peak(folder: &Path, words: &str) -> u64 {
    let words = format!("tokenize --output-prefix out {words}");
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrotron"));
    command.current_dir(folder).args(words.split(' ')).stdout(Stdio::null());
    let mut child = command.stderr(Stdio::null()).spawn().unwrap();
    let status = format!("/proc/{}/status", child.id());
    let mut peak = 0;
    while child.try_wait().unwrap().is_none() {
        let text = std::fs::read_to_string(&status).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kilobytes = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
        peak = peak.max(kilobytes.unwrap_or(0) << 10);
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(child.wait().unwrap().success(), "{words}");
    for entry in std::fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        if entry.file_name().to_string_lossy().starts_with("out_") {
            std::fs::remove_file(entry.path()).unwrap();
        }
    }
    peak
}

#[test]
fn memory_does_not_grow_with_the_input_or_its_documents() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let text = "It was the best of times, it was the worst of times. ".repeat(550_000);
    // Four documents of 29 MB, and one text of 58 MB in one line.
    let line = format!("{}\n", serde_json::json!({ "text": text }));
    std::fs::write(path.join("large.jsonl"), line.repeat(4)).unwrap();
    std::fs::write(path.join("line.txt"), text.repeat(2)).unwrap();
    // 145 MB, which fill the largest window.
    let mut encoder = zstd::Encoder::new(Vec::new(), 1).unwrap();
    encoder.window_log(27).unwrap();
    (0..5).for_each(|_| encoder.write_all(line.as_bytes()).unwrap());
    std::fs::write(path.join("window.jsonl.zst"), encoder.finish().unwrap()).unwrap();
    // Two words of 6 MB, and one of 29 MB that is soon encoded.
    write_long_words(&path.join("words.jsonl"), 6_000_000, 2);
    let word = serde_json::json!({ "text": " ".repeat(29_000_000) });
    std::fs::write(path.join("word.jsonl"), word.to_string()).unwrap();
    // A line of 29 MB with little text, beside a list of numbers or of small objects.
    for (name, part) in [("numbers", "7,"), ("objects", "{\"a\":1},")] {
        let list = part.repeat(29_000_000 / part.len());
        let line = format!("{{\"ids\": [{}], \"text\": \"a\"}}", list.trim_end_matches(','));
        std::fs::write(path.join(format!("{name}.jsonl")), line).unwrap();
    }
    let half = &text[..14_500_000];
    let pair = serde_json::json!({ "prompt": half, "completion": half });
    std::fs::write(path.join("pair.jsonl"), pair.to_string()).unwrap();
    for (words, most) in [
        ("--input line.txt --workers 2", 90),
        ("--input words.jsonl --workers 2", 110),
        ("--input word.jsonl --workers 2", 140),
        ("--input large.jsonl --workers 4", 200),
        ("--input window.jsonl.zst --workers 2", 300),
        ("--input large.jsonl --workers 4 --tokenizer byte", 200),
        ("--input line.txt --workers 2 --tokenizer byte", 60),
        ("--input numbers.jsonl --workers 2", 90),
        ("--input objects.jsonl --workers 2", 90),
        ("--input pair.jsonl --workers 2 --prompt-completion", 140),
    ] {
        let megabytes = peak(path, words) / 1_000_000;
        assert!((5..most).contains(&megabytes), "{words}: {megabytes} MB");
    }
}

/// Tokenizers whose crate encodes a stretch as a whole, with stretches that are as long as they may be.
#[test]
fn memory_of_other_tokenizers_is_bounded_too() {
    use serde_json::json;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let letters: Vec<String> = ('a'..='z').map(String::from).collect();
    let merged: Vec<String> =
        letters.iter().zip(&letters[1..]).map(|(a, b)| format!("{a}{b}")).collect();
    let words = |first: &[&str]| -> Vec<String> {
        first
            .iter()
            .map(|word| word.to_string())
            .chain(letters.clone())
            .chain(merged.clone())
            .collect()
    };
    let scores: Vec<_> =
        words(&["<unk>", "\u{2581}"]).into_iter().map(|word| json!([word, -2.0])).collect();
    let ids = |words: Vec<String>| -> serde_json::Map<String, serde_json::Value> {
        words.into_iter().enumerate().map(|(id, word)| (word, id.into())).collect()
    };
    let file = |model: serde_json::Value, pre_tokenizer: serde_json::Value| {
        json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
            "pre_tokenizer": pre_tokenizer, "post_processor": null, "decoder": null, "model": model
        })
    };
    let unigrams =
        json!({ "type": "Unigram", "unk_id": 0, "vocab": scores, "byte_fallback": false });
    let word_pieces = json!({
        "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100, "vocab": ids(words(&["[UNK]", ".", "!"]))
    });
    let word_pieces = file(word_pieces, json!({ "type": "BertPreTokenizer" }));
    let metaspace = json!({ "type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always", "split": true });
    // Words of two letters between marks, which are cut by no pattern that is known.
    let by_marks = json!({ "type": "Split", "pattern": { "Regex": "[.!]" }, "behavior": "Isolated", "invert": false });
    let unigrams_by_marks = file(unigrams.clone(), by_marks);
    let bytes = 128 << 10;
    for (name, part) in [("marks", "ab.bc!"), ("signs", "a\u{2192}"), ("quotes", "\u{ab}")] {
        let line = json!({ "text": part.repeat(bytes / part.len()) });
        std::fs::write(path.join(format!("{name}.jsonl")), format!("{line}\n").repeat(12)).unwrap();
    }
    write_long_words(&path.join("word.jsonl"), bytes, 12);
    write_long_words(&path.join("longer.jsonl"), bytes + 1, 12);
    for (name, tokenizer, inputs) in [
        ("unigrams.json", file(unigrams, metaspace), &["word", "marks"][..]),
        ("word-pieces.json", word_pieces, &["marks", "signs", "quotes"]),
        ("unigrams-by-marks.json", unigrams_by_marks, &["word", "marks", "signs"]),
    ] {
        std::fs::write(path.join(name), tokenizer.to_string()).unwrap();
        for input in inputs {
            let words = format!("--input {input}.jsonl --workers 8 --tokenizer {name}");
            let megabytes = peak(path, &words) / 1_000_000;
            println!("{words}: {megabytes} MB");
            assert!((5..200).contains(&megabytes), "{words}: {megabytes} MB");
        }
    }
    let longer = ["tokenize", "--input", "longer.jsonl", "--output-prefix", "out", "--tokenizer"];
    let line = refused(ferrotron(path, &[&longer[..], &["unigrams.json"]].concat()), 1);
    let want = "'longer.jsonl', line 1: 131073 bytes without a place at which this tokenizer cuts";
    assert!(line.contains(want) && line.contains("--skip-broken-lines"), "{line}");
}

/// A folder of very many files has the memory and the documents of one file.
#[test]
fn many_small_files_are_like_one() {
    const FILES: usize = 20_000;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let line = |i: usize| format!("{{\"text\": \"Document {i} of a folder.\"}}\n");
    std::fs::create_dir(path.join("in")).unwrap();
    for i in 0..FILES {
        std::fs::write(path.join(format!("in/a-file-with-a-long-name-{i:06}.jsonl")), line(i))
            .unwrap();
    }
    std::fs::write(path.join("one.jsonl"), (0..FILES).map(line).collect::<String>()).unwrap();
    let tokenize = |input: &str| {
        succeeded(ferrotron(path, &["tokenize", "--input", input, "--output-prefix", "out"]));
        let files = written(path);
        files.iter().for_each(|(name, _)| std::fs::remove_file(path.join(name)).unwrap());
        files
    };
    let (many, one) = (tokenize("in"), tokenize("one.jsonl"));
    assert!(many[..2] == one[..2]);
    let fingerprint: serde_json::Value = serde_json::from_slice(&many[2].1).unwrap();
    let sources = fingerprint["sources"].as_array().unwrap();
    let last = serde_json::json!({ "path": "in/a-file-with-a-long-name-019999.jsonl", "bytes": line(FILES - 1).len() });
    assert_eq!((sources.len(), &sources[FILES - 1]), (FILES, &last));
    let [many, one] =
        ["in", "one.jsonl"].map(|input| peak(path, &format!("--input {input} --workers 2")));
    println!("{FILES} files: {} MB, one file: {} MB", many / 1_000_000, one / 1_000_000);
    // Some 400 bytes for each file, and the noise of two calls.
    assert!(many < one + 20_000_000, "{many} {one}");
}
