//! The tokenizer of runs whose data are files of tokens: a text is a list of ids, as Megatron-LM's `NullTokenizer` has it.

use ferrotron_tensor::{Error, Result};

pub(super) fn encode(text: &str, vocab_size: usize) -> Result<Vec<u32>> {
    let id = |word: &str| match word.parse::<u32>() {
        Ok(id) if (id as usize) < vocab_size => Ok(id),
        _ => {
            // A line of a binary file may be long.
            let word: String = word.chars().take(40).collect();
            Err(Error::value(
                "tokenizer",
                format!(
                    "'{word}' is no token id of 0 to {}: with --vocab-size in place of a tokenizer a text is a list of ids; \
                     for other text train with --tokenizer",
                    vocab_size.saturating_sub(1)
                ),
            ))
        }
    };
    text.split_whitespace().map(id).collect()
}

pub(super) fn decode(tokens: &[u32]) -> String {
    tokens.iter().map(u32::to_string).collect::<Vec<String>>().join(" ")
}

#[cfg(test)]
mod tests {
    use crate::tokenizer::Tokenizer;

    #[test]
    fn a_text_is_a_list_of_ids() {
        let tokenizer = Tokenizer::Null(50_304);
        assert_eq!(tokenizer.encode("50303 0\n7 ").unwrap(), [50303, 0, 7]);
        assert_eq!(tokenizer.decode(&[50303, 0, 7]), "50303 0 7");
        assert_eq!((tokenizer.vocab_size(), tokenizer.end_of_text()), (50_304, None));
        let same = Tokenizer::from_json(&tokenizer.to_json()).unwrap();
        assert_eq!((same.name(), same.vocab_size()), ("null", 50_304));
        for word in ["50304", "-1", "word"] {
            let error = tokenizer.encode(&format!("5 {word}")).unwrap_err().to_string();
            assert!(error.contains(&format!("'{word}' is no token id of 0 to 50303")), "{error}");
        }
        for json in [r#"{"kind": "null"}"#, r#"{"kind": "null", "vocab_size": 0}"#] {
            let error = Tokenizer::from_json(json).unwrap_err().to_string();
            assert!(error.contains("vocab_size"), "{error}");
        }
    }
}
