//! Limits of what a call may keep in memory.

use super::*;
use crate::preprocess::config::{MAX_STRETCH, max_pages};
use crate::preprocess::parquet_rows::ParquetRows;
use parquet::basic::Compression;
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use serde_json::json;
use std::sync::Arc;

/// Writes columns of the same texts: one row group, with a dictionary of the first `batch` rows, and one page of the others.
fn write_parquet(path: &Path, columns: &[&str], texts: &[String], batch: usize) {
    let fields: String =
        columns.iter().map(|name| format!("required binary {name} (UTF8); ")).collect();
    let schema = Arc::new(parse_message_type(&format!("message rows {{ {fields} }}")).unwrap());
    let bytes = texts[0].len() * batch;
    let properties = WriterProperties::builder()
        .set_compression(Compression::SNAPPY)
        .set_write_batch_size(batch)
        .set_dictionary_page_size_limit(bytes)
        .set_data_page_size_limit(2 * bytes)
        .build();
    let file = std::fs::File::create(path).unwrap();
    let mut writer = SerializedFileWriter::new(file, schema, Arc::new(properties)).unwrap();
    let mut group = writer.next_row_group().unwrap();
    for _ in columns {
        let mut column = group.next_column().unwrap().unwrap();
        let values: Vec<ByteArray> = texts.iter().map(|text| text.as_str().into()).collect();
        column.typed::<ByteArrayType>().write_batch(&values, None, None).unwrap();
        column.close().unwrap();
    }
    group.close().unwrap();
    writer.close().unwrap();
}

#[test]
fn pages_and_dictionaries_have_one_limit() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.parquet");
    let texts: Vec<String> = (0..8).map(|i| format!("{i} of a thousand. ").repeat(1000)).collect();
    write_parquet(&path, &["a", "b"], &texts, 4);
    let read = |keys: &[&str], most: usize| {
        let keys: Vec<String> = keys.iter().map(|key| key.to_string()).collect();
        let mut file = ParquetRows::open(&path, "a.parquet", &keys, 0, most)?;
        let mut rows = 0;
        while let Some(columns) = file.read("a.parquet")? {
            rows += columns[0].len();
        }
        Ok::<usize, ferrotron_tensor::Error>(rows)
    };
    let half = 4 * (texts[0].len() + 4);
    for (keys, most, words) in [
        (&["a"][..], 2 * half + 100, ""),
        (&["a", "b"], 4 * half + 200, ""),
        (
            &["a"],
            half - 1,
            "a dictionary of 68016 bytes beside 0 bytes of pages, together more than 68015: write fewer",
        ),
        (&["a"], 2 * half - 1, "a page of 68016 bytes beside 68016 bytes of dictionaries"),
        (&["a", "b"], 4 * half - 1, "a page of 68016 bytes beside 204048 bytes of dictionaries"),
    ] {
        match read(keys, most) {
            Ok(rows) => assert!(words.is_empty() && rows == 8, "{words}: {rows} rows"),
            Err(error) => {
                let line = error.to_string();
                assert!(!words.is_empty() && line.contains(words), "{line}");
                assert!(
                    line.contains("'a.parquet'") && line.contains("use_dictionary=False"),
                    "{line}"
                );
            }
        }
    }
    assert!(max_pages(50_257) > 205_000_000 && max_pages(256_000) < 112_000_000);
}

/// A dictionary and pages of 102 MB each, as pyarrow writes texts of 100 KB.
#[cfg(target_os = "linux")]
#[test]
fn memory_is_bounded_with_large_pages() {
    let variable = "FERROTRON_TEST_LARGE_PAGES";
    if let Some(folder) = std::env::var_os(variable) {
        run(&config(Path::new(&folder), "a.parquet"), &Tokenizer::Gpt2).unwrap();
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        println!("{}", status.lines().find(|line| line.starts_with("VmHWM:")).unwrap());
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let texts: Vec<String> = (0..2048).map(|i| format!("{i:04} words ").repeat(9090)).collect();
    write_parquet(&folder.path().join("a.parquet"), &["text"], &texts, 1024);
    let test = concat!(module_path!(), "::memory_is_bounded_with_large_pages");
    let (_, test) = test.split_once("::").unwrap();
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(variable, folder.path());
    let output = command.output().unwrap();
    let out = String::from_utf8_lossy(&output.stdout);
    let kilobytes = out.lines().find_map(|line| line.split("VmHWM:").nth(1));
    let kilobytes = kilobytes.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    let megabytes = (kilobytes.unwrap_or(0) << 10) / 1_000_000;
    println!("{megabytes} MB");
    // Less would show that the pages are smaller.
    assert!((200..300).contains(&megabytes), "{megabytes} MB: {out}");
}

/// Unigrams of letters, cut as a pre-tokenizer says.
fn unigrams(pre_tokenizer: serde_json::Value) -> Tokenizer {
    let letters =
        ["<unk>", "\u{2581}"].into_iter().map(String::from).chain(('a'..='z').map(String::from));
    let vocab: Vec<_> = letters.map(|letter| json!([letter, -2.0])).collect();
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": pre_tokenizer, "post_processor": null, "decoder": null,
        "model": { "type": "Unigram", "unk_id": 0, "vocab": vocab, "byte_fallback": false }
    });
    Tokenizer::from_json(&file.to_string()).unwrap()
}

#[test]
fn a_stretch_that_would_take_much_memory_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let by_spaces = unigrams(json!({
        "type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always", "split": true
    }));
    let by_marks = unigrams(json!({
        "type": "Split", "pattern": { "Regex": "[.!]" }, "behavior": "Isolated", "invert": false
    }));
    let line = |text: &str| format!("{}\n", json!({ "text": text, "more": "b" }));
    // The metaspace counts too: three bytes in front of the word.
    let (most, long) = ("a".repeat(MAX_STRETCH - 3), "a.".repeat(MAX_STRETCH / 2 + 1));
    let lines =
        [line("first"), line(&most), line(&format!("words and {long} in between")), line("last")];
    std::fs::write(path.join("a.jsonl"), lines.concat()).unwrap();
    std::fs::write(path.join("a.txt"), format!("words and more {long}")).unwrap();
    for tokenizer in [&by_spaces, &by_marks] {
        let strict = config(path, "a.jsonl");
        let found = refused(&strict, tokenizer);
        assert!(found.contains("a.jsonl', line 3: 1310"), "{found}");
        let words = "bytes without a place at which this tokenizer cuts, such as a space between two letters, more than 131072: ";
        assert!(found.contains(words) && found.contains("--skip-broken-lines"), "{found}");
        let skipping = PreprocessConfig { skip_broken_lines: true, ..strict };
        assert_eq!(run(&skipping, tokenizer).unwrap().skipped, 1);
        let dataset = IndexedDataset::open(&path.join("out_text_document")).unwrap();
        assert_eq!(dataset.num_documents(), 3);
        let want = [&lines[..2], &lines[3..]].concat();
        let tokens: usize =
            [0, 1, 2].map(|sequence| dataset.sequence(sequence).unwrap().len()).iter().sum();
        assert!(tokens >= want.iter().map(|line| line.len() - 30).sum::<usize>(), "{tokens}");
        remove_written(path);
        let found = refused(&config(path, "a.txt"), tokenizer);
        assert!(found.contains("a.txt', from byte 0 on: 1310") && found.contains(words), "{found}");
    }
    // Byte pairs take windows of any stretch.
    run(&config(path, "a.jsonl"), &Tokenizer::Gpt2).unwrap();
}

/// Long pairs are given on in parts, and are looked at before.
#[test]
fn long_pairs_have_the_tokens_of_their_texts() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let text = "A prompt of some words. ".repeat(80_000);
    let pair = |prompt: &str, completion: &str| {
        format!("{}\n", json!({ "prompt": prompt, "completion": completion }))
    };
    let lines = [
        pair("a", "b"),
        pair(&text, &text[1..]),
        pair(&text, " \n"),
        pair("", &text),
        pair("c", "d"),
    ];
    std::fs::write(path.join("a.jsonl"), lines.concat()).unwrap();
    let config = PreprocessConfig {
        json_keys: vec!["prompt".to_string(), "completion".to_string()],
        sequence_level: SequenceLevel::PromptAndCompletion,
        skip_broken_lines: true,
        ..config(path, "a.jsonl")
    };
    assert_eq!(run(&config, &Tokenizer::Gpt2).unwrap().skipped, 2);
    let found = documents(&path.join("out_prompt_completion"), &Tokenizer::Gpt2);
    assert!(found == [vec!["a", "b"], vec![&text, &text[1..]], vec!["c", "d"]]);
}
