//! Tokenizers described by a Hugging Face `tokenizer.json`, run by the `tokenizers` crate with a regex engine in
//! Rust, without a C library.

use super::words::{WordCaches, WordRule};
use ferrotron_tensor::{Error, Result};
use std::sync::Arc;
use tokenizers::{Model, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

/// A loaded `tokenizer.json`; clones share it.
#[derive(Clone)]
pub struct HuggingFaceTokenizer(Arc<Loaded>);

struct Loaded {
    json: String,
    tokenizer: tokenizers::Tokenizer,
    vocab_size: usize,
    /// The rule by which words can be cut, if it is known, and the tokens of words.
    words: Option<(WordRule, WordCaches)>,
}

impl HuggingFaceTokenizer {
    /// Loads the text of a `tokenizer.json`. Its truncation and padding are disabled: a training text is one long
    /// sequence.
    ///
    /// # Errors
    /// Errors, with the message of the `tokenizers` crate, if it rejects the text.
    pub fn from_json(json: &str) -> Result<Self> {
        let mut tokenizer = load(json)?;
        tokenizer.with_truncation(None).map_err(failed("load"))?;
        tokenizer.with_padding(None);
        // Ids may have gaps, so the largest id determines the size.
        let largest = tokenizer.get_vocab(true).into_values().max();
        let Some(largest) = largest else {
            return Err(Error::io("tokenizer", "the vocabulary of the tokenizer.json is empty"));
        };
        let vocab_size = largest as usize + 1;
        let rule = WordRule::of_tokenizer(json, tokenizer.get_vocab(false).keys());
        let words = rule.map(|rule| (rule, WordCaches::default()));
        let json = json.to_string();
        Ok(HuggingFaceTokenizer(Arc::new(Loaded { json, tokenizer, vocab_size, words })))
    }

    /// The file's text, unchanged.
    pub fn json(&self) -> &str {
        &self.0.json
    }

    /// The largest id plus one.
    pub fn vocab_size(&self) -> usize {
        self.0.vocab_size
    }

    /// The id of a token by its text.
    pub(super) fn id(&self, token: &str) -> Option<u32> {
        self.0.tokenizer.token_to_id(token)
    }

    pub(super) fn end_of_text(&self) -> Option<u32> {
        let id = |name: &&str| self.0.tokenizer.token_to_id(name);
        ["<|endoftext|>", "<|end_of_text|>", "</s>"].iter().find_map(id)
    }

    pub(super) fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let Loaded { tokenizer, words: Some((rule, caches)), .. } = &*self.0 else {
            return self.encode_whole(text);
        };
        // Added tokens and the normalizer come first, as in the crate.
        let added = tokenizer.get_added_vocabulary();
        let parts = added.extract_and_normalize(tokenizer.get_normalizer(), text);
        let parts = parts.get_splits(OffsetReferential::Normalized, OffsetType::Byte);
        if rule.without_added_tokens && parts.iter().any(|(_, _, added)| added.is_some()) {
            return self.encode_whole(text);
        }
        caches.with(|cache| {
            let mut tokens = Vec::with_capacity(text.len() / 4);
            for (part, _, added) in &parts {
                match added {
                    Some(added) => tokens.extend(added.iter().map(|token| token.id)),
                    None => rule.pattern.try_for_each_word(part, |word| {
                        cache.append(word, &mut tokens, |word| self.word(word))
                    })?,
                }
            }
            Ok(tokens)
        })
    }

    /// Encodes a text by the crate alone.
    fn encode_whole(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self.0.tokenizer.encode_fast(text, false).map_err(failed("encode"))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The tokens of a word without added tokens.
    fn word(&self, word: &str) -> Result<Vec<u32>> {
        let mut parts = PreTokenizedString::from(word);
        if let Some(pre_tokenizer) = self.0.tokenizer.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut parts).map_err(failed("encode"))?;
        }
        let model = self.0.tokenizer.get_model();
        parts.tokenize(|part| model.tokenize(part.get())).map_err(failed("encode"))?;
        let encoding = parts.into_encoding(None, 0, OffsetType::None).map_err(failed("encode"))?;
        Ok(encoding.get_ids().to_vec())
    }

    pub(super) fn decode(&self, tokens: &[u32]) -> String {
        let unknown = |token: &u32| self.0.tokenizer.id_to_token(*token).is_none();
        let mut text = String::new();
        // The crate drops unknown ids; here they become replacement characters.
        for run in tokens.chunk_by(|a, b| unknown(a) == unknown(b)) {
            match self.0.tokenizer.decode(run, false) {
                Ok(decoded) if !unknown(&run[0]) => text.push_str(&decoded),
                _ => text.extend(run.iter().map(|_| char::REPLACEMENT_CHARACTER)),
            }
        }
        text
    }
}

/// Loads a file. Through `parse` its parts are compiled once, in the crate of tokenizers.
fn load(json: &str) -> Result<tokenizers::Tokenizer> {
    json.parse().map_err(failed("load"))
}

/// Converts an error of the `tokenizers` crate.
fn failed(what: &'static str) -> impl Fn(tokenizers::Error) -> Error {
    move |error| Error::io("tokenizer", format!("cannot {what} with the tokenizer.json: {error}"))
}
