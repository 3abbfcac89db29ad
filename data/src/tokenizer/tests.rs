//! Round trips, known encodings and errors of every tokenizer.

use super::*;
use proptest::prelude::*;
use std::path::Path;

/// A byte-level BPE with five merges and one special token, in the format of `tokenizers`.
fn small_hugging_face_json() -> String {
    // Byte-level BPE spells a space as U+0120.
    let mut vocab: Vec<String> = (b'a'..=b'z').map(|c| (c as char).to_string()).collect();
    vocab.extend(["\u{120}", "he", "ll", "llo", "hello", "\u{120}w"].map(String::from));
    let mut vocab: serde_json::Map<String, serde_json::Value> =
        vocab.into_iter().enumerate().map(|(id, token)| (token, id.into())).collect();
    vocab.insert("zz".to_string(), 39.into()); // ids 32 and 34 to 38 are a gap
    serde_json::json!({
        "version": "1.0",
        "truncation": { "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0 },
        "padding": null,
        "added_tokens": [{
            "id": 33, "content": "<|endoftext|>", "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true
        }],
        "normalizer": null,
        "pre_tokenizer": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true },
        "post_processor": null,
        "decoder": { "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true },
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab,
            "merges": ["h e", "l l", "ll o", "he llo", "\u{120} w"]
        }
    })
    .to_string()
}

#[test]
fn gpt2_gives_the_known_encodings() {
    // Values of OpenAI's tiktoken, encoding "gpt2".
    let rows: [(&str, &[u32]); 6] = [
        ("", &[]),
        ("Hello world", &[15496, 995]),
        ("hello world", &[31373, 995]),
        ("<|endoftext|>", &[50256]),
        ("a<|endoftext|>b", &[64, 50256, 65]),
        ("\n\n", &[628]),
    ];
    for (text, want) in rows {
        assert_eq!(Tokenizer::Gpt2.encode(text).unwrap(), want, "{text:?}");
        assert_eq!(Tokenizer::Gpt2.decode(want), text);
    }
    assert_eq!(Tokenizer::Gpt2.vocab_size(), 50257);
    assert_eq!(Tokenizer::Gpt2.end_of_text(), Some(50256));
}

#[test]
fn byte_tokens_are_the_bytes_of_utf8() {
    assert_eq!(Tokenizer::Byte.encode("aé").unwrap(), [97, 0xC3, 0xA9]);
    assert_eq!(Tokenizer::Byte.decode(&[97, 0xC3, 0xA9]), "aé");
    assert_eq!(Tokenizer::Byte.vocab_size(), 256);
}

#[test]
fn tokens_that_are_no_text_become_the_replacement_character() {
    assert_eq!(Tokenizer::Byte.decode(&[97, 0xC3]), "a\u{FFFD}"); // half an é
    assert_eq!(Tokenizer::Byte.decode(&[97, 256, 98]), "a\u{FFFD}b");
    assert_eq!(Tokenizer::Gpt2.decode(&[64, 50257, 65]), "a\u{FFFD}b");
    assert_eq!(Tokenizer::char("ab").unwrap().decode(&[0, 2, 1]), "a\u{FFFD}b");
    let file = Tokenizer::from_json(&small_hugging_face_json()).unwrap();
    assert_eq!(file.decode(&[0, 35, 99, 1]), "a\u{FFFD}\u{FFFD}b");
}

#[test]
fn char_ids_are_sorted_by_code_point() {
    let tokenizer = Tokenizer::char("b\na é b").unwrap();
    assert_eq!(tokenizer.vocab_size(), 5);
    assert_eq!(tokenizer.encode("\n abé").unwrap(), [0, 1, 2, 3, 4]);
}

#[test]
fn a_char_outside_the_vocabulary_is_named_with_position_and_remedy() {
    let error = Tokenizer::char("abc").unwrap().encode("abé").unwrap_err();
    assert_eq!(
        error.to_string(),
        "tokenizer: character 'é' (U+00E9) at position 2 is not in the char vocabulary of 3: \
         train on text that has it, or use --tokenizer byte"
    );
}

#[test]
fn hugging_face_files_encode_whole_texts_and_decode_them() {
    let tokenizer = Tokenizer::from_json(&small_hugging_face_json()).unwrap();
    let text = "hello wa<|endoftext|>hello wa"; // longer than the truncation the file asks for
    let tokens = tokenizer.encode(text).unwrap();
    assert_eq!(tokens, [30, 31, 0, 33, 30, 31, 0]);
    assert_eq!(tokenizer.decode(&tokens), text);
    assert_eq!(tokenizer.vocab_size(), 40);
    assert_eq!(tokenizer.end_of_text(), Some(33));
}

#[test]
fn every_tokenizer_survives_its_json() {
    let file = Tokenizer::from_json(&small_hugging_face_json()).unwrap();
    assert_eq!(file.to_json(), small_hugging_face_json());
    let char_level = Tokenizer::char("hello \"quoted\" \\ \n é").unwrap();
    for tokenizer in [Tokenizer::Byte, char_level, Tokenizer::Gpt2, file] {
        let same = Tokenizer::from_json(&tokenizer.to_json()).unwrap();
        assert_eq!(same.name(), tokenizer.name());
        assert_eq!(same.vocab_size(), tokenizer.vocab_size());
        assert_eq!(same.encode("hello").unwrap(), tokenizer.encode("hello").unwrap());
    }
    assert_eq!(Tokenizer::Byte.to_json(), r#"{"kind":"byte"}"#);
    assert_eq!(Tokenizer::char("ba").unwrap().to_json(), r#"{"kind":"char","chars":"ab"}"#);
}

#[test]
fn malformed_json_is_one_clear_line() {
    for (json, words) in [
        ("", "not a tokenizer.json"),
        ("[1, 2]", "not a tokenizer.json"),
        ("{}", "cannot load with the tokenizer.json"),
        (r#"{"kind":"morse"}"#, "unknown kind 'morse'"),
        (r#"{"kind":"char"}"#, "without \"chars\""),
        (r#"{"kind":"char","chars":""}"#, "not empty"),
        (r#"{"kind":"char","chars":"aba"}"#, "'a' twice"),
    ] {
        let error = Tokenizer::from_json(json).unwrap_err().to_string();
        assert!(error.contains(words), "'{error}' does not say '{words}'");
        assert!(!error.contains('\n'), "{error}");
    }
    assert!(Tokenizer::char("").is_err());
}

#[test]
fn choices_parse_and_build() {
    let no_text = || -> Result<String> { panic!("the text is not needed") };
    for (name, vocab_size) in [("byte", 256), ("gpt2", 50257)] {
        let choice: TokenizerChoice = name.parse().unwrap();
        assert_eq!(choice.to_string(), name);
        assert_eq!(choice.build(no_text).unwrap().vocab_size(), vocab_size);
    }
    let choice: TokenizerChoice = "char".parse().unwrap();
    assert_eq!(choice.build(|| Ok("abc".into())).unwrap().vocab_size(), 3);
    assert!("".parse::<TokenizerChoice>().is_err());
    let error = "gpt3".parse::<TokenizerChoice>().unwrap().build(no_text).unwrap_err();
    assert_eq!(
        error.to_string(),
        "tokenizer: 'gpt3' is neither byte, char or gpt2 nor an existing tokenizer.json"
    );

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    std::fs::write(&path, small_hugging_face_json()).unwrap();
    let choice: TokenizerChoice = path.to_str().unwrap().parse().unwrap();
    assert_eq!(choice.build(no_text).unwrap().name(), "huggingface");
    assert!(Tokenizer::from_file(Path::new("no such file")).is_err());
    std::fs::write(&path, "{").unwrap();
    assert!(Tokenizer::from_file(&path).unwrap_err().to_string().contains("is no tokenizer"));
}

proptest! {
    #[test]
    fn text_survives_encoding(text in "(?s).{0,64}") {
        let mut tokenizers = vec![Tokenizer::Byte, Tokenizer::Gpt2];
        tokenizers.extend(Tokenizer::char(&text));
        for tokenizer in tokenizers {
            let tokens = tokenizer.encode(&text).unwrap();
            prop_assert!(tokens.iter().all(|&token| (token as usize) < tokenizer.vocab_size()));
            prop_assert_eq!(tokenizer.decode(&tokens), text.clone());
        }
    }
}

#[test]
fn a_byte_order_mark_before_a_tokenizer_json_is_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    let tokenizer = Tokenizer::char("abc").unwrap();
    std::fs::write(&path, format!("\u{FEFF}{}", tokenizer.to_json())).unwrap();
    assert_eq!(Tokenizer::from_file(&path).unwrap().encode("cab").unwrap(), [2, 0, 1]);
}
