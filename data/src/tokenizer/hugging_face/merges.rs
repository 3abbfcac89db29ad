//! Merges of byte pairs, checked before the crate `tokenizers` reads them: it panics at one whose result is longer than every
//! token, or whose second token is shorter than the prefix of tokens within words.

use serde::Deserialize;
use serde::de::IgnoredAny;
use std::collections::HashMap;

/// The part of a file that says how tokens are merged.
#[derive(Deserialize)]
struct OfMerges {
    model: Model,
}

#[derive(Deserialize)]
struct Model {
    vocab: HashMap<String, IgnoredAny>,
    merges: Vec<Merge>,
    continuing_subword_prefix: Option<String>,
}

/// Two tokens, in either form in which files have them.
#[derive(Deserialize)]
#[serde(untagged)]
enum Merge {
    Text(String),
    Pair(String, String),
}

/// Says what is wrong with the merges of a file. Of what is no file with merges the crate says more.
pub fn fault(json: &str) -> Option<String> {
    let model = match serde_json::from_str::<OfMerges>(json) {
        Ok(parts) => parts.model,
        Err(error) if error.to_string().starts_with("duplicate") => return Some(error.to_string()),
        Err(_) => return None,
    };
    let longest = model.vocab.keys().map(String::len).max().unwrap_or(0);
    let prefix = model.continuing_subword_prefix.unwrap_or_default();
    for (index, merge) in model.merges.iter().enumerate() {
        let (first, second) = match merge {
            Merge::Text(text) if text.starts_with("#version") => continue,
            Merge::Text(text) => text.split_once(' ')?,
            Merge::Pair(first, second) => (first.as_str(), second.as_str()),
        };
        let end = second.get(prefix.len()..);
        if end.is_none_or(|end| first.len() + end.len() > longest) {
            return Some(format!("merge {index}, of '{first}' and '{second}', makes no token"));
        }
    }
    None
}
