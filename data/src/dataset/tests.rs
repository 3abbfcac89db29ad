//! Every file format, every way a file can be wrong, and what a folder is taken for.

use super::*;
use std::fs;
use tempfile::TempDir;

/// A nanoGPT file.
fn nano_gpt(tokens: &[u16]) -> Vec<u8> {
    tokens.iter().flat_map(|token| token.to_le_bytes()).collect()
}

/// An llm.c shard of `magic` and `version`, its header promising `count` tokens.
fn llm_c(magic: u32, version: u32, count: u32, tokens: &[u8]) -> Vec<u8> {
    let mut bytes: Vec<u8> =
        [magic, version, count].iter().flat_map(|word| word.to_le_bytes()).collect();
    bytes.resize(1024, 0);
    bytes.extend(tokens);
    bytes
}

/// Writes `files` into a new folder.
fn folder_of(files: &[(&str, &[u8])]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        fs::write(folder.path().join(name), bytes).unwrap();
    }
    folder
}

/// The tokens of one file.
fn open(name: &str, bytes: &[u8], tokenizer: &Tokenizer) -> Result<Vec<u32>> {
    let folder = folder_of(&[(name, bytes)]);
    TokenSource::open(&[folder.path().join(name)], tokenizer)?.to_vec()
}

/// Texts as GPT-2's tokens, which need the feature.
#[cfg(feature = "tokenizers")]
#[test]
fn texts_are_read_as_byte_pairs() {
    let open = |bytes: &[u8]| open("a.txt", bytes, &Tokenizer::Gpt2);
    assert_eq!(open(b"Hello world").unwrap(), [15496, 995]);
    assert!(open(b"\xEF\xBB\xBF").unwrap().is_empty());
    let error = open(b"\xEF\xBB\xBFab\xFF").unwrap_err().to_string();
    assert!(error.contains("(byte 5)"), "{error}");
    let (bins, texts) =
        (folder_of(&[("a.bin", &nano_gpt(&[1, 2]))]), folder_of(&[("b.txt", b"cd")]));
    let config = DataConfig {
        validation_data: vec![texts.path().join("b.txt")],
        ..DataConfig::new(bins.path())
    };
    let dataset = Dataset::open(&config, &Tokenizer::Gpt2).unwrap();
    assert_eq!(dataset.validation.unwrap().to_vec().unwrap(), [10210]);
}

#[test]
fn every_format_is_recognised_and_read() {
    let wide: Vec<u8> = [1u32, 128_000, 3].iter().flat_map(|token| token.to_le_bytes()).collect();
    let shard = llm_c(20_240_520, 1, 3, &nano_gpt(&[5, 50256, 7]));
    assert_eq!(open("a.bin", &shard, &Tokenizer::Gpt2).unwrap(), [5, 50256, 7]);
    assert_eq!(open("no_extension", &shard, &Tokenizer::Gpt2).unwrap(), [5, 50256, 7]);
    assert_eq!(open("a.bin", &nano_gpt(&[5, 50256]), &Tokenizer::Gpt2).unwrap(), [5, 50256]);
    assert_eq!(open("a.md", b"ba", &Tokenizer::char("ab").unwrap()).unwrap(), [1, 0]);
    assert_eq!(open("a", &[104, 255, 0], &Tokenizer::Byte).unwrap(), [104, 255, 0]);
    // u32 shards of a vocabulary that is large enough only by its number.
    let folder = folder_of(&[("a.bin", &llm_c(20_240_801, 7, 3, &wide))]);
    let error = TokenSource::open(&[folder.path().join("a.bin")], &Tokenizer::Gpt2).unwrap_err();
    assert!(error.to_string().contains("has token 128000 at position 1"), "{error}");
    let narrow: Vec<u8> = [1u32, 2, 3].iter().flat_map(|token| token.to_le_bytes()).collect();
    let shard = llm_c(20_240_801, 7, 3, &narrow);
    assert_eq!(open("a.bin", &shard, &Tokenizer::Byte).unwrap(), [1, 2, 3]);
}

#[test]
fn wrong_files_get_one_line_that_says_what_is_wrong() {
    let two = nano_gpt(&[1, 2]);
    let char_level = Tokenizer::char("ab").unwrap();
    let rows: [(&str, Vec<u8>, &Tokenizer, &str); 12] = [
        ("a.txt", vec![], &Tokenizer::Byte, "a.txt' is empty"),
        ("a.bin", vec![], &Tokenizer::Gpt2, "a.bin' is empty"),
        ("a.bin", vec![1, 2, 3], &Tokenizer::Gpt2, "has 3 bytes, an odd number"),
        (
            "a.bin",
            llm_c(20_240_520, 1, 3, &two),
            &Tokenizer::Gpt2,
            "has 1028 bytes, but its header promises 3 tokens, 1030 bytes",
        ),
        ("a.bin", llm_c(20_240_520, 1, 1, &two), &Tokenizer::Gpt2, "promises 1 tokens, 1026 bytes"),
        ("a.bin", llm_c(20_240_520, 1, 0, &[]), &Tokenizer::Gpt2, "no tokens"),
        (
            "a.bin",
            llm_c(20_240_520, 1, 3, &[])[..100].to_vec(),
            &Tokenizer::Gpt2,
            "truncated: 100 bytes",
        ),
        (
            "a.bin",
            llm_c(20_240_520, 2, 2, &two),
            &Tokenizer::Gpt2,
            "version 2; with magic 20240520 only 1",
        ),
        ("a.bin", llm_c(20_240_326, 3, 2, &two), &Tokenizer::Gpt2, "is an llm.c model file"),
        (
            "a.bin",
            nano_gpt(&[1, 50257, 3]),
            &Tokenizer::Gpt2,
            "has token 50257 at position 1, but the vocabulary has 50257 (0 to 50256)",
        ),
        ("a.txt", vec![97, 98, 255], &Tokenizer::Gpt2, "is not UTF-8 text (byte 2)"),
        ("a.txt", b"abc".to_vec(), &char_level, "character 'c' (U+0063) at position 2"),
    ];
    for (name, bytes, tokenizer, words) in rows {
        let error = open(name, &bytes, tokenizer).unwrap_err().to_string();
        assert!(error.contains(words), "'{error}' does not say '{words}'");
        assert!(error.contains(name) && !error.contains('\n'), "{error}");
    }
    let folder = folder_of(&[("a.bin", &two), ("a.idx", b"MMIDIDX\0\0")]);
    let error = TokenSource::open(&[folder.path().join("a.bin")], &Tokenizer::Gpt2).unwrap_err();
    assert!(error.to_string().contains("a.idx' is no index of Megatron"), "{error}");
    let error = TokenSource::open(&["no such file"], &Tokenizer::Gpt2).unwrap_err().to_string();
    assert!(error.starts_with("data: cannot open 'no such file': "), "{error}");
}

/// The same words, the other way round.
fn big_endian(bytes: &[u8], width: usize) -> Vec<u8> {
    bytes.chunks(width).flat_map(|word| word.iter().rev().copied().collect::<Vec<_>>()).collect()
}

#[test]
fn big_endian_files_are_named_as_such() {
    for (magic, version, width) in [(20_240_520, 1, 2), (20_240_801, 7, 4)] {
        let tokens: Vec<u8> = (0..2 * width as u8).collect();
        let shard = llm_c(magic, version, 2, &tokens);
        let swapped = [big_endian(&shard[..1024], 4), big_endian(&tokens, width)].concat();
        for name in ["a.bin", "no_extension"] {
            let error = open(name, &swapped, &Tokenizer::Gpt2).unwrap_err().to_string();
            assert!(error.contains(&format!("{name}' is a big-endian llm.c shard")), "{error}");
            assert!(error.contains(&magic.to_string()) && !error.contains('\n'), "{error}");
        }
    }
    // Two tokens of a nanoGPT file that happen to be the magic are tokens.
    let mut tokens = big_endian(&20_240_520_u32.to_le_bytes(), 4);
    tokens.extend(nano_gpt(&[9, 9]));
    assert_eq!(open("a.bin", &tokens, &Tokenizer::Gpt2).unwrap()[2..], [9, 9]);
    // Without a header, only tokens beyond the vocabulary tell.
    let error = open("a.bin", &big_endian(&nano_gpt(&[5, 200, 7]), 2), &Tokenizer::Gpt2);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("has token 51200 at position 1"), "{error}");
    assert!(error.contains("is it big-endian?"), "{error}");
}

#[test]
fn byte_order_marks_are_no_characters() {
    let char_level = Tokenizer::char("ab").unwrap();
    let marked = b"\xEF\xBB\xBFab";
    assert_eq!(open("a.txt", marked, &char_level).unwrap(), [0, 1]);
    assert_eq!(open("a.txt", marked, &Tokenizer::Byte).unwrap(), [97, 98]);
    assert!(open("a.txt", &marked[..3], &Tokenizer::Byte).unwrap().is_empty());
    let folder = folder_of(&[("a.txt", marked), ("b.txt", marked)]);
    assert_eq!(DataConfig::new(folder.path()).text().unwrap(), "abab");

    for (bytes, encoding) in [
        (&b"\xFF\xFEa\0b\0"[..], "UTF-16"),
        (b"\xFE\xFF\0a\0b", "UTF-16"),
        (b"\xFF\xFE\0\0a\0\0\0", "UTF-32"),
        (b"\0\0\xFE\xFF\0\0\0a", "UTF-32"),
    ] {
        let error = open("a.txt", bytes, &Tokenizer::Gpt2).unwrap_err().to_string();
        let wanted = format!("convert it with iconv -f {encoding} -t UTF-8");
        assert!(error.contains(&wanted) && error.contains("a.txt"), "{error}");
        // Who asks for bytes gets them.
        assert_eq!(open("a.txt", bytes, &Tokenizer::Byte).unwrap().len(), bytes.len());
    }
}

#[test]
fn empty_files_are_left_out_and_named() {
    let folder = folder_of(&[("1.txt", b""), ("2.txt", b"ab"), ("3.txt", b""), ("val.txt", b"")]);
    let config = DataConfig::new(folder.path());
    let error = Dataset::open(&config, &Tokenizer::Byte).unwrap_err().to_string();
    assert!(error.contains("val.txt' is empty"), "{error}");
    fs::write(folder.path().join("val.txt"), "cd").unwrap();
    let dataset = Dataset::open(&config, &Tokenizer::Byte).unwrap();
    assert_eq!(dataset.train.to_vec().unwrap(), [97, 98]);
    assert_eq!(config.text().unwrap(), "ab");
    let names = ["1.txt", "3.txt"].map(|name| folder.path().join(name));
    assert_eq!(config.empty_files().unwrap(), names);

    let config = DataConfig { data: names.to_vec(), ..config };
    let error = Dataset::open(&config, &Tokenizer::Byte).unwrap_err().to_string();
    assert!(error.contains("all 2 files are empty, from "), "{error}");
    let config = DataConfig { data: names[..1].to_vec(), ..config };
    let error = Dataset::open(&config, &Tokenizer::Byte).unwrap_err().to_string();
    assert!(error.contains("1.txt' is empty"), "{error}");
}

/// Sets are parts of the validation stream, so no file is opened and tokenized twice.
#[test]
fn validation_sets_share_the_files_of_the_stream() {
    let folder = folder_of(&[("a.txt", b"ab"), ("b.txt", b"cd"), ("c.txt", b""), ("d.txt", b"e")]);
    let path = |name: &str| folder.path().join(name);
    let validation_data = vec![path("d.txt"), folder.path().into(), path("b.txt")];
    let config = DataConfig { validation_data, ..DataConfig::new(path("a.txt")) };
    let (dataset, sets) = Dataset::open_with_sets(&config, &Tokenizer::Byte).unwrap();
    let validation = dataset.validation.unwrap();
    let read = |source: &TokenSource| source.to_vec().unwrap();
    let text = |text: &str| text.bytes().map(u32::from).collect::<Vec<_>>();
    assert_eq!(read(&validation), text("eabcdecd"));
    assert_eq!(sets.iter().map(read).collect::<Vec<_>>(), ["e", "abcde", "cd"].map(text));
    assert!(sets.iter().all(|set| set.shares_files(&validation)));
    let config = DataConfig { validation_data: vec![path("a.txt"), path("c.txt")], ..config };
    let error = Dataset::open_with_sets(&config, &Tokenizer::Byte).unwrap_err().to_string();
    assert!(error.contains("c.txt' is empty"), "{error}");
}

#[test]
fn hidden_files_and_folders_below_are_left_alone() {
    let folder = folder_of(&[(".a.txt", b"x"), ("A.TXT", b"ab"), ("b.txt~", b"x")]);
    fs::create_dir(folder.path().join("below.txt")).unwrap();
    let config = DataConfig::new(folder.path());
    assert_eq!(config.text().unwrap(), "ab");
    fs::remove_file(folder.path().join("A.TXT")).unwrap();
    let error = config.files().unwrap_err().to_string();
    assert!(error.contains("no .bin or .txt file, and folders below are not read"), "{error}");
}

/// A file that is cut short is an error, whatever is left of it. One that is overwritten is read as it is.
#[test]
fn a_file_that_changes_while_it_is_read() {
    let folder = folder_of(&[("a.bin", &nano_gpt(&[1, 2, 3, 4]))]);
    let path = folder.path().join("a.bin");
    let source = TokenSource::open(&[&path], &Tokenizer::Gpt2).unwrap();
    fs::write(&path, nano_gpt(&[5, 6])).unwrap();
    let mut out = [0; 2];
    source.read(0, &mut out).unwrap();
    assert_eq!(out, [5, 6]);
    let error = source.read(2, &mut out).unwrap_err().to_string();
    assert!(error.contains("a.bin': it ends before its 4 tokens"), "{error}");
    // A file that takes its name leaves the open one as it was.
    fs::write(folder.path().join("new"), nano_gpt(&[7, 8])).unwrap();
    fs::rename(folder.path().join("new"), &path).unwrap();
    source.read(0, &mut out).unwrap();
    assert_eq!(out, [5, 6]);
}

/// Most of many files are opened for each read; a different file under the same name is an error.
#[test]
fn many_files_are_read_with_few_of_them_open() {
    let names: Vec<String> = (0..20).map(|number| format!("{number:02}.bin")).collect();
    let contents: Vec<Vec<u8>> = (0..20).map(|number| nano_gpt(&[number, number + 100])).collect();
    let files = names.iter().map(String::as_str).zip(contents.iter().map(Vec::as_slice));
    let folder = folder_of(&files.collect::<Vec<_>>());
    let paths: Vec<_> = names.iter().map(|name| folder.path().join(name)).collect();
    let source = TokenSource::open(&paths, &Tokenizer::Gpt2).unwrap();
    let all: Vec<u32> = (0..20).flat_map(|number| [number, number + 100]).collect();
    assert_eq!(source.to_vec().unwrap(), all);
    let mut out = [0; 2];
    for (number, is_open) in [(0, true), (19, false)] {
        fs::write(folder.path().join("new"), nano_gpt(&[7, 8])).unwrap();
        fs::rename(folder.path().join("new"), &paths[number]).unwrap();
        match source.read(2 * number as u64, &mut out) {
            Ok(()) => assert!(is_open && out == [number as u32, number as u32 + 100], "{out:?}"),
            Err(error) => assert!(
                !is_open && error.to_string().contains("19.bin': another file has taken its name"),
                "{error}"
            ),
        }
    }
}

#[test]
fn shards_read_as_one_stream_across_their_borders() {
    let first = llm_c(20_240_520, 1, 3, &nano_gpt(&[0, 1, 2]));
    let folder =
        folder_of(&[("1.bin", &first), ("2.bin", &nano_gpt(&[3])), ("3.txt", &[4, 5, 6, 7])]);
    let paths = ["1.bin", "2.bin", "3.txt"].map(|name| folder.path().join(name));
    let source = TokenSource::open(&paths, &Tokenizer::Byte).unwrap();
    assert_eq!(source.len(), 8);
    for start in 0..=8u64 {
        for end in start..=8 {
            let want: Vec<u32> = (start as u32..end as u32).collect();
            assert_eq!(source.slice(start..end).unwrap().to_vec().unwrap(), want);
            let mut out = vec![0; want.len()];
            source.read(start, &mut out).unwrap();
            assert_eq!(out, want);
        }
    }
    let part = source.slice(2..6).unwrap();
    let mut out = [0; 2];
    part.slice(1..4).unwrap().read(1, &mut out).unwrap();
    assert_eq!(out, [4, 5]);
    assert!(part.read(3, &mut out).is_err());
    assert!(part.read(u64::MAX, &mut out).is_err());
    assert!(part.slice(3..5).is_err());
}

#[test]
fn a_split_holds_out_the_end() {
    let source = TokenSource::from_tokens((0..105).collect(), 105).unwrap();
    for (fraction, train) in [(0.0, 105), (0.1, 94), (0.5, 52)] {
        let (first, rest) = source.split(Split::valid_fraction(fraction).unwrap()).unwrap();
        assert_eq!((first.len(), rest.len()), (train, 105 - train));
        assert_eq!(
            [first.to_vec().unwrap(), rest.to_vec().unwrap()].concat(),
            source.to_vec().unwrap()
        );
    }
    for fraction in [1.0, -0.1, f64::NAN, 10.0] {
        let error = Split::valid_fraction(fraction).unwrap_err().to_string();
        assert!(error.contains("--valid-fraction"), "{error}");
    }
}

#[test]
fn proportions_hold_out_a_middle_and_an_end() {
    let source = TokenSource::from_tokens((0..1000).collect(), 1000).unwrap();
    for (parts, want) in [
        ([90.0, 5.0, 5.0], [900, 50, 50]),
        ([949.0, 50.0, 1.0], [949, 50, 1]),
        ([1.0, 0.0, 0.0], [1000, 0, 0]),
        ([0.7, 0.3, 0.0], [700, 300, 0]),
    ] {
        let split = Split::proportions(parts).unwrap();
        assert_eq!(split.tokens(1000), want, "{parts:?}");
        let (train, validation) = source.split(split).unwrap();
        assert_eq!([train.len(), validation.len()], want[..2], "{parts:?}");
    }
    for parts in
        [[0.0, 1.0, 1.0], [1.0, -1.0, 0.0], [f64::NAN, 0.0, 0.0], [1.0, f64::INFINITY, 0.0]]
    {
        let error = Split::proportions(parts).unwrap_err().to_string();
        assert!(error.contains("--split"), "{error}");
    }
}

#[test]
fn a_folder_offers_its_bins_and_knows_its_validation_files() {
    let bins = folder_of(&[
        ("fineweb_train_000002.bin", &nano_gpt(&[3, 4])),
        ("fineweb_train_000001.bin", &nano_gpt(&[1, 2])),
        ("fineweb_val_000000.bin", &nano_gpt(&[9])),
        ("test.bin", &nano_gpt(&[8])),
        ("input.txt", b"text"),
        ("meta.pkl", b"other"),
    ]);
    let config = DataConfig::new(bins.path());
    let dataset = Dataset::open(&config, &Tokenizer::Gpt2).unwrap();
    assert_eq!(dataset.train.to_vec().unwrap(), [1, 2, 3, 4]);
    assert_eq!(dataset.validation.unwrap().to_vec().unwrap(), [9]);

    let texts = folder_of(&[("b.txt", b"cd"), ("a.txt", b"ab"), ("README.md", b"words")]);
    let config =
        DataConfig { split: Split::valid_fraction(0.25).unwrap(), ..DataConfig::new(texts.path()) };
    assert_eq!(config.text().unwrap(), "abcd");
    let dataset = Dataset::open(&config, &Tokenizer::Byte).unwrap();
    assert_eq!(dataset.train.to_vec().unwrap(), [97, 98, 99]);
    assert_eq!(dataset.validation.unwrap().to_vec().unwrap(), [100]);

    // A validation file of one's own takes the folder's place.
    let own = folder_of(&[("own.bin", &nano_gpt(&[6, 7]))]);
    let config = DataConfig {
        validation_data: vec![own.path().join("own.bin")],
        ..DataConfig::new(bins.path())
    };
    let dataset = Dataset::open(&config, &Tokenizer::Gpt2).unwrap();
    assert_eq!(dataset.train.len(), 4);
    assert_eq!(dataset.validation.unwrap().to_vec().unwrap(), [6, 7]);
}

#[test]
fn folders_without_data_and_empty_lists_are_refused() {
    let empty = folder_of(&[("notes.md", b"x")]);
    let only = folder_of(&[("val.bin", &nano_gpt(&[1]))]);
    let none = DataConfig { data: vec![], ..DataConfig::new("x") };
    for (config, words) in [
        (DataConfig::new(empty.path()), "has no .bin or .txt file"),
        (DataConfig::new(only.path()), "has only validation or test files"),
        (DataConfig::new("no such file"), "cannot open 'no such file'"),
        (none, "no data file given"),
    ] {
        let error = Dataset::open(&config, &Tokenizer::Gpt2).unwrap_err().to_string();
        assert!(error.contains(words), "'{error}' does not say '{words}'");
    }
    let error = DataConfig::new(only.path().join("val.bin")).text().unwrap_err().to_string();
    assert!(error.contains("holds tokens, not text"), "{error}");
}

#[test]
fn nothing_held_out_is_no_validation() {
    assert!({
        let all = Split::valid_fraction(0.0).unwrap();
        Dataset::from_text("abc", &Tokenizer::Byte, all).unwrap().validation.is_none()
    });
}
