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
pub fn write_long_words(file: &Path, bytes: usize, documents: usize) {
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
pub fn written(folder: &Path) -> Vec<(String, Vec<u8>)> {
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
