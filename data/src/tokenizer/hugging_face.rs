//! Tokenizers described by a Hugging Face `tokenizer.json`, run by the `tokenizers` crate with a regex engine in
//! Rust, without a C library.

mod chunks;
mod merges;
mod room;

use self::chunks::Chunks;
use self::room::Room;
use super::char_boundary;
use super::sizes::Sizes;
use super::words::{Piece, WordCaches, WordEncoder, WordPattern, WordRule, WordWriter};
use ferrotron_tensor::{Error, Result};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::ops::Range;
use std::sync::Arc;
use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::metaspace::PrependScheme;
use tokenizers::{
    AddedToken, Encoding, Model, ModelWrapper, OffsetReferential, OffsetType, PreTokenizedString,
    PreTokenizer, PreTokenizerWrapper,
};

/// A loaded `tokenizer.json`; clones share it.
#[derive(Clone)]
pub struct HuggingFaceTokenizer(Arc<Loaded>);

struct Loaded {
    json: String,
    tokenizer: tokenizers::Tokenizer,
    vocab_size: usize,
    /// If it is known how words can be cut.
    words: Option<Words>,
    room: Room,
}

struct Words {
    rule: WordRule,
    caches: WordCaches,
    chunks: Option<Chunks>,
    /// The pre-tokenizer without the space that it puts in front of texts, and without cuts.
    within: Option<PreTokenizerWrapper>,
}

impl Words {
    /// Whether the pre-tokenizer cuts at spaces, of which it finds none where the normalizer leaves none.
    fn cuts_within(&self) -> bool {
        matches!(self.within, Some(PreTokenizerWrapper::Split(_)))
    }
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
        let words = rule.map(|rule| Words {
            rule,
            caches: WordCaches::default(),
            chunks: Chunks::new(&tokenizer),
            within: within_words(&rule, tokenizer.get_pre_tokenizer()),
        });
        let json = json.to_string();
        Ok(HuggingFaceTokenizer(Arc::new(Loaded {
            json,
            tokenizer,
            vocab_size,
            words,
            room: Room::default(),
        })))
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

    /// Encodes a text part by part, with memory that does not grow with it if it is known how words can be cut.
    pub(super) fn encode(
        &self,
        text: &str,
        sizes: Sizes,
        give: &mut dyn FnMut(&[u32]) -> Result<()>,
    ) -> Result<()> {
        let Some(words) = &self.0.words else {
            let _place = self.0.room.take(text.len());
            let encoding = self.0.tokenizer.encode_fast(text, false).map_err(failed("encode"))?;
            return give(encoding.get_ids());
        };
        words.caches.with(|cache| {
            let writer = WordWriter::new(cache, text.len() / 4, sizes.window, give);
            self.run(words, text, sizes, writer).map(drop)
        })
    }

    /// Whether texts are encoded as a whole.
    #[cfg(feature = "preprocess")]
    pub(super) fn encodes_whole(&self) -> bool {
        self.0.words.is_none()
    }

    /// Bytes of the longest part of a text that is encoded or normalized as a whole: 0 if it is known to be short.
    #[cfg(feature = "preprocess")]
    pub(super) fn longest_whole(&self, text: &str, sizes: Sizes) -> Result<usize> {
        let Some(words) = &self.0.words else { return Ok(text.len()) };
        let by_windows = words.rule.by_windows && !words.cuts_within();
        if by_windows && words.chunks.as_ref().is_some_and(|chunks| !chunks.strips()) {
            return Ok(0);
        }
        words.caches.with(|cache| {
            self.run(
                words,
                text,
                sizes,
                WordWriter::measuring(cache, sizes.window, &mut |_| Ok(())),
            )
        })
    }

    /// Gives a text to the writer, chunk by chunk. Returns the bytes of the longest chunk, or of the longest word that the
    /// writer has measured.
    fn run<'a>(
        &'a self,
        words: &'a Words,
        text: &str,
        sizes: Sizes,
        writer: WordWriter<'a>,
    ) -> Result<usize> {
        let (loaded, pending) = (&*self.0, String::new());
        let mut parts = Parts { loaded, words, writer, pending, is_behind_added: false };
        let (mut rest, mut longest) = (text, 0);
        loop {
            let end = match &words.chunks {
                Some(chunks) => chunks.end(&loaded.tokenizer, rest, sizes.chunk),
                None => rest.len(),
            };
            longest = longest.max(end);
            let (chunk, behind) = rest.split_at(end);
            parts.append(chunk, rest.len() < text.len(), behind.is_empty())?;
            if behind.is_empty() {
                parts.writer.flush()?;
                return Ok(longest.max(parts.writer.longest()));
            }
            rest = behind;
        }
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

/// A text between added tokens, chunk by chunk.
struct Parts<'a> {
    loaded: &'a Loaded,
    words: &'a Words,
    writer: WordWriter<'a>,
    /// The normalized text whose words may go on in the next chunk.
    pending: String,
    /// Whether it begins behind an added token.
    is_behind_added: bool,
}

impl Parts<'_> {
    /// Appends a chunk: whether it is behind a cut, and whether the text ends with it.
    fn append(&mut self, chunk: &str, is_behind_cut: bool, is_last: bool) -> Result<()> {
        // Added tokens and the normalizer come first, as in the crate.
        let tokenizer = &self.loaded.tokenizer;
        let added = tokenizer.get_added_vocabulary();
        let parts = added.extract_and_normalize(tokenizer.get_normalizer(), chunk);
        let parts = parts.get_splits(OffsetReferential::Normalized, OffsetType::Byte);
        let searched = self.pending.len();
        for (number, (part, _, added)) in parts.iter().enumerate() {
            let part = match &self.words.chunks {
                Some(chunks) if number == 0 && is_behind_cut => chunks.behind_cut(part),
                _ => part,
            };
            if let Some(added) = added {
                let pending = std::mem::take(&mut self.pending);
                self.part(&pending)?;
                added.iter().for_each(|token| self.writer.token(token.id));
                self.is_behind_added = true;
            } else if self.pending.is_empty() && (is_last || number + 1 < parts.len()) {
                self.part(part)?;
            } else {
                self.pending.push_str(part);
            }
        }
        let cut = match is_last {
            true => Some(self.pending.len()),
            false => self.words.rule.pattern.last_cut(&self.pending, searched),
        };
        if let Some(cut) = cut {
            let rest = self.pending.split_off(cut);
            let pending = std::mem::replace(&mut self.pending, rest);
            self.part(&pending)?;
        }
        Ok(())
    }

    /// Writes the words of a normalized text.
    fn part(&mut self, mut text: &str) -> Result<()> {
        if text.is_empty() {
            return Ok(());
        }
        let Words { rule: WordRule { pattern, in_front_alone, .. }, .. } = *self.words;
        let has_prefix = !(std::mem::take(&mut self.is_behind_added) && in_front_alone);
        let encoder = Encoder { loaded: self.loaded, words: self.words, has_prefix: true };
        if !has_prefix {
            let first = pattern.first_word(text);
            self.writer.uncached(&text[..first], &Encoder { has_prefix, ..encoder })?;
            text = &text[first..];
        }
        self.writer.words(text, pattern, &encoder)
    }
}

/// Encodes words.
#[derive(Clone, Copy)]
struct Encoder<'a> {
    loaded: &'a Loaded,
    words: &'a Words,
    /// Whether a space may be put in front of a word.
    has_prefix: bool,
}

impl Encoder<'_> {
    fn encode(
        &self,
        text: &str,
        pre_tokenizer: Option<&PreTokenizerWrapper>,
        offsets: OffsetType,
    ) -> Result<Encoding> {
        let _place = self.loaded.room.take(text.len());
        let mut parts = PreTokenizedString::from(text);
        if let Some(pre_tokenizer) = pre_tokenizer {
            pre_tokenizer.pre_tokenize(&mut parts).map_err(failed("encode"))?;
        }
        let model = self.loaded.tokenizer.get_model();
        parts.tokenize(|part| model.tokenize(part.get())).map_err(failed("encode"))?;
        parts.into_encoding(None, 0, offsets).map_err(failed("encode"))
    }

    fn pre_tokenizer(&self, has_prefix: bool) -> Option<&PreTokenizerWrapper> {
        match has_prefix {
            true => self.loaded.tokenizer.get_pre_tokenizer(),
            false => self.words.within.as_ref(),
        }
    }
}

impl WordEncoder for Encoder<'_> {
    fn word(&self, word: &str) -> Result<Vec<u32>> {
        let word = self.whole(word);
        let encoding = self.encode(word, self.pre_tokenizer(self.has_prefix), OffsetType::None)?;
        Ok(encoding.get_ids().to_vec())
    }

    fn has_pieces(&self, word: &str) -> bool {
        self.words.rule.by_windows && !(self.words.cuts_within() && word.contains(' '))
    }

    fn whole<'a>(&self, word: &'a str) -> &'a str {
        match self.loaded.tokenizer.get_model() {
            ModelWrapper::WordPiece(model) => shortened(word, model.max_input_chars_per_word),
            _ => word,
        }
    }

    fn pieces(&self, word: &str, window: Range<usize>) -> Result<Vec<Piece>> {
        let is_byte_level = matches!(self.words.within, Some(PreTokenizerWrapper::ByteLevel(_)));
        let has_prefix = self.has_prefix && window.start == 0 && !is_byte_level;
        let start = window.start;
        let pre_tokenizer = self.pre_tokenizer(has_prefix);
        let encoding = self.encode(&word[window], pre_tokenizer, OffsetType::Byte)?;
        let places = encoding.get_ids().iter().zip(encoding.get_offsets());
        Ok(places
            .map(|(&id, &(from, to))| Piece { id, start: start + from, end: start + to })
            .collect())
    }
}

/// The beginning of a word of WordPieces that is unknown as a whole, since it has only letters and digits, and many more than
/// `most`: the beginning is as unknown.
fn shortened(word: &str, most: usize) -> &str {
    let enough = most.saturating_mul(8).saturating_add(64);
    let is_one = || word.chars().all(|c| c.is_alphabetic() || c.is_ascii_digit());
    match word.len() > enough && is_one() {
        true => &word[..char_boundary::floor(word, enough)],
        false => word,
    }
}

/// The pre-tokenizer for parts of words.
fn within_words(
    rule: &WordRule,
    pre_tokenizer: Option<&PreTokenizerWrapper>,
) -> Option<PreTokenizerWrapper> {
    match (pre_tokenizer?, rule.pattern) {
        (PreTokenizerWrapper::Metaspace(meta_space), _) => {
            let mut meta_space = meta_space.clone();
            meta_space.set_prepend_scheme(PrependScheme::Never);
            Some(meta_space.into())
        }
        (other, WordPattern::Spaces(_) | WordPattern::Marks) => Some(other.clone()),
        _ => Some(ByteLevel::new(false, false, false).into()),
    }
}

/// A file whose model is known to be of byte pairs, in parts. A model whose type is not asked for is read into a tree
/// first, which takes twice the memory.
#[derive(Deserialize)]
struct OfBytePairs {
    model: BPE,
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

impl OfBytePairs {
    fn tokenizer(mut self) -> tokenizers::Result<tokenizers::Tokenizer> {
        let empty = json!({ "type": "BPE", "vocab": {}, "merges": [] });
        self.others.insert("model".to_string(), empty);
        let mut tokenizer: tokenizers::Tokenizer =
            Value::Object(self.others).to_string().parse()?;
        tokenizer.with_model(self.model);
        tokenizer.add_tokens(self.added_tokens)?; // their ids follow from the model
        Ok(tokenizer)
    }
}

/// Loads a file. What `parse` reads is compiled once, in the crate of tokenizers.
fn load(json: &str) -> Result<tokenizers::Tokenizer> {
    if let Some(fault) = merges::fault(json) {
        return Err(failed("load")(fault.into()));
    }
    let tokenizer = match serde_json::from_str::<OfBytePairs>(json) {
        Ok(parts) => parts.tokenizer(),
        Err(_) => json.parse(),
    };
    tokenizer.map_err(failed("load"))
}

/// Converts an error of the `tokenizers` crate.
fn failed(what: &'static str) -> impl Fn(tokenizers::Error) -> Error {
    move |error| Error::io("tokenizer", format!("cannot {what} with the tokenizer.json: {error}"))
}
