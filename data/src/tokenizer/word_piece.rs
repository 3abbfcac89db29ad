//! WordPiece vocabularies of BERT, `vocab.txt`: one token a line, numbered from 0. As a `tokenizer.json` they are what
//! `transformers` makes of such a file.

use ferrotron_tensor::{Error, Result};
use serde_json::{Map, Value, json};

/// The tokens that must be in the vocabulary, and are never cut.
const SPECIAL: [&str; 5] = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"];

/// The `tokenizer.json` of the vocabulary `text`. Words are lower-cased and lose their accents, unless a token of the
/// vocabulary has a capital.
///
/// # Errors
/// A vocabulary without one of the special tokens, or with a token twice.
pub(super) fn tokenizer_json(text: &str) -> Result<String> {
    let refuse = |message: String| Err(Error::io("tokenizer", message));
    let mut vocab = Map::new();
    for (id, token) in text.lines().enumerate() {
        if let Some(first) = vocab.insert(token.to_string(), json!(id)) {
            return refuse(format!(
                "the vocabulary has '{token}' twice, in lines {} and {}",
                line(&first),
                id + 1
            ));
        }
    }
    let missing: Vec<&str> =
        SPECIAL.into_iter().filter(|token| !vocab.contains_key(*token)).collect();
    if !missing.is_empty() {
        return refuse(format!(
            "the vocabulary has no {}: a vocab.txt of BERT has one token a line, with these among them",
            missing.join(", ")
        ));
    }
    let has_capital = |token: &String| {
        !SPECIAL.contains(&token.as_str())
            && !token.starts_with("[unused")
            && token.chars().any(char::is_uppercase)
    };
    let lowercase = !vocab.keys().any(has_capital);
    let added: Vec<Value> = SPECIAL
        .iter()
        .map(|token| {
            json!({
                "id": vocab[*token], "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true,
            })
        })
        .collect();
    let file = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": {
            "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null,
            "lowercase": lowercase,
        },
        "pre_tokenizer": { "type": "BertPreTokenizer" },
        "post_processor": null,
        "decoder": { "type": "WordPiece", "prefix": "##", "cleanup": true },
        "model": {
            "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100, "vocab": vocab,
        },
    });
    Ok(file.to_string())
}

/// The line, from 1, of the token with this id.
fn line(id: &Value) -> u64 {
    id.as_u64().unwrap_or(0) + 1
}

#[cfg(test)]
mod tests {
    use crate::tokenizer::Tokenizer;

    const VOCAB: &str =
        "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\nhouse\n##s\n.\nun\n##want\n##ed\n";

    #[test]
    fn words_are_cut_into_pieces() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("vocab.txt");
        std::fs::write(&file, VOCAB).unwrap();
        let tokenizer = Tokenizer::from_file(&file).unwrap();
        assert_eq!(tokenizer.vocab_size(), 12);
        assert_eq!(
            tokenizer.encode("The houses. unwanted dog").unwrap(),
            [5, 6, 7, 8, 9, 10, 11, 1]
        );
        assert_eq!(tokenizer.decode(&[5, 6, 7, 8]), "the houses.");
        let special = tokenizer.special_tokens().unwrap();
        assert_eq!([special.pad, special.cls, special.sep, special.mask], [0, 2, 3, 4]);
        assert_eq!(special.vocab_size, 12);
        let same = Tokenizer::from_json(&tokenizer.to_json()).unwrap();
        assert_eq!(same.encode("unwanted").unwrap(), [9, 10, 11]);

        std::fs::write(&file, format!("{VOCAB}House\n")).unwrap();
        let cased = Tokenizer::from_file(&file).unwrap();
        assert_eq!(cased.encode("House house The").unwrap(), [12, 6, 1]);
    }

    #[test]
    fn what_is_no_vocabulary_is_refused() {
        let error = |text: &str| super::tokenizer_json(text).unwrap_err().to_string();
        assert_eq!(error("a\nb\na\n"), "tokenizer: the vocabulary has 'a' twice, in lines 1 and 3");
        assert!(error("[PAD]\n[CLS]\n").contains("no [UNK], [SEP], [MASK]: a vocab.txt"));
    }
}
