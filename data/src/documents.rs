//! Plain text as documents of sentences.
//!
//! Blank lines separate documents. A sentence ends at the end of a line, and behind `.`, `!` or `?`, with the quotes
//! and brackets that close there, if white space follows.

use super::{DataConfig, Split, TokenSource, shard};
use crate::tokenizer::Tokenizer;
use ferrotron_tensor::{Error, Result};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

/// Documents of tokenized sentences, in memory: 4 bytes a token. Clones and parts share them.
///
/// ```
/// use ferrotron_data::Documents;
/// use ferrotron_data::tokenizer::Tokenizer;
/// let text = "It rains. Take an umbrella!\nOr stay.\n\nAnother document.";
/// let documents = Documents::from_text(text, &Tokenizer::Byte)?;
/// assert_eq!((documents.num_documents(), documents.num_sentences()), (2, 4));
/// assert_eq!(Tokenizer::Byte.decode(documents.sentence(1)), "Take an umbrella!");
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Documents {
    tokens: Arc<[u32]>,
    /// The end of each sentence in `tokens`.
    ends: Arc<[usize]>,
    /// The sentences of each document.
    documents: Vec<Range<usize>>,
}

impl Documents {
    /// Tokenizes `text`, each sentence by itself. Sentences without a token are left out.
    ///
    /// # Errors
    /// Errors as [`Tokenizer::encode`].
    pub fn from_text(text: &str, tokenizer: &Tokenizer) -> Result<Documents> {
        let (mut tokens, mut ends, mut documents) = (Vec::new(), Vec::new(), Vec::new());
        let mut first = 0;
        for line in text.lines().chain([""]) {
            if line.trim().is_empty() && first < ends.len() {
                documents.push(first..ends.len());
                first = ends.len();
            }
            for sentence in sentences(line) {
                let encoded = tokenizer.encode(sentence)?;
                if !encoded.is_empty() {
                    tokens.extend(encoded);
                    ends.push(tokens.len());
                }
            }
        }
        Ok(Documents { tokens: tokens.into(), ends: ends.into(), documents })
    }

    /// Opens the text files of `config`, for training and for validation. A document ends with its file.
    ///
    /// # Errors
    /// Those of [`DataConfig::files`]; a file that cannot be read or is not text; as [`Documents::from_text`] and, if
    /// there are no validation files, as [`Documents::split`].
    pub fn open(
        config: &DataConfig,
        tokenizer: &Tokenizer,
    ) -> Result<(Documents, Option<Documents>)> {
        let read = |files: &[PathBuf]| -> Result<Documents> {
            let purpose = "of which masked sentences could be made: give the text itself";
            let texts = files.iter().map(|file| shard::read_text(file, purpose));
            Documents::from_text(&texts.collect::<Result<Vec<_>>>()?.join("\n\n"), tokenizer)
        };
        let (train, validation) = config.files()?;
        let train = read(&train)?;
        match validation.is_empty() {
            true => train.split(config.split),
            false => Ok((train, Some(read(&validation)?))),
        }
    }

    /// Number of documents.
    pub fn num_documents(&self) -> usize {
        self.documents.len()
    }

    /// Number of sentences.
    pub fn num_sentences(&self) -> usize {
        self.documents.iter().map(ExactSizeIterator::len).sum()
    }

    /// The tokens of a sentence, counted over all documents that were read.
    ///
    /// # Panics
    /// Panics if there is no such sentence.
    pub fn sentence(&self, index: usize) -> &[u32] {
        self.tokens_of(index..index + 1)
    }

    /// The tokens of consecutive sentences.
    pub(super) fn tokens_of(&self, sentences: Range<usize>) -> &[u32] {
        &self.tokens[self.span(&sentences)]
    }

    /// The sentences of each document.
    pub fn documents(&self) -> &[Range<usize>] {
        &self.documents
    }

    /// The tokens of all documents, one after another.
    pub fn tokens(&self) -> impl Iterator<Item = u32> + '_ {
        self.documents.iter().flat_map(|document| self.tokens[self.span(document)].iter().copied())
    }

    /// All tokens as a stream of a vocabulary of `vocab_size`.
    ///
    /// # Errors
    /// A token that is not below `vocab_size`.
    pub fn token_source(&self, vocab_size: usize) -> Result<TokenSource> {
        TokenSource::from_tokens(self.tokens().collect(), vocab_size)
    }

    /// The documents for training and those for validation, in proportion to sentences. The document at the border is
    /// cut between two sentences.
    ///
    /// # Errors
    /// No sentence for training.
    pub fn split(&self, split: Split) -> Result<(Documents, Option<Documents>)> {
        let [training, validation, _] = split.tokens(self.num_sentences() as u64);
        let part = |from: u64, to: u64| {
            let (from, to, mut before) = (from as usize, to as usize, 0);
            let mut documents = Vec::new();
            for document in &self.documents {
                let cut =
                    |at: usize| document.start + at.clamp(before, before + document.len()) - before;
                let kept = cut(from)..cut(to);
                before += document.len();
                if !kept.is_empty() {
                    documents.push(kept);
                }
            }
            Documents { documents, ..self.clone() }
        };
        if training == 0 {
            let sentences = self.num_sentences();
            let message = format!(
                "of {sentences} sentences none is left for training: use more data or hold out less with \
                 --valid-fraction or --split"
            );
            return Err(Error::value("data", message));
        }
        let held_out = (validation > 0).then(|| part(training, training + validation));
        Ok((part(0, training), held_out))
    }

    fn span(&self, sentences: &Range<usize>) -> Range<usize> {
        let start = |sentence: usize| if sentence == 0 { 0 } else { self.ends[sentence - 1] };
        start(sentences.start)..start(sentences.end)
    }
}

/// The sentences of a line, without white space around them.
pub(crate) fn sentences(line: &str) -> Vec<&str> {
    let closes = |c: char| ".!?\"')]}\u{2019}\u{201d}\u{bb}".contains(c);
    let (mut found, mut start, mut rest) = (Vec::new(), 0, line.char_indices().peekable());
    while let Some((at, c)) = rest.next() {
        if !".!?".contains(c) {
            continue;
        }
        let mut end = at + c.len_utf8();
        while let Some((at, c)) = rest.next_if(|&(_, c)| closes(c)) {
            end = at + c.len_utf8();
        }
        if rest.peek().is_none_or(|(_, c)| c.is_whitespace()) {
            found.push(line[start..end].trim());
            start = end;
        }
    }
    found.push(line[start..].trim());
    found.retain(|sentence| !sentence.is_empty());
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentences_end_as_stated() {
        for (line, want) in [
            ("One. Two? Three!", &["One.", "Two?", "Three!"][..]),
            ("3.14 is e.g. a number", &["3.14 is e.g.", "a number"]),
            (
                "\u{201c}Who?!\u{201d} he asked. (Nobody.) Well...",
                &["\u{201c}Who?!\u{201d}", "he asked.", "(Nobody.)", "Well..."],
            ),
            ("  no end  ", &["no end"]),
            (" . ", &["."]),
            ("", &[]),
        ] {
            assert_eq!(sentences(line), want, "{line:?}");
        }
    }

    #[test]
    fn a_split_cuts_between_sentences() {
        let text = "a. b. c.\nd.\n \n\n\ne. f.\r\n\r\ng. h. i. j.";
        let documents = Documents::from_text(text, &Tokenizer::Byte).unwrap();
        assert_eq!(documents.documents(), [0..4, 4..6, 6..10]);
        assert_eq!(documents.tokens().count(), 20);
        let of = |part: &Documents| Tokenizer::Byte.decode(&part.tokens().collect::<Vec<u32>>());
        let (train, held_out) = documents.split(Split::valid_fraction(0.5).unwrap()).unwrap();
        assert_eq!(train.documents(), [0..4, 4..5]);
        assert_eq!(
            (of(&train).as_str(), of(&held_out.unwrap()).as_str()),
            ("a.b.c.d.e.", "f.g.h.i.j.")
        );
        let (all, none) = documents.split(Split::valid_fraction(0.0).unwrap()).unwrap();
        assert_eq!((all.num_sentences(), none.is_none()), (10, true));
        let one = Documents::from_text("a", &Tokenizer::Byte).unwrap();
        let error = one.split(Split::default()).unwrap_err().to_string();
        assert!(error.contains("of 1 sentences none is left"), "{error}");
    }
}
