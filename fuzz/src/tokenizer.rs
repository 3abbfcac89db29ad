//! Files of tokenizers: Hugging Face's `tokenizer.json`, and this project's.

use ferrotron_data::tokenizer::Tokenizer;

const TEXT: &str =
    "The quick  brown fox's 12345 naïve\tjumps!\n\u{1F600}<|endoftext|> 日本 [MASK] ##ing";

/// Byte pairs and unigrams with added tokens, word pieces, and an alphabet.
const SEEDS: [&str; 4] = [
    r#"{"version":"1.0","added_tokens":[{"id":6,"content":"<|endoftext|>","single_word":false,"lstrip":false,"rstrip":false,
"normalized":false,"special":true}],"normalizer":{"type":"NFC"},"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,
"trim_offsets":true,"use_regex":true},"post_processor":null,"decoder":{"type":"ByteLevel",
"add_prefix_space":false,"trim_offsets":true,"use_regex":true},"model":{"type":"BPE",
"vocab":{"T":0,"h":1,"e":2,"Th":3,"The":4,"Ġ":5},"merges":["T h","Th e"]}}"#,
    r#"{"version":"1.0","added_tokens":[],"normalizer":{"type":"Lowercase"},"pre_tokenizer":{"type":"Metaspace",
"replacement":"▁","prepend_scheme":"always"},"decoder":{"type":"Metaspace","replacement":"▁"},"model":{"type":"Unigram",
"unk_id":0,"vocab":[["<unk>",0.0],["▁the",-2.0],["▁",-3.0],["q",-4.0],["u",-4.5]],"byte_fallback":false}}"#,
    r###"{"version":"1.0","added_tokens":[{"id":1,"content":"[MASK]","single_word":false,"lstrip":true,"rstrip":false,
"normalized":false,"special":true}],"normalizer":{"type":"BertNormalizer","clean_text":true,"handle_chinese_chars":true,
"strip_accents":null,"lowercase":true},"pre_tokenizer":{"type":"BertPreTokenizer"},"model":{"type":"WordPiece",
"unk_token":"[UNK]","continuing_subword_prefix":"##","max_input_chars_per_word":100,
"vocab":{"[UNK]":0,"[MASK]":1,"the":2,"quick":3,"##ing":4,"jump":5,"##s":6}}}"###,
    r#"{"kind":"char","chars":"\n !Tehquick"}"#,
];

pub fn seeds() -> Vec<Vec<u8>> {
    SEEDS.map(Into::into).into()
}

pub fn read(bytes: &[u8]) -> bool {
    let Ok(json) = std::str::from_utf8(bytes) else { return false };
    let Ok(tokenizer) = Tokenizer::from_json(json) else { return false };
    if let Ok(tokens) = tokenizer.encode(TEXT) {
        tokenizer.decode(&tokens);
        assert!(
            tokens.iter().all(|&token| (token as usize) < tokenizer.vocab_size()),
            "{tokens:?}"
        );
    }
    tokenizer.decode(&[0, u32::MAX]);
    let again = Tokenizer::from_json(&tokenizer.to_json()).expect("it wrote this");
    assert_eq!(again.vocab_size(), tokenizer.vocab_size());
    true
}
