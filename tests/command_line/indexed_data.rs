//! Megatron's indexed data sets on the command line, without a tokenizer.

use super::models_and_data::refused;
use super::{TINY, ferrotron, succeeded};
use ferrotron::models::data::{IndexedDatasetBuilder, TokenType};
use std::path::Path;

/// Writes 200 documents of 20 tokens below 50 as a data set, and the same tokens as nanoGPT's.
fn write(folder: &Path) {
    let mut builder =
        IndexedDatasetBuilder::new(&folder.join("my_text_document"), TokenType::I32).unwrap();
    let mut plain = Vec::new();
    for document in 0..200_u32 {
        let tokens: Vec<u32> = (0..20).map(|i| (document * 7 + i * i) % 50).collect();
        plain.extend(tokens.iter().flat_map(|&token| (token as u16).to_le_bytes()));
        builder.add_sequence(&tokens).unwrap();
        builder.end_document().unwrap();
    }
    builder.finish().unwrap();
    std::fs::write(folder.join("plain.bin"), plain).unwrap();
}

#[test]
fn a_data_set_trains_and_is_evaluated_without_a_tokenizer() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    write(path);
    let evaluated = |data: &str| {
        let arguments =
            [&["train", "--vocab-size", "50", "--data", data, "--save", "run"], TINY].concat();
        succeeded(ferrotron(path, &arguments));
        let loss =
            succeeded(ferrotron(path, &["eval", "--load", "run", "--json", "--threads", "1"]));
        std::fs::remove_dir_all(path.join("run")).unwrap();
        loss
    };
    let plain = evaluated("plain.bin");
    for name in ["my_text_document", "my_text_document.idx", "my_text_document.bin"] {
        assert_eq!(evaluated(name), plain, "{name}");
    }
}

#[test]
fn an_exported_model_is_evaluated_on_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    write(path);
    let data = ["--vocab-size", "50", "--data", "my_text_document", "--save", "run"];
    succeeded(ferrotron(path, &[&["train"], &data[..], TINY].concat()));
    let resumed = ["train", "--load", "run", "--vocab-size", "60", "--train-iters", "21"];
    let line = refused(ferrotron(path, &resumed), 2);
    assert!(line.contains("--vocab-size: 60, but the run has 50 token ids"), "{line}");
    let prompt = ["generate", "--load", "run", "--prompt", "1 2 3", "--max-new-tokens", "4"];
    let text = succeeded(ferrotron(path, &[&prompt[..], &["--threads", "1"]].concat()));
    let ids: Result<Vec<u32>, _> = text.split_whitespace().map(str::parse).collect();
    assert!(text.starts_with("1 2 3 ") && ids.is_ok_and(|ids| ids.len() == 7), "{text}");
    succeeded(ferrotron(path, &["export", "--load", "run", "--output", "hf"]));
    let eval = ["eval", "--data", "my_text_document", "--json", "--threads", "1", "--load"];
    let loss = |from: &str| succeeded(ferrotron(path, &[&eval[..], &[from]].concat()));
    assert_eq!(loss("hf"), loss("run"));
}

#[test]
fn what_does_not_fit_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    write(path);
    std::fs::write(path.join("words.txt"), "no numbers here").unwrap();
    let mut index = std::fs::read(path.join("my_text_document.idx")).unwrap();
    index[17] = 6;
    std::fs::write(path.join("damaged.idx"), index).unwrap();
    let data = ["--data", "my_text_document"];
    let rows: [(&[&str], i32, &str); 7] = [
        (&data, 2, "holds tokens, not text from which a char vocabulary could be built"),
        (&["--data", "my_text_document", "--vocab-size", "0"], 2, "--vocab-size: must be positive"),
        (&["--data", "my_text_document", "--vocab-size", "40"], 1, "but the vocabulary has 40"),
        (&["--vocab-size", "50"], 2, "--vocab-size: needs --data"),
        (
            &["--data", "my_text_document", "--vocab-size", "50", "--tokenizer", "gpt2"],
            2,
            "both say how many token ids there are",
        ),
        (&["--data", "words.txt", "--vocab-size", "50"], 1, "'no' is no token id of 0 to 49"),
        (
            &["--data", "damaged.idx", "--vocab-size", "50"],
            1,
            "damaged.idx' is no index of Megatron",
        ),
    ];
    for (arguments, code, words) in rows {
        let line = refused(ferrotron(path, &[&["train"], arguments, TINY].concat()), code);
        assert!(line.contains(words), "{arguments:?}: {line}");
    }
}
