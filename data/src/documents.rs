//! Documents of sentences: of plain text, or of indexed data sets.
//!
//! In plain text blank lines separate documents. A sentence ends at the end of a line, and behind `.`, `!` or `?`, with the
//! quotes and brackets that close there, if white space follows. In an indexed data set each sequence is a sentence, as
//! `ferrotron tokenize --split-sentences` and Megatron-LM write them.

use super::indexed_dataset::IndexedDataset;
use super::shard::Shard;
use super::source::{MAX_OPEN, Part};
use super::token_fingerprint::{self, holds_pairs};
use super::{Blend, DataConfig, Split, TokenSource, shard};
use crate::tokenizer::Tokenizer;
use ferrotron_tensor::{Error, Result};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The option and the command that make a data set of sentences.
const REMEDY: &str =
    "make it anew by `ferrotron tokenize --split-sentences`, or give the text itself by --data";

/// Documents of tokenized sentences. Clones and parts share them.
///
/// Tokens of text are in memory, 4 bytes each; those of indexed data sets are read when they are asked for. Each sentence
/// takes 8 bytes of memory and each document 16.
///
/// ```
/// use ferrotron_data::Documents;
/// use ferrotron_data::tokenizer::Tokenizer;
/// let text = "It rains. Take an umbrella!\nOr stay.\n\nAnother document.";
/// let documents = Documents::from_text(text, &Tokenizer::Byte)?;
/// assert_eq!((documents.num_documents(), documents.num_sentences()), (2, 4));
/// assert_eq!(Tokenizer::Byte.decode(&documents.sentence(1)?), "Take an umbrella!");
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Documents {
    /// The tokens of all sentences, one after another.
    source: TokenSource,
    /// The end of each sentence in `source`.
    ends: Arc<[u64]>,
    /// The sentences of each document.
    documents: Arc<[Range<usize>]>,
}

/// Files and sets whose sentences are collected.
#[derive(Default)]
struct Collected {
    parts: Vec<Part>,
    ends: Vec<u64>,
    documents: Vec<Range<usize>>,
}

impl Documents {
    /// Tokenizes `text`, each sentence by itself. Sentences without a token are left out.
    ///
    /// # Errors
    /// Errors as [`Tokenizer::encode`].
    pub fn from_text(text: &str, tokenizer: &Tokenizer) -> Result<Documents> {
        let mut collected = Collected::default();
        collected.add_text("text in memory", text, tokenizer)?;
        collected.finish(tokenizer.vocab_size())
    }

    /// Opens the files of `config`, text or indexed data sets of sentences, for training and for validation. A document ends
    /// with its file.
    ///
    /// # Errors
    /// Those of [`DataConfig::files`]; a file that cannot be read or is neither; a set without sentences, or of another
    /// tokenizer; as [`Documents::from_text`] and, if there are no validation files, as [`Documents::split`].
    pub fn open(
        config: &DataConfig,
        tokenizer: &Tokenizer,
    ) -> Result<(Documents, Option<Documents>)> {
        let (train, validation) = config.files()?;
        let (train, _) = Documents::of_files(&train, tokenizer)?;
        match validation.is_empty() {
            true => train.split(config.split),
            false => Ok((train, Some(Documents::of_files(&validation, tokenizer)?.0))),
        }
    }

    /// Opens the files of `config` for training and for validation, and returns beside them the documents of each path of
    /// [`DataConfig::validation_data`], in this order: parts of those for validation.
    ///
    /// # Errors
    /// Errors of [`Documents::open`]; a path with empty files alone.
    pub fn open_with_sets(
        config: &DataConfig,
        tokenizer: &Tokenizer,
    ) -> Result<(Documents, Documents, Vec<Documents>)> {
        let (train, sets) = config.files_of_sets()?;
        let (train, _) = Documents::of_files(&train, tokenizer)?;
        let (validation, ends) = Documents::of_files(&sets.concat(), tokenizer)?;
        let mut file = 0;
        let set = |files: &Vec<PathBuf>| {
            let start = ends[file];
            file += files.len();
            let documents = validation.documents[start..ends[file]].into();
            Documents { documents, ..validation.clone() }
        };
        let sets = sets.iter().map(set).collect();
        Ok((train, validation, sets))
    }

    /// The documents of `files`; and 0, and the number of documents up to the end of each file.
    fn of_files(files: &[PathBuf], tokenizer: &Tokenizer) -> Result<(Documents, Vec<usize>)> {
        let (mut collected, mut ends) = (Collected::default(), vec![0]);
        for (index, file) in files.iter().enumerate() {
            collected.add_file(file, index, tokenizer)?;
            ends.push(collected.documents.len());
        }
        Ok((collected.finish(tokenizer.vocab_size())?, ends))
    }

    /// The documents of the sets of a blend from [`BlendedDataset::open_sentences`](crate::BlendedDataset::open_sentences),
    /// laid end to end. Documents without a sentence are left out.
    ///
    /// # Errors
    /// A set that is damaged; one without sentences.
    pub fn of_blend(blend: &Blend) -> Result<Documents> {
        let mut collected = Collected::default();
        for part in blend.parts() {
            collected.add_set(&part.shard, &part.sequences)?;
        }
        collected.finish(blend.vocab_size())
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
    /// # Errors
    /// A file that cannot be read; a token beyond the vocabulary.
    ///
    /// # Panics
    /// Panics if there is no such sentence.
    pub fn sentence(&self, index: usize) -> Result<Vec<u32>> {
        self.tokens_of(index..index + 1)
    }

    /// The tokens of consecutive sentences.
    ///
    /// # Errors
    /// A file that cannot be read; a token beyond the vocabulary.
    pub(super) fn tokens_of(&self, sentences: Range<usize>) -> Result<Vec<u32>> {
        let tokens = self.span(&sentences);
        let mut read = vec![0; (tokens.end - tokens.start) as usize];
        self.source.read(tokens.start, &mut read)?;
        Ok(read)
    }

    /// Number of tokens of consecutive sentences.
    pub(super) fn num_tokens_of(&self, sentences: Range<usize>) -> usize {
        let tokens = self.span(&sentences);
        (tokens.end - tokens.start) as usize
    }

    /// The sentences of each document.
    pub fn documents(&self) -> &[Range<usize>] {
        &self.documents
    }

    /// The tokens of all documents as a stream.
    pub fn token_source(&self) -> TokenSource {
        let ends = [self.documents.first(), self.documents.last()];
        let tokens = match ends {
            [Some(first), Some(last)] => self.span(&(first.start..last.end)),
            _ => 0..0,
        };
        self.source.slice(tokens).expect("documents lie within their source")
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
            for document in self.documents.iter() {
                let cut =
                    |at: usize| document.start + at.clamp(before, before + document.len()) - before;
                let kept = cut(from)..cut(to);
                before += document.len();
                if !kept.is_empty() {
                    documents.push(kept);
                }
            }
            Documents { documents: documents.into(), ..self.clone() }
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

    fn span(&self, sentences: &Range<usize>) -> Range<u64> {
        let start = |sentence: usize| if sentence == 0 { 0 } else { self.ends[sentence - 1] };
        start(sentences.start)..start(sentences.end)
    }
}

impl Collected {
    fn finish(self, vocab_size: usize) -> Result<Documents> {
        let source = TokenSource::from_parts(self.parts, vocab_size);
        source.check_if_short()?;
        Ok(Documents { source, ends: self.ends.into(), documents: self.documents.into() })
    }

    /// Adds file number `index`.
    fn add_file(&mut self, file: &Path, index: usize, tokenizer: &Tokenizer) -> Result<()> {
        let Some(set) = IndexedDataset::index_path(file) else {
            let purpose = "of which masked sentences could be made: give the text itself, or a data set by `ferrotron tokenize \
                           --split-sentences`";
            let text = shard::read_text(file, purpose)?;
            return self.add_text(&file.display().to_string(), &text, tokenizer);
        };
        let dataset = IndexedDataset::open(&set)?;
        token_fingerprint::check(&set, tokenizer)?;
        let sequences = 0..dataset.num_sequences();
        let mut shard = Shard::indexed(dataset)?;
        if index >= MAX_OPEN {
            shard.close();
        }
        self.add_set(&Arc::new(shard), &sequences)
    }

    fn add_text(&mut self, name: &str, text: &str, tokenizer: &Tokenizer) -> Result<()> {
        let (mut tokens, mut first) = (Vec::new(), self.ends.len());
        let before = self.ends.last().copied().unwrap_or(0);
        for line in text.lines().chain([""]) {
            if line.trim().is_empty() && first < self.ends.len() {
                self.documents.push(first..self.ends.len());
                first = self.ends.len();
            }
            for sentence in sentences(line) {
                let encoded = tokenizer.encode(sentence)?;
                if !encoded.is_empty() {
                    tokens.extend(encoded);
                    self.ends.push(before + tokens.len() as u64);
                }
            }
        }
        let shard = Shard::owned(name, tokens);
        self.parts.push(Part { start: 0, len: shard.len, shard: Arc::new(shard) });
        Ok(())
    }

    /// Adds the documents of a data set that have some of its `sequences`.
    fn add_set(&mut self, shard: &Arc<Shard>, sequences: &Range<u64>) -> Result<()> {
        let dataset = shard.dataset()?;
        check_sentences(dataset)?;
        let (lengths, boundaries) = dataset.part(sequences.clone())?;
        let (mut start, before) = (self.ends.len(), self.ends.last().copied().unwrap_or(0));
        let mut end = before;
        self.ends.extend(lengths.into_iter().map(|length| {
            end += u64::from(length);
            end
        }));
        let place = |boundary: u64| (boundary - sequences.start) as usize;
        let (first, last) = (start, self.ends.len());
        for end in boundaries.into_iter().map(|at| first + place(at)).chain([last]) {
            if end > start {
                self.documents.push(start..end);
                start = end;
            }
        }
        let start = dataset.tokens_of(sequences.clone())?.start;
        self.parts.push(Part { shard: shard.clone(), start, len: end - before });
        Ok(())
    }
}

/// Errors if no document of a set has more than one sequence, or if its sequences are prompts and completions.
fn check_sentences(dataset: &IndexedDataset) -> Result<()> {
    let name = dataset.name();
    let why = match holds_pairs(Path::new(name)) {
        Some(true) => "they are prompts and completions".to_string(),
        _ if dataset.find_document(|sequences| sequences > 1)?.is_some() => return Ok(()),
        _ => format!("each of its {} documents is one sequence", dataset.num_documents()),
    };
    let message = format!("a bert takes sentences, but '{name}' has none: {why}; {REMEDY}");
    Err(Error::config("data", message))
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
    fn sets_are_parts_of_those_for_validation() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, text).unwrap();
            path
        };
        let data = vec![file("train.txt", "a. b.")];
        file("two/1.txt", "c. d.\n\ne.");
        file("two/2.txt", "f.");
        let validation_data = vec![folder.path().join("two"), file("other.txt", "g. h.")];
        let config = DataConfig { data, validation_data, split: Split::default() };
        let (train, all, sets) = Documents::open_with_sets(&config, &Tokenizer::Byte).unwrap();
        let text = |of: &Documents| Tokenizer::Byte.decode(&of.token_source().to_vec().unwrap());
        let found: Vec<String> = [&train, &all].into_iter().chain(&sets).map(text).collect();
        assert_eq!(found, ["a.b.", "c.d.e.f.g.h.", "c.d.e.f.", "g.h."]);
        assert_eq!(sets.iter().map(Documents::num_documents).collect::<Vec<_>>(), [3, 1]);
        file("other.txt", "");
        let error = Documents::open_with_sets(&config, &Tokenizer::Byte).unwrap_err().to_string();
        assert!(error.contains("other.txt' is empty"), "{error}");
    }

    #[test]
    fn a_split_cuts_between_sentences() {
        let text = "a. b. c.\nd.\n \n\n\ne. f.\r\n\r\ng. h. i. j.";
        let documents = Documents::from_text(text, &Tokenizer::Byte).unwrap();
        assert_eq!(documents.documents(), [0..4, 4..6, 6..10]);
        assert_eq!(documents.token_source().len(), 20);
        let of = |part: &Documents| Tokenizer::Byte.decode(&part.token_source().to_vec().unwrap());
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
