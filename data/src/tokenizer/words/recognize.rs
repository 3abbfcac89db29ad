//! Recognizes in a `tokenizer.json` how its words can be cut.

use super::pattern::{CL100K, O200K, WordPattern};
use serde::Deserialize;
use serde_json::Value;

/// SentencePiece's character for a space.
const META_SPACE: char = '\u{2581}';

/// The way to cut the words of a tokenizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WordRule {
    pub pattern: WordPattern,
    /// Whether a space is put in front of a text's first word alone, and not behind added tokens.
    pub in_front_alone: bool,
    /// Whether the model is of byte pairs that merge within the whole word and lose no character, so that windows of it can
    /// be joined.
    pub by_windows: bool,
}

/// The fields of the file that decide.
#[derive(Deserialize)]
struct File {
    #[serde(default)]
    pre_tokenizer: Value,
    model: Model,
}

#[derive(Deserialize)]
struct Model {
    #[serde(rename = "type")]
    kind: Option<String>,
    dropout: Option<f64>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    unk_token: Option<String>,
    byte_fallback: Option<bool>,
}

impl WordRule {
    /// Recognizes the text of a `tokenizer.json`, whose tokens `vocab` lists. None if its words are not known, or if a
    /// word has other tokens each time.
    pub fn of_tokenizer<'a>(
        json: &str,
        vocab: impl Iterator<Item = &'a String> + Clone,
    ) -> Option<WordRule> {
        let File { pre_tokenizer, model } = serde_json::from_str(json).ok()?;
        if model.dropout.is_some_and(|dropout| dropout > 0.0) {
            return None;
        }
        let byte_level = byte_level(&pre_tokenizer);
        let is_empty = |text: &Option<String>| text.as_ref().is_none_or(|text| text.is_empty());
        // Else the tokens of a part depend on its place.
        let by_windows = model.kind.as_deref() == Some("BPE")
            && is_empty(&model.continuing_subword_prefix)
            && is_empty(&model.end_of_word_suffix)
            && model.keeps_all_characters(byte_level.is_some(), vocab.clone());
        let rule = |pattern, by_windows| WordRule { pattern, in_front_alone: false, by_windows };
        if let Some(pattern) = byte_level {
            return Some(rule(pattern, by_windows));
        }
        if let Some(pattern) = between_spaces(&pre_tokenizer) {
            return Some(rule(pattern, false));
        }
        let undivided = undivided(&pre_tokenizer).filter(|_| by_windows)?;
        match joins_spaces(vocab) {
            true => Some(WordRule { pattern: WordPattern::Spaces(&[]), ..undivided }),
            false => Some(undivided),
        }
    }
}

impl Model {
    /// Whether each character has a token, in the order of the text. The crate leaves out characters that have none, and
    /// with bytes for some characters alone it gives an unknown one behind them.
    fn keeps_all_characters<'a>(
        &self,
        is_byte_level: bool,
        vocab: impl Iterator<Item = &'a String> + Clone,
    ) -> bool {
        let has_all =
            |is_byte: fn(&str) -> bool| vocab.clone().filter(|token| is_byte(token)).count() == 256;
        match self.byte_fallback {
            _ if is_byte_level && has_all(is_visible_byte) => true,
            Some(true) => !is_byte_level && has_all(is_fallback_byte),
            _ => self.unk_token.is_some(),
        }
    }
}

/// Whether this is one of the 256 characters that spell bytes in byte-level vocabularies.
fn is_visible_byte(token: &str) -> bool {
    let mut characters = token.chars();
    let visible = |c: char| matches!(c as u32, 33..=126 | 161..=172 | 174..=323);
    characters.next().is_some_and(visible) && characters.next().is_none()
}

/// Whether this is `<0x00>` to `<0xFF>`, a byte of a character beyond the vocabulary.
fn is_fallback_byte(token: &str) -> bool {
    let digits = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    let is_digit = |digit: u8| matches!(digit, b'0'..=b'9' | b'A'..=b'F');
    digits.is_some_and(|digits| digits.len() == 2 && digits.bytes().all(is_digit))
}

fn kind(json: &Value) -> &str {
    json["type"].as_str().unwrap_or("")
}

/// The pre-tokenizers that are applied in turn.
fn sequence(pre_tokenizer: &Value) -> Vec<&Value> {
    match (kind(pre_tokenizer), pre_tokenizer["pretokenizers"].as_array()) {
        ("Sequence", Some(parts)) => parts.iter().collect(),
        _ => vec![pre_tokenizer],
    }
}

/// The patterns of byte-level byte pairs.
fn byte_level(pre_tokenizer: &Value) -> Option<WordPattern> {
    let parts = sequence(pre_tokenizer);
    let (byte_level, before) = parts.split_last()?;
    let is_byte_level = kind(byte_level) == "ByteLevel" && byte_level["add_prefix_space"] == false;
    let has_regex = byte_level.get("use_regex").is_none_or(|value| value == true);
    match (is_byte_level, has_regex, before) {
        (true, true, []) => Some(WordPattern::Gpt2),
        (true, true, [cut]) => (kind(cut) == "Digits" && cut["individual_digits"] == true)
            .then_some(WordPattern::Gpt2SingleDigits),
        (true, false, [cut]) => {
            let isolates = kind(cut) == "Split"
                && cut["behavior"] == "Isolated"
                && cut.get("invert").is_none_or(|value| value == false);
            let pattern = cut["pattern"]["Regex"].as_str().filter(|_| isolates)?;
            if pattern == O200K {
                return Some(WordPattern::O200k);
            }
            [("{1,3}", 3), ("", 1)].into_iter().find_map(|(quantifier, digits)| {
                (pattern == CL100K.replace("DIGITS", quantifier))
                    .then_some(WordPattern::Cl100k { digits })
            })
        }
        _ => None,
    }
}

/// Pre-tokenizers that cut at spaces, and elsewhere by the characters between two spaces alone.
fn between_spaces(pre_tokenizer: &Value) -> Option<WordPattern> {
    if kind(pre_tokenizer) == "BertPreTokenizer" {
        return Some(WordPattern::Marks);
    }
    let parts = sequence(pre_tokenizer);
    let (first, others) = parts.split_first()?;
    let cuts = match kind(first) {
        "BertPreTokenizer" | "Whitespace" | "WhitespaceSplit" => true,
        _ => is_meta_space(first, true, &["always", "never"]),
    };
    let is_local = |part: &&Value| match kind(part) {
        "BertPreTokenizer" | "Whitespace" | "WhitespaceSplit" | "Punctuation" => true,
        _ => is_meta_space(part, true, &["always", "never"]),
    };
    (cuts && others.iter().all(is_local)).then_some(WordPattern::Spaces(&[' ']))
}

/// Whether this writes spaces as U+2581, puts one in front as one of `schemes` says, and cuts in front of each.
fn is_meta_space(part: &Value, splits: bool, schemes: &[&str]) -> bool {
    let scheme = match (part["prepend_scheme"].as_str(), &part["add_prefix_space"]) {
        (Some(scheme), _) => scheme,
        (None, Value::Bool(false)) => "never",
        (None, _) => "always",
    };
    kind(part) == "Metaspace"
        && part["replacement"].as_str() == Some("\u{2581}")
        && part.get("split").is_none_or(|value| value == true) == splits
        && schemes.contains(&scheme)
}

/// Pre-tokenizers that leave the cuts to the vocabulary.
fn undivided(pre_tokenizer: &Value) -> Option<WordRule> {
    let is_split = kind(pre_tokenizer) == "Split"
        && pre_tokenizer["pattern"]["String"] == " "
        && pre_tokenizer["behavior"] == "MergedWithPrevious";
    if pre_tokenizer.is_null() || is_split {
        let pattern = WordPattern::Spaces(&[META_SPACE]);
        return Some(WordRule { pattern, in_front_alone: false, by_windows: true });
    }
    let schemes = ["always", "never", "first"];
    is_meta_space(pre_tokenizer, false, &schemes).then(|| WordRule {
        pattern: WordPattern::Spaces(&[' ', META_SPACE]),
        in_front_alone: pre_tokenizer["prepend_scheme"] == "first",
        by_windows: true,
    })
}

/// Whether tokens may reach over the beginning of a word: byte pairs cannot if no token has a U+2581 behind another
/// character, since each merge makes a token of the vocabulary.
fn joins_spaces<'a>(mut vocab: impl Iterator<Item = &'a String>) -> bool {
    let mut has_space = false;
    let joins = |token: &String| {
        has_space |= token.chars().eq([META_SPACE]);
        token.trim_start_matches(META_SPACE).contains(META_SPACE)
    };
    // Without a token of its own the space would be unknown, and be joined with others that are.
    vocab.any(joins) || !has_space
}
