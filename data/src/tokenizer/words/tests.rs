//! Compares the scanner with a regex engine, and the fast path with the crates.

mod long_texts;
mod spaces;

use super::super::Tokenizer;
use super::pattern::{CL100K, GPT2, O200K};
use super::*;
use fancy_regex::Regex;
use proptest::prelude::*;
use std::sync::LazyLock;

/// Each pattern with its regular expression.
static PATTERNS: LazyLock<[(WordPattern, Regex); 4]> = LazyLock::new(|| {
    let cl100k = |quantifier| Regex::new(&CL100K.replace("DIGITS", quantifier)).unwrap();
    [
        (WordPattern::Gpt2, Regex::new(GPT2).unwrap()),
        (WordPattern::Cl100k { digits: 3 }, cl100k("{1,3}")),
        (WordPattern::Cl100k { digits: 1 }, cl100k("")),
        (WordPattern::O200k, Regex::new(O200K).unwrap()),
    ]
});

fn words(pattern: WordPattern, text: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut take = |word: &str| {
        words.push(word.to_string());
        Ok(())
    };
    pattern.try_for_each_word(text, &mut take).unwrap();
    words
}

/// Whether the scanner cuts a text as the regular expressions do, and whether each word is one word by itself.
fn check(text: &str) {
    for (pattern, regex) in PATTERNS.iter() {
        let want: Vec<&str> = regex.find_iter(text).map(|found| found.unwrap().as_str()).collect();
        let got = words(*pattern, text);
        assert_eq!(got, want, "{pattern:?} {text:?}");
        for word in got {
            assert_eq!(words(*pattern, &word), [word.as_str()], "{pattern:?} of {text:?}");
        }
    }
}

/// Text of fragments at which the patterns decide, and of any characters.
fn text() -> impl Strategy<Value = String> {
    let fragments = [
        "'",
        "'s",
        "'S",
        "'\u{17F}",
        "'re",
        "'Ve",
        "'ll",
        "'LL",
        "'l",
        "'d",
        "'t",
        "'M",
        " ",
        "  ",
        "\n",
        "\r\n",
        "\r",
        "\t",
        "\u{a0}",
        "\u{3000}",
        "\u{85}",
        "\u{2028}",
        "a",
        "Z",
        "ABC",
        "CamelCase",
        "\u{1c5}",
        "\u{2b0}",
        "/",
        "word",
        "\u{e9}",
        "e\u{301}",
        "\u{301}",
        "\u{df}",
        "\u{4e2d}",
        "\u{939}\u{93f}",
        "\u{627}\u{64b}",
        "1",
        "42",
        "123456",
        "\u{663}",
        "\u{b2}",
        "\u{2167}",
        "\u{24b6}",
        ".",
        "...",
        "_",
        "!'",
        "\u{1f600}",
        "\u{200d}",
        "\u{0}",
        "<|endoftext|>",
        "<|end",
        "<a>",
        "<b>",
        " word",
        "\u{2581}",
        "\u{2581}a",
    ];
    let fragment = prop_oneof![
        4 => prop::sample::select(fragments.to_vec()).prop_map(String::from),
        1 => any::<char>().prop_map(String::from),
    ];
    prop::collection::vec(fragment, 0..40).prop_map(|fragments| fragments.concat())
}

/// A byte-level tokenizer with some merges, and added tokens of several kinds.
fn hugging_face(pre_tokenizer: serde_json::Value, normalizer: &str) -> String {
    // The visible characters that spell the 256 bytes.
    let visible = |byte: &u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let hidden = (0..256).filter(|byte| !visible(byte)).count() as u32;
    let alphabet = (0..256).filter(visible).chain(256..256 + hidden);
    let mut vocab: Vec<String> =
        alphabet.map(|code| char::from_u32(code).unwrap().to_string()).collect();
    let merges = [
        "\u{120} a",
        "o r",
        "or d",
        "w ord",
        "\u{120} word",
        "' s",
        "\u{c3} \u{a9}",
        "1 2",
        "\u{10a} \u{10a}",
    ];
    vocab.extend(merges.map(|merge| merge.replace(' ', "")));
    let first_added = vocab.len();
    let added = [
        ("<|endoftext|>", false, false),
        ("<a>", true, false),
        ("<b>", false, true),
        ("    ", true, false),
    ];
    let added: Vec<serde_json::Value> = added
        .into_iter()
        .enumerate()
        .map(|(i, (content, normalized, strip))| {
            serde_json::json!({"id": first_added + i, "content": content, "single_word": strip, "lstrip": strip,
                "rstrip": false, "normalized": normalized, "special": !normalized})
        })
        .collect();
    let vocab: serde_json::Map<String, serde_json::Value> =
        vocab.into_iter().enumerate().map(|(id, token)| (token, id.into())).collect();
    let normalizer = match normalizer {
        "" => serde_json::Value::Null,
        name => serde_json::json!({ "type": name }),
    };
    serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer, "post_processor": null, "decoder": null,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": merges
        }
    })
    .to_string()
}

fn byte_level(use_regex: bool) -> serde_json::Value {
    serde_json::json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex})
}

fn sequence(first: serde_json::Value, use_regex: bool) -> serde_json::Value {
    serde_json::json!({"type": "Sequence", "pretokenizers": [first, byte_level(use_regex)]})
}

fn split(pattern: &str) -> serde_json::Value {
    serde_json::json!({"type": "Split", "behavior": "Isolated", "invert": false, "pattern": {"Regex": pattern}})
}

fn cl100k(quantifier: &str) -> serde_json::Value {
    split(&CL100K.replace("DIGITS", quantifier))
}

/// Tokenizers with each of the patterns, beside the crate's own.
static FILES: LazyLock<Vec<(Tokenizer, tokenizers::Tokenizer)>> = LazyLock::new(|| {
    let digits = serde_json::json!({"type": "Digits", "individual_digits": true});
    let files = [
        (hugging_face(byte_level(true), ""), WordPattern::Gpt2),
        (hugging_face(byte_level(true), "NFC"), WordPattern::Gpt2),
        (hugging_face(sequence(digits, true), ""), WordPattern::Gpt2SingleDigits),
        (hugging_face(sequence(cl100k("{1,3}"), false), ""), WordPattern::Cl100k { digits: 3 }),
        (hugging_face(sequence(cl100k(""), false), "NFC"), WordPattern::Cl100k { digits: 1 }),
        (hugging_face(sequence(split(O200K), false), ""), WordPattern::O200k),
    ];
    let by_spaces = spaces::files();
    let files = files.into_iter().chain(by_spaces);
    files
        .map(|(json, pattern)| {
            let reference = tokenizers::Tokenizer::from_bytes(&json).unwrap();
            let rule = WordRule::of_tokenizer(&json, reference.get_vocab(false).keys());
            assert_eq!(rule.map(|rule| rule.pattern), Some(pattern), "{json}");
            (Tokenizer::from_json(&json).unwrap(), reference)
        })
        .collect()
});

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn words_are_those_of_the_regular_expressions(text in text()) {
        check(&text);
    }

    #[test]
    fn gpt2_has_the_ids_of_tiktoken(text in text()) {
        let special = std::collections::HashSet::from(["<|endoftext|>"]);
        let (want, _) = tiktoken_rs::r50k_base_singleton().encode(&text, &special).unwrap();
        prop_assert_eq!(Tokenizer::Gpt2.encode(&text).unwrap(), want);
    }

    #[test]
    fn files_have_the_ids_of_the_crate(text in text()) {
        for (tokenizer, reference) in FILES.iter() {
            let want = reference.encode_fast(text.as_str(), false).unwrap();
            prop_assert_eq!(tokenizer.encode(&text).unwrap(), want.get_ids());
        }
    }
}

#[test]
fn every_character_has_the_class_of_the_regular_expressions() {
    // In front of a letter, behind one, and between spaces, for each character there is.
    let mut text = String::new();
    for c in (0..=char::MAX as u32).filter_map(char::from_u32) {
        text.push(c);
        text.push_str(if (c as u32).is_multiple_of(2) { "a " } else { " " });
        if text.len() > 4096 {
            check(&text);
            text.clear();
        }
    }
    check(&text);
}

#[test]
fn other_ways_to_cut_words_are_left_to_the_crate() {
    let with_prefix = serde_json::json!({"type": "ByteLevel", "add_prefix_space": true});
    let removed = serde_json::json!({"type": "Split", "behavior": "Removed", "invert": false,
        "pattern": {"Regex": CL100K.replace("DIGITS", "{1,3}")}});
    let of_pairs = sequence(cl100k("{1,2}"), false);
    for pre_tokenizer in [
        with_prefix,
        sequence(removed, false),
        of_pairs,
        serde_json::json!({"type": "Whitespaces"}),
    ] {
        let json = serde_json::json!({"pre_tokenizer": pre_tokenizer, "model": {"type": "BPE"}});
        assert_eq!(WordRule::of_tokenizer(&json.to_string(), [].iter()), None, "{json}");
    }
}

#[test]
fn words_that_left_the_cache_keep_their_tokens() {
    let caches = WordCaches::new();
    let encode = |word: &str| -> Vec<u32> { word.bytes().map(u32::from).collect() };
    caches.with(|cache| {
        let mut asked = 0;
        // Twice what both generations hold, and one word that is used throughout.
        for number in (0..1 << 17).chain(0..1000) {
            for word in [format!("{number}"), "kept".to_string()] {
                let mut tokens = vec![7];
                cache
                    .append(&word, &mut tokens, |word| {
                        asked += usize::from(word == "kept");
                        Ok(encode(word))
                    })
                    .unwrap();
                assert_eq!(tokens[1..], encode(&word));
            }
        }
        assert_eq!(asked, 1);
    });
}
