//! Sentences of Megatron's data sets.

use super::super::*;
use crate::indexed_dataset::IndexedDataset;
use crate::thread_use;
use crate::tokenizer::Tokenizer;
use crate::{
    BlendConfig, BlendPaths, BlendedDataset, DataConfig, IndexedDatasetBuilder, Split, TokenType,
};
use std::path::{Path, PathBuf};

/// Sentences of some documents; the second document has none.
fn text(documents: u64, seed: u64) -> Vec<Vec<String>> {
    let document = |document: u64| {
        let key = RandomKey::new(seed, document, "documents");
        let sentence = |sentence: usize| {
            let length = 1 + below(&key, sentence as u64, 12);
            (0..length)
                .map(|i| (b'a' + ((document as usize + i * sentence) % 26) as u8) as char)
                .collect()
        };
        (0..if document == 1 { 0 } else { 1 + below(&key, 99, 9) }).map(sentence).collect()
    };
    (0..documents).map(document).collect()
}

/// Writes documents as a data set, whose prefix it returns, and as a text beside it.
fn write(folder: &Path, name: &str, documents: &[Vec<String>]) -> String {
    let prefix = folder.join(name);
    let mut builder = IndexedDatasetBuilder::new(&prefix, TokenType::U16).unwrap();
    for document in documents {
        for sentence in document {
            builder.add_sequence(&sentence.bytes().map(u32::from).collect::<Vec<u32>>()).unwrap();
        }
        builder.end_document().unwrap();
    }
    builder.finish().unwrap();
    let text: Vec<String> = documents.iter().map(|document| document.join("\n")).collect();
    std::fs::write(folder.join(format!("{name}.txt")), text.join("\n\n")).unwrap();
    prefix.display().to_string()
}

fn open(words: &[String], parts: [f64; 3]) -> BlendedDataset {
    let paths = BlendPaths::parse("--data-path", words).unwrap();
    let config = BlendConfig::Shared(paths, Split::proportions(parts).unwrap());
    BlendedDataset::open_sentences(&config, 256).unwrap()
}

fn rows(samples: &dyn Samples, first: u64, count: usize) -> Batch {
    samples.batch(first, count).unwrap()
}

#[test]
fn a_data_set_has_the_samples_of_its_text() {
    let folder = tempfile::tempdir().unwrap();
    let special = Tokenizer::Byte.special_tokens().unwrap();
    let documents = text(60, 3);
    let (training, validation) = documents.split_at(45);
    for (name, part) in
        [("all", &documents[..]), ("training", training), ("validation", validation)]
    {
        write(folder.path(), name, part);
    }
    let of_text = |name: &str| {
        let text = std::fs::read_to_string(folder.path().join(format!("{name}.txt"))).unwrap();
        Documents::from_text(&text, &Tokenizer::Byte).unwrap()
    };
    let sets = open(&[folder.path().join("all").display().to_string()], [3.0, 1.0, 0.0]);
    assert!(sets.test.is_none());
    for (set, name) in
        [(&sets.training, "training"), (sets.validation.as_ref().unwrap(), "validation")]
    {
        let want = of_text(name);
        let found = Documents::of_blend(set).unwrap();
        assert_eq!(
            (found.num_sentences(), found.num_documents()),
            (want.num_sentences(), want.num_documents())
        );
        assert_eq!(found.token_source().to_vec().unwrap(), want.token_source().to_vec().unwrap());
        let pairs = SentencePairs::of_blend(set, special, 24, 7).unwrap();
        let from_text = SentencePairs::new(want.clone(), special, 24, 7).unwrap();
        let epoch = from_text.samples_per_epoch().unwrap();
        assert_eq!(pairs.samples_per_epoch(), Some(epoch));
        for first in [0, epoch - 3, 5 * epoch + 1] {
            assert_eq!(rows(&pairs, first, 9), rows(&from_text, first, 9), "{name} {first}");
        }
        let held_out = HeldOutPairs::of_blend(set, special, 24).unwrap().0.unwrap();
        let want = HeldOutPairs::new(want, special, 24).unwrap();
        assert_eq!(held_out.len(), want.len());
        assert_eq!(rows(&held_out, 0, 99), rows(&want, 0, 99));
    }

    // As a file among others, too, which --valid-fraction divides by sentences.
    let open = |names: [&str; 2]| {
        let data = names.map(|name| folder.path().join(name)).to_vec();
        let config = DataConfig { data, validation_data: Vec::new(), split: Split::default() };
        Documents::open(&config, &Tokenizer::Byte).unwrap()
    };
    let (want, want_held_out) = open(["training.txt", "validation.txt"]);
    for names in [
        ["training", "validation"],
        ["training.txt", "validation.bin"],
        ["training.idx", "validation.txt"],
    ] {
        let (found, held_out) = open(names);
        for (found, want) in
            [(&found, &want), (held_out.as_ref().unwrap(), want_held_out.as_ref().unwrap())]
        {
            assert_eq!(found.documents(), want.documents(), "{names:?}");
            assert_eq!(
                found.token_source().to_vec().unwrap(),
                want.token_source().to_vec().unwrap()
            );
        }
    }
}

#[test]
fn sets_with_weights_are_drawn_by_weight() {
    let folder = tempfile::tempdir().unwrap();
    let special = Tokenizer::Byte.special_tokens().unwrap();
    let [a, b] =
        [("a", 3), ("b", 4)].map(|(name, seed)| write(folder.path(), name, &text(40, seed)));
    let words = ["30".to_string(), a.clone(), "70".to_string(), b.clone()];
    let sets = open(&words, [1.0, 1.0, 0.0]);
    let pairs = SentencePairs::of_blend(&sets.training, special, 24, 7).unwrap();
    assert_eq!(pairs.samples_per_epoch(), None);
    let whole = rows(&pairs, 0, 100);
    let own: Vec<SentencePairs> = [(a, 7), (b, 7 ^ 1_u64.rotate_right(16))]
        .into_iter()
        .map(|(prefix, seed)| {
            SentencePairs::of_blend(&open(&[prefix], [1.0, 1.0, 0.0]).training, special, 24, seed)
                .unwrap()
        })
        .collect();
    // The length of a sample is decided by its group: that of its number in the set.
    let length = |batch: &Batch, at: usize| batch.key_lengths().unwrap()[at];
    let mut taken = [0_u64; 2];
    for sample in 0..100 {
        let lag = |set: usize| [0.3, 0.7][set] * (sample.max(1) as f64) - taken[set] as f64;
        let set = usize::from(lag(1) > lag(0));
        let alone = rows(&own[set], taken[set], 1);
        assert_eq!(length(&whole, sample), length(&alone, 0), "sample {sample}");
        taken[set] += 1;
    }
    assert_eq!(taken, [30, 70]);
    // The order resumes by its state, and batches do not depend on how they are cut.
    let state = pairs.order_state(70).unwrap();
    let resumed = SentencePairs::of_blend(&sets.training, special, 24, 7).unwrap();
    resumed.resume_order(&state);
    let tokens = |batch: &Batch| batch.get::<u32>(PairBatch::TOKENS).unwrap().to_vec();
    assert_eq!(tokens(&rows(&resumed, 70, 30)), tokens(&whole)[70 * 24..]);
    // Every group of both sets is evaluated once.
    let held_out =
        HeldOutPairs::of_blend(sets.validation.as_ref().unwrap(), special, 24).unwrap().0.unwrap();
    let count = held_out.len() as usize;
    let order = rows(&held_out, 0, count + 2);
    let order = order.get::<i64>(PairBatch::ORDER).unwrap();
    assert!(
        order[..count].iter().all(|&label| label >= 0)
            && order[count..].iter().all(|&label| label < 0)
    );
}

#[test]
fn the_index_is_read_once_for_all_parts() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = write(folder.path(), "a", &text(5000, 3));
    let bytes = |extension: &str| std::fs::metadata(format!("{prefix}.{extension}")).unwrap().len();
    let (index, tokens) = (bytes("idx"), bytes("bin"));
    let (_, before) = thread_use::reads();
    let sets = open(std::slice::from_ref(&prefix), [2.0, 1.0, 1.0]);
    let (_, opened) = thread_use::reads();
    let parts = [Some(&sets.training), sets.validation.as_ref(), sets.test.as_ref()];
    let read: usize =
        parts.map(|part| Documents::of_blend(part.unwrap()).unwrap().num_sentences()).iter().sum();
    let (_, behind) = thread_use::reads();
    assert_eq!(read as u64, IndexedDataset::open(Path::new(&prefix)).unwrap().num_sequences());
    // Small sets are compared as a whole when they are opened. Entries beside a part are read with it.
    let chunks = 3 * 8 * (1 << 14) + 4096;
    let (opened, behind) = (opened - before, behind - opened);
    println!(
        "{index} bytes of index and {tokens} of tokens: {opened} bytes read to open, {behind} for the parts"
    );
    assert!(opened <= index + tokens + chunks, "{opened} bytes of {index} and {tokens}");
    assert!(behind <= index + tokens + chunks, "{behind} bytes of {index} and {tokens}");
}

#[test]
fn a_set_whose_held_out_part_has_no_pair_is_left_out_there() {
    let folder = tempfile::tempdir().unwrap();
    let special = Tokenizer::Byte.special_tokens().unwrap();
    let sentences = |count: usize| vec!["abc".to_string(); count];
    let last_has = |name: &str, sentences: Vec<String>| {
        let documents = [text(20, 3), vec![sentences]].concat();
        write(folder.path(), name, &documents)
    };
    let small = last_has("small", sentences(1));
    let [a, b] = [("a", 2), ("b", 9)].map(|(name, count)| last_has(name, sentences(count)));
    // One document of each set is held out.
    let validation = |words: &[&String]| {
        let words: Vec<String> = words.iter().map(|word| word.to_string()).collect();
        let sets = open(&words, [20.0, 1.0, 0.0]);
        SentencePairs::of_blend(&sets.training, special, 24, 7).unwrap();
        HeldOutPairs::of_blend(&sets.validation.unwrap(), special, 24).unwrap()
    };
    let (none, left_out) = validation(&[&small]);
    assert!(none.is_none() && left_out == [small.as_str()]);
    let (some, left_out) = validation(&[&a, &small, &b]);
    assert!(some.is_some() && left_out == [small.as_str()]);
    assert!(validation(&[&a, &b]).1.is_empty());
    let [ten, thirty] = ["10", "30"].map(String::from);
    let same = |found: &[&String], want: &[&String]| {
        let [found, want] = [found, want].map(|words| validation(words).0.unwrap());
        assert_eq!((found.len(), rows(&found, 0, 9)), (want.len(), rows(&want, 0, 9)));
    };
    same(&[&small, &a], &[&a]);
    same(&[&a, &small, &b], &[&a, &b]);
    same(&[&ten, &a, &thirty, &small, &thirty, &b], &[&ten, &a, &thirty, &b]);
}

#[test]
fn sets_without_sentences_are_refused_with_the_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let whole: Vec<Vec<String>> =
        text(20, 3).iter().map(|document| vec![document.concat() + "."]).collect();
    let prefix = write(folder.path(), "whole", &whole);
    let error = Documents::of_blend(&open(std::slice::from_ref(&prefix), [1.0, 0.0, 0.0]).training)
        .unwrap_err()
        .to_string();
    for part in [
        "a bert takes sentences",
        "each of its 20 documents is one sequence",
        "tokenize --split-sentences",
    ] {
        assert!(error.contains(part), "{part} is missing: {error}");
    }
    let config = DataConfig::new(PathBuf::from(&prefix));
    assert_eq!(Documents::open(&config, &Tokenizer::Byte).unwrap_err().to_string(), error);
    write(folder.path(), "pairs", &text(20, 3));
    std::fs::write(
        folder.path().join("pairs.fingerprint.json"),
        r#"{"options": {"prompt_completion": true}}"#,
    )
    .unwrap();
    let error = Documents::open(&DataConfig::new(folder.path().join("pairs")), &Tokenizer::Byte)
        .unwrap_err()
        .to_string();
    assert!(error.contains("they are prompts and completions"), "{error}");
}
