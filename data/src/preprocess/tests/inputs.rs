//! Kinds of files, and what is wrong with some.

use super::*;
use crate::preprocess::config::MAX_DOCUMENT;
use crate::preprocess::parquet_rows::ParquetRows;
use flate2::write::GzEncoder;
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use std::io::Write;
use std::sync::Arc;

/// Removes the journal of a call that failed behind its first batch, and its files.
fn forget(folder: &Path) {
    for name in ["journal.json", "bin.part", "idx.part", "boundaries.part", "modes.part"] {
        let name = match name {
            "journal.json" => format!("out.{name}"),
            _ => format!("out_text_document.{name}"),
        };
        let _ = std::fs::remove_file(folder.join(name));
    }
}

/// JSON lines of some documents, and the documents.
fn lines(count: usize) -> (String, Vec<Vec<String>>) {
    let texts = (0..count).map(|i| format!("Document {i}: {}", "word ".repeat(i * 7919 % 97)));
    let line = |text: &String| format!("{}\n", serde_json::json!({ "text": text }));
    let texts: Vec<String> = texts.collect();
    (texts.iter().map(line).collect(), texts.into_iter().map(|text| vec![text]).collect())
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn zstd(bytes: &[u8]) -> Vec<u8> {
    ::zstd::encode_all(bytes, 1).unwrap()
}

/// Writes a column of strings, some of them null, in row groups of `group` rows.
fn parquet(path: &Path, column: &str, rows: &[Option<&str>], group: usize) {
    let schema = format!("message rows {{ required int64 id; optional binary {column} (UTF8); }}");
    let schema = Arc::new(parse_message_type(&schema).unwrap());
    let compression = parquet::basic::Compression::SNAPPY;
    let properties = Arc::new(WriterProperties::builder().set_compression(compression).build());
    let file = std::fs::File::create(path).unwrap();
    let mut writer = SerializedFileWriter::new(file, schema, properties).unwrap();
    for rows in rows.chunks(group) {
        let mut rows_writer = writer.next_row_group().unwrap();
        let mut ids = rows_writer.next_column().unwrap().unwrap();
        let numbers: Vec<i64> = (0..rows.len() as i64).collect();
        ids.typed::<parquet::data_type::Int64Type>().write_batch(&numbers, None, None).unwrap();
        ids.close().unwrap();
        let mut texts = rows_writer.next_column().unwrap().unwrap();
        let levels: Vec<i16> = rows.iter().map(|row| row.is_some().into()).collect();
        let values: Vec<ByteArray> = rows.iter().flatten().map(|&row| row.into()).collect();
        texts.typed::<ByteArrayType>().write_batch(&values, Some(&levels), None).unwrap();
        texts.close().unwrap();
        rows_writer.close().unwrap();
    }
    writer.close().unwrap();
}

#[test]
fn compressed_files_have_the_same_documents() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let (lines, want) = lines(3000);
    let (first, second) = lines.as_bytes().split_at(lines.len() / 3);
    // Several members and frames in one file, one of them skippable, and one empty.
    let skippable = [&0x184D_2A53_u32.to_le_bytes()[..], &[3, 0, 0, 0, 1, 2, 3]].concat();
    let files = [
        ("a.jsonl", lines.clone().into_bytes()),
        ("a.jsonl.gz", [gzip(first), gzip(b""), gzip(second)].concat()),
        ("a.jsonl.zst", [skippable, zstd(first), zstd(b""), zstd(second)].concat()),
    ];
    for (name, bytes) in files {
        std::fs::write(path.join(name), &bytes).unwrap();
        run(&config(path, name), &Tokenizer::Byte).unwrap();
        let prefix = path.join("out_text_document");
        assert!(documents(&prefix, &Tokenizer::Byte) == want, "{name}");
        remove_written(path);
        if name == "a.jsonl" {
            continue;
        }
        for at in [3, 5, bytes.len() / 2, bytes.len() - 2] {
            std::fs::write(path.join(name), &bytes[..at]).unwrap();
            let line = refused(&config(path, name), &Tokenizer::Byte);
            assert!(line.contains("cannot read") && line.contains(name), "{at}: {line}");
            assert!(!line.contains('\n'), "{line}");
            forget(path);
        }
        let mut damaged = bytes.clone();
        damaged[bytes.len() / 2] ^= 0x55;
        std::fs::write(path.join(name), &damaged).unwrap();
        refused(&config(path, name), &Tokenizer::Byte);
        forget(path);
        std::fs::write(path.join(name), "no compressed file").unwrap();
        let line = refused(&config(path, name), &Tokenizer::Byte);
        assert!(line.contains("cannot read") && !line.contains('\n'), "{line}");
        forget(path);
    }
}

#[test]
fn parquet_has_documents_in_rows() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let (_, want) = lines(1000);
    let rows: Vec<Option<&str>> = want.iter().map(|texts| Some(texts[0].as_str())).collect();
    parquet(&path.join("a.parquet"), "text", &rows, 300);
    run(&config(path, "a.parquet"), &Tokenizer::Byte).unwrap();
    let prefix = path.join("out_text_document");
    assert!(documents(&prefix, &Tokenizer::Byte) == want);
    remove_written(path);

    let with_nulls = [Some("a"), None, Some("b"), None];
    parquet(&path.join("b.parquet"), "text", &with_nulls, 3);
    let strict = config(path, "b.parquet");
    let line = refused(&strict, &Tokenizer::Byte);
    assert!(line.contains("b.parquet', row 2: 'text' is null"), "{line}");
    let skipping = PreprocessConfig { skip_broken_lines: true, ..strict };
    assert_eq!(run(&skipping, &Tokenizer::Byte).unwrap().skipped, 2);
    assert_eq!(documents(&prefix, &Tokenizer::Byte), [["a"], ["b"]]);
    remove_written(path);

    parquet(&path.join("c.parquet"), "content", &with_nulls, 3);
    let line = refused(&config(path, "c.parquet"), &Tokenizer::Byte);
    assert!(line.contains("has no column 'text'; it has id, content"), "{line}");
    forget(path);
    let json_keys = vec!["id".to_string()];
    let of_numbers = PreprocessConfig { json_keys, ..config(path, "c.parquet") };
    let line = refused(&of_numbers, &Tokenizer::Byte);
    assert!(
        line.contains("column 'id' of") && line.contains("has no strings, but INT64"),
        "{line}"
    );
    forget(path);
    let whole = std::fs::read(path.join("a.parquet")).unwrap();
    for bytes in [&whole[..whole.len() - 9], &whole[..2], &whole[4..]] {
        std::fs::write(path.join("d.parquet"), bytes).unwrap();
        let line = refused(&config(path, "d.parquet"), &Tokenizer::Byte);
        assert!(line.contains("d.parquet': ") && !line.contains('\n'), "{line}");
        forget(path);
    }
}

/// Pages of about 10 MB.
#[test]
fn large_pages_are_read_from_any_row_on() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.parquet");
    let texts: Vec<String> = (0..24).map(|i| format!("{i} ").repeat(600_000)).collect();
    for (repetition, codec) in [("required", "NONE"), ("optional", "SNAPPY"), ("optional", "GZIP")]
    {
        use parquet::basic::{Compression, GzipLevel};
        let compression = match codec {
            "NONE" => Compression::UNCOMPRESSED,
            "SNAPPY" => Compression::SNAPPY,
            _ => Compression::GZIP(GzipLevel::try_new(1).unwrap()),
        };
        let properties = WriterProperties::builder().set_compression(compression);
        let properties = properties.set_dictionary_enabled(false).set_write_batch_size(8);
        let properties = properties.set_data_page_size_limit(10 << 20).build();
        let schema = format!("message rows {{ {repetition} binary text (UTF8); }}");
        let schema = Arc::new(parse_message_type(&schema).unwrap());
        let file = std::fs::File::create(&path).unwrap();
        let mut writer = SerializedFileWriter::new(file, schema, Arc::new(properties)).unwrap();
        let mut group = writer.next_row_group().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        let values: Vec<ByteArray> = texts.iter().map(|text| text.as_str().into()).collect();
        let levels = (repetition == "optional").then(|| vec![1; texts.len()]);
        column.typed::<ByteArrayType>().write_batch(&values, levels.as_deref(), None).unwrap();
        column.close().unwrap();
        group.close().unwrap();
        writer.close().unwrap();
        for at in [0, 1, 8, 23, 24] {
            let keys = ["text".to_string()];
            let mut file =
                ParquetRows::open(&path, "a.parquet", &keys, at as u64, usize::MAX).unwrap();
            let mut found = Vec::new();
            while let Some(mut columns) = file.read("a.parquet").unwrap() {
                found.append(&mut columns[0]);
            }
            assert_eq!(found.len(), texts.len() - at, "{codec} from row {at} on");
            let equal =
                |(found, text): (Option<Vec<u8>>, &String)| found.unwrap() == text.as_bytes();
            assert!(found.into_iter().zip(&texts[at..]).all(equal), "{codec} from row {at} on");
        }
    }
}

/// A line may have 32 MiB, whether a line break follows or not.
#[test]
fn a_line_that_is_too_long_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let line = |bytes: usize| {
        let (head, tail) = ("{\"text\": \"", "\"}");
        [head, &"a".repeat(bytes - head.len() - tail.len()), tail].concat()
    };
    for (more, end) in
        [(0, ""), (0, "\n"), (0, "\n{\"text\": \"b\"}\n"), (1, ""), (1, "\n"), (20 << 20, "\n")]
    {
        std::fs::write(path.join("a.jsonl"), line(MAX_DOCUMENT + more) + end).unwrap();
        let config = config(path, "a.jsonl");
        if more == 0 {
            let report = run(&config, &Tokenizer::Byte).unwrap();
            assert_eq!(report.skipped, 0);
            remove_written(path);
        } else {
            let line = refused(&config, &Tokenizer::Byte);
            assert!(line.contains("a.jsonl': a line has more than 33554432 bytes"), "{line}");
            forget(path);
        }
    }
}

#[test]
fn folders_are_read_in_the_order_of_their_paths() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    std::fs::create_dir_all(path.join("in/b/c")).unwrap();
    for (name, bytes) in [
        ("in/z.txt", &b"five"[..]),
        ("in/b/c/1.json", b"{\"text\": \"three\"}"),
        ("in/b/2.jsonl.gz", &gzip(b"{\"text\": \"two\"}")),
        ("in/a.TXT", b"one"),
        ("in/b/d.txt", b"four"),
        ("in/.hidden.txt", b"no"),
        ("in/readme.md", b"no"),
        ("in/empty.txt", b""),
    ] {
        std::fs::write(path.join(name), bytes).unwrap();
    }
    let report = run(&config(path, "in"), &Tokenizer::Byte).unwrap();
    assert_eq!(report.empty_files, [path.join("in/empty.txt")]);
    let found = documents(&path.join("out_text_document"), &Tokenizer::Byte);
    assert_eq!(found.concat(), ["one", "two", "three", "four", "five"]);
    remove_written(path);
    std::fs::create_dir(path.join("none")).unwrap();
    let line = refused(&config(path, "none"), &Tokenizer::Byte);
    assert!(line.contains("none' has no file in .jsonl"), "{line}");
    let line = refused(&config(path, "in/empty.txt"), &Tokenizer::Byte);
    assert!(line.contains("every file is empty"), "{line}");
}

#[test]
fn broken_lines_are_named_or_counted() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    for (line, why) in [
        ("{\"text\": \"a\"", "no JSON object: EOF while parsing an object, column 12"),
        ("[1]", "no JSON object: invalid type: sequence, expected a map"),
        ("{\"Text\": \"a\", \"id\": 1}", "no key 'text'; it has 'Text', 'id'"),
        ("{\"text\": null}", "the value of 'text' is no string, but null"),
        ("{\"text\": 1}", "the value of 'text' is no string, but a number"),
        ("{\"text\": \"\\ud800\"}", "no JSON object: "),
    ] {
        let text = format!("{{\"text\": \"x\"}}\n\n{line}\n{{\"text\": \"y\"}}\n");
        std::fs::write(path.join("a.jsonl"), text).unwrap();
        let strict = config(path, "a.jsonl");
        let found = refused(&strict, &Tokenizer::Byte);
        assert!(found.contains("a.jsonl', line 3: ") && found.contains(why), "{found}");
        assert!(found.contains("--skip-broken-lines"), "{found}");
        // The same call goes on, once it may skip the line.
        let skipping = PreprocessConfig { skip_broken_lines: true, ..strict };
        assert_eq!(run(&skipping, &Tokenizer::Byte).unwrap().skipped, 1);
        let found = documents(&path.join("out_text_document"), &Tokenizer::Byte);
        assert_eq!(found.concat(), ["x", "y"]);
        remove_written(path);
    }
    std::fs::write(path.join("a.jsonl"), b"{\"text\": \"\xff\"}").unwrap();
    let line = refused(&config(path, "a.jsonl"), &Tokenizer::Byte);
    assert!(line.contains("line 1: no JSON object: invalid unicode"), "{line}");
    forget(path);
    std::fs::write(path.join("a.txt"), [&[b'a'; 300_000][..], b"\xff"].concat()).unwrap();
    let line = refused(&config(path, "a.txt"), &Tokenizer::Byte);
    assert!(line.contains("a.txt' is not UTF-8: byte 300000"), "{line}");
    let json_keys = vec!["a".to_string(), "b".to_string()];
    forget(path);
    let two = PreprocessConfig { json_keys, ..config(path, "a.txt") };
    assert!(refused(&two, &Tokenizer::Byte).contains("plain text, which has no a and b"));
}

#[test]
fn a_long_text_is_one_document() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let line = |i: usize| format!("Line {i} of a text, caf\u{e9} \u{4e2d}\u{6587}.\n");
    let text: String = (0..30_000).map(line).collect();
    std::fs::write(path.join("a.txt"), &text).unwrap();
    run(&config(path, "a.txt"), &Tokenizer::Gpt2).unwrap();
    let dataset = IndexedDataset::open(&path.join("out_text_document")).unwrap();
    assert_eq!((dataset.num_documents(), dataset.num_sequences()), (1, 1));
    assert!(dataset.sequence(0).unwrap() == Tokenizer::Gpt2.encode(&text).unwrap());
}

#[test]
fn damaged_files_are_read_or_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let (text, documents) = lines(60);
    let rows: Vec<Option<&str>> = documents.iter().map(|texts| Some(texts[0].as_str())).collect();
    parquet(&path.join("a.parquet"), "text", &rows, 25);
    std::fs::write(path.join("a.jsonl.gz"), gzip(text.as_bytes())).unwrap();
    std::fs::write(path.join("a.jsonl.zst"), zstd(text.as_bytes())).unwrap();
    for name in ["a.parquet", "a.jsonl.gz", "a.jsonl.zst"] {
        let whole = std::fs::read(path.join(name)).unwrap();
        let damaged = (0..whole.len()).step_by(whole.len() / 100 + 1).flat_map(|at| {
            let mut flipped = whole.clone();
            flipped[at] ^= 0x5A;
            [flipped, whole[..at].to_vec()]
        });
        let mut refusals = 0;
        for bytes in damaged.filter(|bytes| !bytes.is_empty()) {
            std::fs::write(path.join(name), bytes).unwrap();
            match run(&config(path, name), &Tokenizer::Byte) {
                Ok(_) => remove_written(path),
                Err(error) => {
                    let line = error.to_string();
                    assert!(line.contains(name) && !line.contains('\n'), "{line}");
                    refusals += 1;
                    forget(path);
                }
            }
        }
        assert!(refusals > 40, "{name}: {refusals}");
    }
}

#[test]
fn a_window_that_needs_much_memory_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let by_window = [0x28, 0xB5, 0x2F, 0xFD, 0, 17 << 3 | 1, 1, 0, 0].to_vec();
    let by_size = [&[0x28, 0xB5, 0x2F, 0xFD, 0xE0][..], &(1_u64 << 28).to_le_bytes()].concat();
    for frame in [by_window, by_size] {
        let whole = zstd(b"{\"text\": \"a\"}\n");
        std::fs::write(path.join("a.jsonl.zst"), [whole, frame].concat()).unwrap();
        let line = refused(&config(path, "a.jsonl.zst"), &Tokenizer::Byte);
        let want = "a.jsonl.zst': it has a window of more than 134217728 bytes";
        assert!(line.contains(want) && line.contains("--long=27"), "{line}");
        forget(path);
    }
}
