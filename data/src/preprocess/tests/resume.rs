//! Calls that are stopped and resumed, and what must not change the bytes.

use super::*;
use crate::indexed_dataset::with_suffix;
use std::io::Write;
use std::sync::atomic::Ordering::Relaxed;

/// About 3 MB in several files: documents, a text, an empty line here and there.
fn write_inputs(folder: &Path) {
    std::fs::create_dir(folder.join("in")).unwrap();
    let text = |i: usize| "A sentence. Another one! ".repeat(i * 7919 % 151);
    let lines: String =
        (0..600).map(|i| format!("{}\n", serde_json::json!({ "text": text(i) }))).collect();
    std::fs::write(folder.join("in/a.jsonl"), &lines).unwrap();
    std::fs::write(folder.join("in/b.txt"), text(53).repeat(400) + "\n\n" + &text(3)).unwrap();
    std::fs::write(folder.join("in/c.jsonl"), &lines).unwrap();
}

/// Stops a call behind batch `stop_at`, writes rubbish behind what the journal knows, and resumes it; again and again.
fn interrupt(config: &PreprocessConfig, tokenizer: &Tokenizer, stop_at: usize) -> usize {
    let mut calls = 0;
    loop {
        calls += 1;
        let (stop, mut batches) = (AtomicBool::new(false), 0);
        let report = preprocess(config, tokenizer, &stop, &mut |_| {
            batches += 1;
            stop.store(batches == stop_at, Relaxed);
        });
        if report.unwrap().is_some() {
            return calls;
        }
        let prefix = super::super::output::prefix(config, "text");
        for part in [".bin.part", ".idx.part", ".boundaries.part"] {
            if let Ok(mut file) =
                std::fs::File::options().append(true).open(with_suffix(&prefix, part))
            {
                file.write_all(b"rubbish").unwrap();
            }
        }
    }
}

#[test]
fn a_resumed_call_writes_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    write_inputs(path);
    for (format, sequence_level) in [
        (TokenFormat::Megatron, SequenceLevel::Document),
        (TokenFormat::Megatron, SequenceLevel::Sentence),
        (TokenFormat::NanoGpt, SequenceLevel::Document),
        (TokenFormat::LlmC, SequenceLevel::Document),
    ] {
        let shard_tokens = 300_001;
        let config =
            PreprocessConfig { format, sequence_level, shard_tokens, ..config(path, "in") };
        run(&PreprocessConfig { workers: 1, ..config.clone() }, &Tokenizer::Byte).unwrap();
        let want = written(path);
        remove_written(path);
        for (stop_at, workers) in [(1, 1), (2, 3), (5, 2), (1000, 7)] {
            let config = PreprocessConfig { workers, ..config.clone() };
            let calls = interrupt(&config, &Tokenizer::Byte, stop_at);
            assert_eq!(calls > 1, stop_at < 1000, "{calls} calls");
            let found = written(path);
            assert!(found == want, "{format:?}, stopped every {stop_at} batches");
            remove_written(path);
        }
    }
}

#[test]
fn long_words_have_the_same_bytes_in_a_resumed_call() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let letter = |i: usize| char::from(b'a' + (i * i % 8191 * 7919 % 26) as u8);
    let word = |from: usize| (from..from + 150_000).map(letter).collect::<String>();
    let texts = [word(0), format!("{} ends. {}", word(7), word(31)), "\u{4e2d}".repeat(70_000)];
    let lines = texts.map(|text| format!("{}\n", serde_json::json!({ "text": text })));
    std::fs::write(path.join("a.jsonl"), lines.concat().repeat(2)).unwrap();
    let config = config(path, "a.jsonl");
    run(&PreprocessConfig { workers: 1, ..config.clone() }, &Tokenizer::Gpt2).unwrap();
    let want = written(path);
    remove_written(path);
    for workers in [1, 3] {
        let config = PreprocessConfig { workers, ..config.clone() };
        assert!(interrupt(&config, &Tokenizer::Gpt2, 1) > 2);
        assert!(written(path) == want, "{workers} workers");
        remove_written(path);
    }
}

#[test]
fn a_call_that_was_killed_while_it_named_its_files_resumes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    write_inputs(path);
    for format in [TokenFormat::Megatron, TokenFormat::NanoGpt, TokenFormat::LlmC] {
        let config = PreprocessConfig { format, ..config(path, "in") };
        run(&config, &Tokenizer::Byte).unwrap();
        let want = written(path);
        remove_written(path);
        let (stop, mut batches) = (AtomicBool::new(false), 0);
        // All batches are written, and the next look at the flag ends the call.
        let total: u64 = ["in/a.jsonl", "in/b.txt", "in/c.jsonl"]
            .iter()
            .map(|file| std::fs::metadata(path.join(file)).unwrap().len())
            .sum();
        let stopped = preprocess(&config, &Tokenizer::Byte, &stop, &mut |now| {
            batches += 1;
            stop.store(now.bytes == total, Relaxed);
        });
        assert!(stopped.unwrap().is_none() && batches > 5);
        let prefix = path.join("out_text_document");
        let last = if format == TokenFormat::LlmC { "_000000.bin" } else { ".bin" };
        std::fs::rename(with_suffix(&prefix, ".bin.part"), with_suffix(&prefix, last)).unwrap();
        run(&config, &Tokenizer::Byte).unwrap();
        assert!(written(path) == want, "{format:?}");
        remove_written(path);
    }
}

#[test]
fn a_journal_of_another_call_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    write_inputs(path);
    let config = config(path, "in");
    let stop = AtomicBool::new(false);
    let stopped = preprocess(&config, &Tokenizer::Byte, &stop, &mut |_| stop.store(true, Relaxed));
    assert!(stopped.unwrap().is_none());
    let line = refused(&config, &Tokenizer::Gpt2);
    assert!(line.contains("interrupted call with other tokenizer: give the same"), "{line}");
    let other = PreprocessConfig { sequence_level: SequenceLevel::Sentence, ..config.clone() };
    assert!(refused(&other, &Tokenizer::Byte).contains("with other options"));
    std::fs::write(path.join("in/d.txt"), "more").unwrap();
    assert!(refused(&config, &Tokenizer::Byte).contains("with other sources"));
    std::fs::remove_file(path.join("in/d.txt")).unwrap();
    std::fs::write(path.join("out.journal.json"), "{").unwrap();
    assert!(refused(&config, &Tokenizer::Byte).contains("out.journal.json' is damaged"));
}

#[test]
fn a_call_that_ends_within_a_long_document_resumes_in_front_of_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let line = |text: &str| format!("{}\n", serde_json::json!({ "text": text }));
    let long = "A long document. ".repeat(200_000);
    // The broken line is in the batch of the long document, of which parts are written before.
    let text = [&line("First").repeat(20_000), &line(&long), "broken\n", &line("Last")].concat();
    std::fs::write(path.join("a.jsonl"), text).unwrap();
    for format in [TokenFormat::Megatron, TokenFormat::NanoGpt, TokenFormat::LlmC] {
        let strict = PreprocessConfig { format, shard_tokens: 300_001, ..config(path, "a.jsonl") };
        let skipping = PreprocessConfig { skip_broken_lines: true, ..strict.clone() };
        run(&skipping, &Tokenizer::Byte).unwrap();
        let want = written(path);
        remove_written(path);
        for _ in 0..2 {
            let line = refused(&strict, &Tokenizer::Byte);
            assert!(line.contains("a.jsonl', line 20002: no JSON object"), "{line}");
        }
        assert_eq!(run(&skipping, &Tokenizer::Byte).unwrap().skipped, 1);
        assert!(written(path) == want, "{format:?}");
        remove_written(path);
    }
}
