//! Tokenizers that are cut at spaces: WordPieces, and SentencePiece's byte pairs and unigrams.

use super::super::{WordPattern, WordRule};
use super::Tokenizer;
use serde_json::{Value, json};

const AT_SPACES: WordPattern = WordPattern::Spaces(&[' ']);
const AT_META_SPACES: WordPattern = WordPattern::Spaces(&['\u{2581}']);
const NOWHERE: WordPattern = WordPattern::Spaces(&[]);
const AT_BOTH: WordPattern = WordPattern::Spaces(&[' ', '\u{2581}']);

/// Files, and the patterns that are recognized in them.
pub fn files() -> Vec<(String, WordPattern)> {
    let prepend = json!({"type": "Prepend", "prepend": "\u{2581}"});
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"});
    let both = json!({"type": "Sequence", "normalizers": [prepend, replace]});
    let split = json!({"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious",
        "invert": false});
    let bert = json!({"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
        "strip_accents": null, "lowercase": true});
    let pre_bert = json!({"type": "BertPreTokenizer"});
    let in_turn = json!({"type": "Sequence", "pretokenizers": [
        {"type": "WhitespaceSplit"}, {"type": "Punctuation", "behavior": "Isolated"}, meta_space("always", true)]});
    let nfkc = json!({"type": "NFKC"});
    [
        (both, Value::Null, byte_pairs(true), AT_META_SPACES),
        (replace.clone(), split.clone(), byte_pairs(false), AT_META_SPACES),
        (Value::Null, meta_space("first", false), byte_pairs(true), AT_BOTH),
        (Value::Null, meta_space("always", false), byte_pairs(false), AT_BOTH),
        (Value::Null, meta_space("first", false), joining(byte_pairs(true)), NOWHERE),
        (replace.clone(), split, joining(byte_pairs(false)), NOWHERE),
        (nfkc.clone(), meta_space("always", true), unigrams(), AT_SPACES),
        (nfkc, meta_space("never", true), unigrams(), AT_SPACES),
        (Value::Null, in_turn, unigrams(), AT_SPACES),
        (bert.clone(), pre_bert.clone(), word_pieces(), WordPattern::Marks),
        (Value::Null, pre_bert, word_pieces(), WordPattern::Marks),
        (bert, json!({"type": "Whitespace"}), word_pieces(), AT_SPACES),
    ]
    .into_iter()
    .map(|(normalizer, pre_tokenizer, model, pattern)| {
        (file(normalizer, pre_tokenizer, model), pattern)
    })
    .collect()
}

fn file(normalizer: Value, pre_tokenizer: Value, model: Value) -> String {
    let added = |id: u32, content: &str, strip: bool| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": strip, "rstrip": strip,
            "normalized": false, "special": true})
    };
    json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": normalizer,
        "added_tokens": [added(100, "<a>", false), added(101, "<b>", true)],
        "pre_tokenizer": pre_tokenizer, "post_processor": null, "decoder": null, "model": model
    })
    .to_string()
}

fn meta_space(scheme: &str, split: bool) -> Value {
    json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": scheme, "split": split})
}

/// Byte pairs with tokens of several spaces; characters beyond the vocabulary are unknown, or their bytes.
fn byte_pairs(byte_fallback: bool) -> Value {
    let mut tokens: Vec<String> = [
        "<unk>",
        "\u{2581}",
        "a",
        "w",
        "o",
        "r",
        "d",
        ".",
        "\n",
        "1",
        "\u{2581}a",
        "wo",
        "rd",
        "word",
        "\u{2581}word",
        "\u{2581}\u{2581}",
        "\u{2581}\u{2581}\u{2581}\u{2581}",
        ".\n",
    ]
    .map(String::from)
    .to_vec();
    if byte_fallback {
        tokens.extend((0..256).map(|byte| format!("<0x{byte:02X}>")));
    }
    // Ids behind those of the added tokens.
    let vocab: serde_json::Map<String, Value> =
        tokens.into_iter().zip(200..).map(|(token, id)| (token, id.into())).collect();
    let merges = [
        "w o",
        "r d",
        "wo rd",
        "\u{2581} word",
        "\u{2581} a",
        "\u{2581} \u{2581}",
        "\u{2581}\u{2581} \u{2581}\u{2581}",
        ". \n",
    ];
    json!({"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
        "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": byte_fallback, "vocab": vocab,
        "merges": merges})
}

/// A file of byte pairs that leave characters beyond the vocabulary out.
pub fn dropping() -> String {
    let mut model = byte_pairs(false);
    model["unk_token"] = Value::Null;
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"});
    file(replace, Value::Null, model)
}

/// The same with a token that has a space behind another character.
fn joining(mut byte_pairs: Value) -> Value {
    byte_pairs["vocab"]["d\u{2581}"] = 199.into();
    let merges = byte_pairs["merges"].as_array_mut().unwrap();
    merges.insert(0, "d \u{2581}".into());
    byte_pairs
}

fn unigrams() -> Value {
    let scores = [
        ("<unk>", 0.0),
        ("\u{2581}", -2.0),
        ("\u{2581}word", -3.0),
        ("word", -4.0),
        ("a", -3.0),
        ("\u{2581}a", -2.5),
        (".", -3.5),
        ("...", -4.0),
        ("1", -5.0),
        ("42", -6.0),
        ("\u{e9}", -7.0),
        ("w", -8.0),
        ("o", -8.0),
    ];
    json!({"type": "Unigram", "unk_id": 0, "vocab": scores, "byte_fallback": false})
}

fn word_pieces() -> Value {
    let tokens = [
        "[UNK]", "a", "##a", "word", "##word", "s", "##s", "'", ".", "_", "1", "##1", "42", "e",
        "##e", "z",
    ];
    let vocab: serde_json::Map<String, Value> = tokens
        .iter()
        .zip(0..)
        .map(|(token, id): (_, u32)| (token.to_string(), id.into()))
        .collect();
    json!({"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100, "vocab": vocab})
}

/// Marks are cut out by the crate too, and so have its ids.
#[test]
fn marks_are_punctuation_of_bert() {
    let json = file(Value::Null, json!({"type": "BertPreTokenizer"}), word_pieces());
    let reference = tokenizers::Tokenizer::from_bytes(&json).unwrap();
    let tokenizer = Tokenizer::from_json(&json).unwrap();
    for c in (0..0x4000).filter_map(char::from_u32) {
        let text = format!("a{c}a {c}{c}word");
        let want = reference.encode_fast(text.as_str(), false).unwrap();
        assert_eq!(tokenizer.encode(&text).unwrap(), want.get_ids(), "{text:?}");
    }
}

#[test]
fn a_vocabulary_that_joins_words_is_not_cut() {
    let rule = |vocab: &[&str], model: Value| {
        let vocab: Vec<String> = vocab.iter().map(|token| token.to_string()).collect();
        let json = json!({"pre_tokenizer": null, "model": model}).to_string();
        WordRule::of_tokenizer(&json, vocab.iter()).map(|rule| rule.pattern)
    };
    let byte_pairs = json!({"type": "BPE", "unk_token": "<unk>"});
    assert_eq!(rule(&["\u{2581}", "\u{2581}\u{2581}a"], byte_pairs.clone()), Some(AT_META_SPACES));
    assert_eq!(rule(&["\u{2581}", "a\u{2581}"], byte_pairs.clone()), Some(NOWHERE));
    assert_eq!(rule(&["a", "\u{2581}a"], byte_pairs), Some(NOWHERE));
    for (key, value) in [("dropout", json!(0.1)), ("end_of_word_suffix", json!("</w>"))] {
        let mut model = json!({"type": "BPE", "unk_token": "<unk>"});
        model[key] = value;
        assert_eq!(rule(&["\u{2581}"], model), None, "{key}");
    }
    assert_eq!(rule(&["\u{2581}"], json!({"type": "Unigram", "unk_token": "<unk>"})), None);
}

#[test]
fn byte_pairs_that_leave_characters_out_have_no_windows() {
    let by_windows = |pre_tokenizer: &Value, model: Value, tokens: &[String]| {
        let json = json!({"pre_tokenizer": pre_tokenizer, "model": model}).to_string();
        WordRule::of_tokenizer(&json, tokens.iter()).is_some_and(|rule| rule.by_windows)
    };
    let plain = json!({"type": "BPE", "unk_token": null, "byte_fallback": false});
    let unknown = json!({"type": "BPE", "unk_token": "<unk>"});
    let fallback = json!({"type": "BPE", "unk_token": null, "byte_fallback": true});
    let both = json!({"type": "BPE", "unk_token": "<unk>", "byte_fallback": true});
    let bytes = |count: u32| (0..count).map(|byte| format!("<0x{byte:02X}>"));
    let (all, some): (Vec<String>, Vec<String>) = (bytes(256).collect(), bytes(255).collect());
    for (model, tokens, want) in [
        (&plain, &all, false),
        (&unknown, &some, true),
        (&fallback, &all, true),
        (&fallback, &some, false),
        (&both, &all, true),
        (&both, &some, false),
    ] {
        let found = by_windows(&Value::Null, model.clone(), tokens);
        assert_eq!(found, want, "{model} with {} bytes", tokens.len());
    }
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false});
    let visible = (33..=126).chain(161..=172).chain(174..=323);
    let all: Vec<String> = visible.map(|code| char::from_u32(code).unwrap().into()).collect();
    for (model, tokens, want) in [
        (&plain, &all[..], true),
        (&both, &all, true),
        (&plain, &all[1..], false),
        (&unknown, &all[1..], true),
        (&fallback, &all[1..], false),
    ] {
        let found = by_windows(&byte_level, model.clone(), tokens);
        assert_eq!(found, want, "{model} with {} bytes", tokens.len());
    }
}

#[test]
fn words_without_a_longest_length_are_encoded_as_a_whole() {
    for most in [u64::MAX, u64::MAX / 8, u64::MAX / 8 - 7] {
        let mut model = word_pieces();
        model["max_input_chars_per_word"] = most.into();
        let json = file(Value::Null, json!({"type": "BertPreTokenizer"}), model);
        let reference = tokenizers::Tokenizer::from_bytes(&json).unwrap();
        let tokenizer = Tokenizer::from_json(&json).unwrap();
        let word = "a".repeat(200);
        let want = reference.encode_fast(word.as_str(), false).unwrap();
        assert_eq!((want.len(), tokenizer.encode(&word).unwrap()), (200, want.get_ids().to_vec()));
    }
}
