//! Parquet as other programs compress it.
//!
//! The files are by pyarrow 26.0.1: rows of `text` as [`rows`] has them beside an `id`, in row groups of 15 rows and pages of
//! 128 bytes. `zstd_v1` has dictionaries and data pages of version 1; `zstd_v2` has version 2 and DELTA_BYTE_ARRAY; `mixed` has
//! one row group, whose `id` is compressed by snappy, and an index of its pages; `lz4` and `brotli` have three rows.

use super::*;
use crate::preprocess::parquet_rows::ParquetRows;
use crate::preprocess::quiet_panics::catch_quietly;

const FILES: [(&str, &[u8]); 3] = [
    ("zstd_v1", include_bytes!("files/zstd_v1.parquet")),
    ("zstd_v2", include_bytes!("files/zstd_v2.parquet")),
    ("mixed", include_bytes!("files/mixed.parquet")),
];

fn rows() -> Vec<Option<String>> {
    let row = |i: usize| (i % 7 != 3).then(|| format!("Row {i} of a table. ").repeat(i % 5));
    (0..40).map(row).collect()
}

#[test]
fn pages_compressed_by_zstandard_are_read_from_any_row_on() {
    let folder = tempfile::tempdir().unwrap();
    let want: Vec<Option<Vec<u8>>> =
        rows().into_iter().map(|row| row.map(String::into_bytes)).collect();
    for (name, bytes) in FILES {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        for at in [0, 1, 14, 15, 16, 29, 38, 40] {
            let mut file =
                ParquetRows::open(&path, name, &["text".to_string()], at, usize::MAX).unwrap();
            let mut found = Vec::new();
            while let Some(mut columns) = file.read(name).unwrap() {
                found.append(&mut columns[0]);
            }
            assert!(found == want[at as usize..], "{name} from row {at} on: {found:?}");
        }
    }
}

#[test]
fn a_file_compressed_by_zstandard_becomes_documents() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    std::fs::write(path.join("a.parquet"), FILES[0].1).unwrap();
    let config = PreprocessConfig { skip_broken_lines: true, ..config(path, "a.parquet") };
    let report = run(&config, &Tokenizer::Byte).unwrap();
    assert_eq!(report.skipped, 6);
    let want: Vec<String> = rows().into_iter().flatten().collect();
    let found = documents(&path.join("out_text_document"), &Tokenizer::Byte);
    assert_eq!(found.len(), want.len());
    assert!(found.iter().zip(want).all(|(found, want)| found.concat() == want));
}

#[test]
fn other_codecs_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    for (name, bytes) in [
        ("LZ4_RAW", &include_bytes!("files/lz4.parquet")[..]),
        ("BROTLI", include_bytes!("files/brotli.parquet")),
    ] {
        std::fs::write(path.join("a.parquet"), bytes).unwrap();
        let line = refused(&config(path, "a.parquet"), &Tokenizer::Byte);
        let want = format!("column 'text' is compressed by {name}");
        assert!(line.contains(&want) && line.contains("snappy, gzip, zstd"), "{line}");
        assert!(!line.contains('\n'), "{line}");
    }
}

#[test]
fn damaged_pages_are_refused_or_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    for (name, whole) in FILES {
        let mut refusals = 0;
        for at in (4..whole.len()).step_by(7) {
            let mut bytes = whole.to_vec();
            bytes[at] ^= 0x5A;
            std::fs::write(path.join("a.parquet"), bytes).unwrap();
            let keys = ["text".to_string()];
            let read = || {
                let mut file =
                    ParquetRows::open(&path.join("a.parquet"), "a.parquet", &keys, 0, usize::MAX)?;
                while file.read("a.parquet")?.is_some() {}
                Ok::<(), ferrotron_tensor::Error>(())
            };
            if let Err(error) = read() {
                let line = error.to_string();
                assert!(line.contains("a.parquet") && !line.contains('\n'), "{line}");
                refusals += 1;
            }
        }
        assert!(refusals > 15, "{name}: {refusals}");
    }
}

/// Runs the test above as a program of its own, since what a panic prints cannot be read within one.
#[test]
fn damaged_pages_print_no_panic() {
    let test = concat!(module_path!(), "::damaged_pages_are_refused_or_read");
    let (_, test) = test.split_once("::").unwrap();
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    let output = command.args(["--exact", test, "--nocapture"]).output().unwrap();
    let out = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && out.contains("1 passed"), "{out}");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}

#[test]
fn panics_elsewhere_are_printed_as_before() {
    if std::env::var_os("FERROTRON_TEST_PANICS").is_some() {
        assert_eq!(catch_quietly(|| panic!("a quiet one")), None::<()>);
        assert_eq!(catch_quietly(|| 3), Some(3));
        panic!("a loud one");
    }
    let (_, module) = module_path!().split_once("::").unwrap();
    let test = format!("{module}::panics_elsewhere_are_printed_as_before");
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", &test, "--nocapture"]).env("FERROTRON_TEST_PANICS", "1");
    let output = command.output().unwrap();
    let lines = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && lines.contains("a loud one"), "{lines}");
    assert!(!lines.contains("a quiet one"), "{lines}");
}
