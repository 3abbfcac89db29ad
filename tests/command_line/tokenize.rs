//! `ferrotron tokenize`: from a folder of documents to a trained model, through kills, signals and mistakes.

use super::models_and_data::refused;
use super::{TINY, ferrotron, succeeded};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

/// Writes a folder `in` with about so many megabytes of JSON lines.
fn write_documents(folder: &Path, megabytes: usize) {
    std::fs::create_dir(folder.join("in")).unwrap();
    let text = |i: usize| {
        let sentence = |j: usize| format!("Sentence {} has {} words. ", i * 31 + j, j * 7919 % 101);
        (0..i * 7919 % 83).map(sentence).collect::<String>()
    };
    let lines: String =
        (0..900).map(|i| format!("{}\n", serde_json::json!({ "text": text(i) }))).collect();
    for file in 0..2 {
        let repeated = lines.repeat(megabytes * 500_000 / lines.len() + 1);
        std::fs::write(folder.join(format!("in/{file}.jsonl")), repeated).unwrap();
    }
}

/// Writes documents of so many bytes without a blank or a punctuation mark.
fn write_long_words(file: &Path, bytes: usize, documents: usize) {
    let letter = |i: usize| char::from(b'a' + (i * i % 8191 * 7919 % 26) as u8);
    let line = |document: usize| {
        let word: String = (0..bytes).map(|i| letter(i + document * 31)).collect();
        format!("{}\n", serde_json::json!({ "text": word }))
    };
    std::fs::write(file, (0..documents).map(line).collect::<String>()).unwrap();
}

fn start(folder: &Path) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrotron"));
    command.current_dir(folder).args(["tokenize", "--input", "in", "--output-prefix", "out"]);
    command.args(["--append-eod"]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

/// The files that were written, by name.
fn written(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let names = [".bin", ".idx", ".fingerprint.json"].map(|end| format!("out_text_document{end}"));
    names.map(|name| (name.clone(), std::fs::read(folder.join(name)).unwrap())).to_vec()
}

#[test]
fn documents_become_a_data_set_that_trains() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    write_documents(path, 1);
    let tokenize = ["tokenize", "--input", "in", "--output-prefix", "out", "--append-eod"];
    let line = succeeded(ferrotron(path, &tokenize));
    assert!(line.starts_with("out_text_document: ") && line.contains(" documents, "), "{line}");
    let verified = succeeded(ferrotron(path, &["tokenize", "--verify", "out_text_document"]));
    assert!(verified.contains("as in the fingerprint"), "{verified}");
    let data = ["train", "--data", "out_text_document", "--tokenizer", "gpt2", "--save", "run"];
    succeeded(ferrotron(path, &[&data[..], TINY].concat()));

    let line = refused(ferrotron(path, &tokenize), 2);
    assert!(line.contains("--output-prefix: 'out_text_document.bin' exists"), "{line}");
    let mut tokens = std::fs::read(path.join("out_text_document.bin")).unwrap();
    tokens[1000] ^= 1;
    std::fs::write(path.join("out_text_document.bin"), tokens).unwrap();
    let line = refused(ferrotron(path, &["tokenize", "--verify", "out_text_document"]), 1);
    assert!(line.contains("out_text_document.bin': SHA-256"), "{line}");
}

#[test]
fn shards_of_other_programs_train_too() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    write_documents(path, 1);
    let mut losses = Vec::new();
    for (format, data) in [
        ("nanogpt", &["nanogpt_text_document.bin"][..]),
        ("llmc", &["llmc_text_document_000000.bin", "llmc_text_document_000001.bin"]),
    ] {
        let more = ["--format", format, "--output-prefix", format, "--shard-size", "200000"];
        let tokenize = [&["tokenize", "--append-eod", "--input", "in"], &more[..]].concat();
        succeeded(ferrotron(path, &tokenize));
        succeeded(ferrotron(path, &["tokenize", "--verify", &format!("{format}_text_document")]));
        let train = [&["train", "--tokenizer", "gpt2", "--save", format, "--data"], data].concat();
        succeeded(ferrotron(path, &[&train[..], TINY].concat()));
        losses.push(super::losses(path.join(format).join("metrics.jsonl")));
    }
    assert_eq!(losses[0].len(), 20);
}

#[test]
fn a_killed_call_resumes_with_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    write_documents(path, 24);
    write_long_words(&path.join("in/long.jsonl"), 150_000, 24);
    let started = Instant::now();
    assert!(start(path).wait().unwrap().success());
    let whole = started.elapsed();
    let want = written(path);
    want.iter().for_each(|(name, _)| std::fs::remove_file(path.join(name)).unwrap());
    let (mut resumed, mut kills) = (0, 0);
    // Moments that look random, as shares of the time of the whole, which depends on machine and load.
    for moment in [0.15, 0.55, 0.02, 0.75, 0.6, 0.35, 0.9] {
        let mut child = start(path);
        std::thread::sleep(whole.mul_f64(moment));
        if child.try_wait().unwrap().is_some() {
            break;
        }
        child.kill().unwrap();
        child.wait().unwrap();
        kills += 1;
        if let Ok(journal) = std::fs::read(path.join("out.journal.json")) {
            let journal: serde_json::Value = serde_json::from_slice(&journal).unwrap();
            resumed += (journal["read"].as_u64() > Some(0)) as usize;
        }
    }
    if !path.join("out_text_document.fingerprint.json").exists() {
        assert!(start(path).wait().unwrap().success());
    }
    assert!(written(path) == want, "{kills} kills, {resumed} with something to resume");
    assert!(kills > 0 && !path.join("out.journal.json").exists());
}

#[test]
fn a_signal_keeps_the_journal() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    write_documents(path, 24);
    for signal in ["TERM", "INT"] {
        let (started, before) = (Instant::now(), SystemTime::now());
        let mut child = start(path);
        let journal = || std::fs::metadata(path.join("out.journal.json"))?.modified();
        while !journal().is_ok_and(|written| written > before) {
            assert!(started.elapsed() < Duration::from_secs(60), "no journal");
            std::thread::sleep(Duration::from_millis(10));
        }
        let process = child.id().to_string();
        assert!(
            Command::new("kill")
                .args([&format!("-{signal}"), &process])
                .status()
                .unwrap()
                .success()
        );
        let asked = Instant::now();
        let status = child.wait().unwrap();
        assert!(asked.elapsed() < Duration::from_secs(30), "{:?}", asked.elapsed());
        assert_eq!(status.code(), Some(130));
        assert!(path.join("out.journal.json").exists());
    }
    assert!(start(path).wait().unwrap().success());
    succeeded(ferrotron(path, &["tokenize", "--verify", "out_text_document"]));
}

/// The largest resident memory of a call in bytes, as Linux counts it.
#[cfg(target_os = "linux")]
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
    for (name, _) in written(folder) {
        std::fs::remove_file(folder.join(name)).unwrap();
    }
    peak
}

#[cfg(target_os = "linux")]
#[test]
fn memory_does_not_grow_with_the_input_or_its_documents() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let text = "It was the best of times, it was the worst of times. ".repeat(550_000);
    // Four documents of 29 MB, and one text of 58 MB in one line.
    let line = format!("{}\n", serde_json::json!({ "text": text }));
    std::fs::write(path.join("large.jsonl"), line.repeat(4)).unwrap();
    std::fs::write(path.join("line.txt"), text.repeat(2)).unwrap();
    // Two words of 6 MB, and one of 29 MB that is soon encoded.
    write_long_words(&path.join("words.jsonl"), 6_000_000, 2);
    let word = serde_json::json!({ "text": " ".repeat(29_000_000) });
    std::fs::write(path.join("word.jsonl"), word.to_string()).unwrap();
    for (words, most) in [
        ("--input line.txt --workers 2", 90),
        ("--input words.jsonl --workers 2", 110),
        ("--input word.jsonl --workers 2", 140),
        ("--input large.jsonl --workers 4", 200),
        ("--input large.jsonl --workers 4 --tokenizer byte", 200),
        ("--input line.txt --workers 2 --tokenizer byte", 60),
    ] {
        let megabytes = peak(path, words) / 1_000_000;
        assert!((5..most).contains(&megabytes), "{words}: {megabytes} MB");
    }
}

/// The bounds that docs/data.md states for tokenizers whose crate encodes a stretch as a whole, in bytes for each of its bytes.
#[cfg(target_os = "linux")]
#[test]
fn memory_of_other_tokenizers_is_bounded_by_the_longest_word() {
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
    let bytes = 1 << 20;
    for (name, part) in [("marks", "a.b!"), ("signs", "a\u{2192}")] {
        let line = json!({ "text": part.repeat(bytes / 4) });
        std::fs::write(path.join(format!("{name}.jsonl")), line.to_string()).unwrap();
    }
    write_long_words(&path.join("word.jsonl"), bytes, 1);
    std::fs::write(path.join("small.jsonl"), "{\"text\": \"a\"}").unwrap();
    for (name, tokenizer, input, most) in [
        ("unigrams.json", file(unigrams, metaspace), "word.jsonl", 150),
        ("word-pieces.json", word_pieces.clone(), "marks.jsonl", 20),
        ("word-pieces.json", word_pieces, "signs.jsonl", 45),
    ] {
        std::fs::write(path.join(name), tokenizer.to_string()).unwrap();
        let peak =
            |input: &str| peak(path, &format!("--input {input} --workers 1 --tokenizer {name}"));
        let (small, large) = (peak("small.jsonl"), peak(input));
        let added = (large.saturating_sub(small)) / bytes as u64;
        assert!(added <= most, "{name}, {input}: {added} bytes for each byte");
    }
}

#[test]
fn mistakes_are_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    std::fs::write(path.join("a.jsonl"), "{\"text\": \"a\"}\n{\"text\": \"b\n").unwrap();
    let input = ["--input", "a.jsonl", "--output-prefix", "out"];
    let rows: [(&[&str], i32, &str); 7] = [
        (&[], 1, "'a.jsonl', line 2: no JSON object: "),
        (&["--tokenizer", "char"], 2, "--tokenizer: char is built of a training text: take byte"),
        (&["--tokenizer", "none.json"], 2, "'none.json' is neither byte"),
        (&["--tokenizer", "byte", "--append-eod"], 2, "--append-eod: the tokenizer byte has no"),
        (&["--workers", "0"], 2, "--workers: must be positive"),
        (&["--json-keys", "a", "a"], 2, "--json-keys: 'a' is named twice"),
        (&["--format", "llmc", "--shard-size", "0", "--append-eod"], 2, "--shard-size: 0 tokens"),
    ];
    for (arguments, code, words) in rows {
        let line = refused(ferrotron(path, &[&["tokenize"], &input[..], arguments].concat()), code);
        assert!(line.contains(words), "{arguments:?}: {line}");
        let _ = std::fs::remove_file(path.join("out.journal.json"));
    }
    let out = ferrotron(path, &[&["tokenize", "--skip-broken-lines"], &input[..]].concat());
    assert!(String::from_utf8_lossy(&out.stderr).contains("warning: skipped 1 broken lines"));
    assert!(succeeded(out).contains("out_text_document: 1 documents, 1 tokens"));
    let line = refused(ferrotron(path, &["tokenize", "--input", "a.jsonl"]), 2);
    assert!(line.contains("--output-prefix: name the files"), "{line}");
    let line = refused(ferrotron(path, &["tokenize", "--output-prefix", "a"]), 2);
    assert!(line.contains("--input: name the files or folders"), "{line}");
    let line = refused(ferrotron(path, &["tokenize", "--verify", "nothing"]), 1);
    assert!(line.contains("--verify: cannot read 'nothing.fingerprint.json'"), "{line}");
}
