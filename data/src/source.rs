//! A stream of tokens over one or more files, laid end to end without copying.

use super::Split;
use super::shard::Shard;
use crate::tokenizer::Tokenizer;
use ferrotron_tensor::{Error, Result};
use std::{fmt, ops::Range, path::Path, sync::Arc};

/// Files of a source that stay open; later ones are opened for each read. Samples come in random order, so no other choice
/// of files reads fewer of them anew.
pub(super) const MAX_OPEN: usize = 8;

/// Tokens up to which a stream is checked against the vocabulary when it is opened (a fraction of a second). So a wrong
/// tokenizer shows at once. Longer streams are checked as they are read.
const CHECK_AT_OPENING: u64 = 1 << 27;

/// Tokens that [`TokenSource::check`] reads at a time.
const CHECK_CHUNK: usize = 1 << 16;

/// A stream of tokens, or a part of one; clones and parts share the files.
///
/// ```
/// use ferrotron_data::{Split, TokenSource};
/// let source = TokenSource::from_tokens((0..10).collect(), 10)?;
/// let (train, validation) = source.split(Split::valid_fraction(0.2)?)?;
/// assert_eq!(train.to_vec()?, [0, 1, 2, 3, 4, 5, 6, 7]);
/// assert_eq!(validation.to_vec()?, [8, 9]);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Clone)]
pub struct TokenSource {
    parts: Arc<[Part]>,
    /// Position in the stream behind each part.
    ends: Arc<[u64]>,
    /// The part of the stream that this source covers.
    range: Range<u64>,
    vocab_size: usize,
}

/// Consecutive tokens of a file.
pub(super) struct Part {
    pub shard: Arc<Shard>,
    /// The first of them.
    pub start: u64,
    /// Number of tokens.
    pub len: u64,
}

impl TokenSource {
    /// Tokens in memory.
    ///
    /// # Errors
    /// A token that is not below `vocab_size`.
    pub fn from_tokens(tokens: Vec<u32>, vocab_size: usize) -> Result<Self> {
        TokenSource::from_shards(vec![Shard::owned("tokens in memory", tokens)], vocab_size)
    }

    /// Files, each of any format on the [module's page](super), in the order given. Text files are
    /// tokenized; in all of them tokens must be below the tokenizer's vocabulary size.
    ///
    /// # Errors
    /// A file that is missing, empty, truncated or malformed; text that the tokenizer refuses; a token
    /// beyond the vocabulary, found here in streams up to 2^27 tokens and by [`TokenSource::read`] in
    /// longer ones.
    pub fn open<P: AsRef<Path>>(paths: &[P], tokenizer: &Tokenizer) -> Result<Self> {
        let open = |(index, path): (usize, &P)| {
            let mut shard = Shard::open(path.as_ref(), tokenizer)?;
            if index >= MAX_OPEN {
                shard.close();
            }
            Ok(shard)
        };
        let shards: Result<Vec<Shard>> = paths.iter().enumerate().map(open).collect();
        TokenSource::from_shards(shards?, tokenizer.vocab_size())
    }

    fn from_shards(shards: Vec<Shard>, vocab_size: usize) -> Result<Self> {
        let whole = |shard: Shard| Part { start: 0, len: shard.len, shard: Arc::new(shard) };
        let source = TokenSource::from_parts(shards.into_iter().map(whole).collect(), vocab_size);
        source.check_if_short()?;
        Ok(source)
    }

    /// Parts of files, laid end to end.
    pub(super) fn from_parts(parts: Vec<Part>, vocab_size: usize) -> TokenSource {
        let sum = |end: &mut u64, part: &Part| {
            *end += part.len;
            Some(*end)
        };
        let ends: Vec<u64> = parts.iter().scan(0, sum).collect();
        let len = ends.last().copied().unwrap_or(0);
        TokenSource { parts: parts.into(), ends: ends.into(), range: 0..len, vocab_size }
    }

    /// Reads everything once if that takes a fraction of a second.
    ///
    /// # Errors
    /// The errors of [`TokenSource::check`].
    pub(super) fn check_if_short(&self) -> Result<()> {
        if self.len() <= CHECK_AT_OPENING { self.check() } else { Ok(()) }
    }

    /// Number of tokens.
    pub fn len(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// Number of tokens of all of its files, with those outside of this part.
    pub fn stream_len(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Whether there is no token.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// Every token is below this.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Copies tokens `at .. at + out.len()`.
    ///
    /// # Errors
    /// A range beyond the end; a token beyond the vocabulary, named with its file and position.
    pub fn read(&self, at: u64, out: &mut [u32]) -> Result<()> {
        if at.checked_add(out.len() as u64).is_none_or(|end| end > self.len()) {
            return Err(Error::value(
                "data",
                format!("cannot read {} tokens at {at}: the data has {}", out.len(), self.len()),
            ));
        }
        let mut at = self.range.start + at;
        let mut part = self.ends.partition_point(|&end| end <= at);
        let mut rest = out;
        while !rest.is_empty() {
            let here = rest.len().min((self.ends[part] - at) as usize);
            let (out, later) = rest.split_at_mut(here);
            let Part { shard, start, len } = &self.parts[part];
            let offset = start + (at - (self.ends[part] - len));
            shard.read(offset, out, self.vocab_size)?;
            rest = later;
            at += here as u64;
            part += 1;
        }
        Ok(())
    }

    /// Reads everything once, so that a token beyond the vocabulary or a damaged index shows.
    ///
    /// # Errors
    /// The first such token; the first entry of an index that contradicts the others.
    pub fn check(&self) -> Result<()> {
        let mut buffer = vec![0; CHECK_CHUNK.min(self.len() as usize)];
        self.parts.iter().try_for_each(|part| part.shard.check())?;
        for at in (0..self.len()).step_by(CHECK_CHUNK) {
            let n = (self.len() - at).min(CHECK_CHUNK as u64) as usize;
            self.read(at, &mut buffer[..n])?;
        }
        Ok(())
    }

    /// All tokens, copied: 4 bytes each.
    ///
    /// # Errors
    /// A token beyond the vocabulary.
    pub fn to_vec(&self) -> Result<Vec<u32>> {
        let mut tokens = vec![0; self.len() as usize];
        self.read(0, &mut tokens)?;
        Ok(tokens)
    }

    /// The tokens `range` of this source, sharing its files.
    ///
    /// # Errors
    /// A range that is not within `0..len`.
    pub fn slice(&self, range: Range<u64>) -> Result<TokenSource> {
        if range.start > range.end || range.end > self.len() {
            return Err(Error::value(
                "data",
                format!("no tokens {range:?} in data of {}", self.len()),
            ));
        }
        let base = self.range.start;
        Ok(TokenSource { range: base + range.start..base + range.end, ..self.clone() })
    }

    /// The tokens of the files `range` of a whole stream, sharing them.
    ///
    /// # Errors
    /// Those of [`TokenSource::slice`], which ranges of the files do not have.
    pub(super) fn files(&self, range: Range<usize>) -> Result<TokenSource> {
        let behind = |files: usize| files.checked_sub(1).map_or(0, |last| self.ends[last]);
        self.slice(behind(range.start)..behind(range.end))
    }

    /// The tokens for training and those for validation; what `split` keeps for testing is in neither.
    ///
    /// # Errors
    /// None but those of [`TokenSource::slice`], which the ranges of a split do not have.
    pub fn split(&self, split: Split) -> Result<(TokenSource, TokenSource)> {
        let [training, validation, _] = split.tokens(self.len());
        Ok((self.slice(0..training)?, self.slice(training..training + validation)?))
    }
}

#[cfg(test)]
impl TokenSource {
    /// Whether both are parts of one stream, whose files are open once.
    pub(super) fn shares_files(&self, other: &TokenSource) -> bool {
        Arc::ptr_eq(&self.parts, &other.parts)
    }
}

impl fmt::Debug for TokenSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TokenSource({} tokens in {} files)", self.len(), self.parts.len())
    }
}
