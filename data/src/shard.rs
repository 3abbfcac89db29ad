//! One file of tokens: recognises its format and reads tokens out of it by position.

use super::indexed_dataset::IndexedDataset;
use super::token_array::TokenArray;
use super::token_file::TokenFile;
use super::token_fingerprint;
use super::token_type::TokenType;
use crate::tokenizer::Tokenizer;
use ferrotron_tensor::{Error, Result};
use std::io::Read;
use std::{fs, fs::File, path::Path};

/// llm.c's header: 256 x i32.
const LLMC_HEADER: usize = 1024;

/// First words of llm.c's token shards, with version and type of the tokens (dataloader.h and the
/// scripts under dev/data).
const LLMC_SHARDS: [(u32, u32, TokenType); 2] =
    [(20_240_520, 1, TokenType::U16), (20_240_801, 7, TokenType::U32)];

/// First words of llm.c's other files, to say what was given by mistake.
const LLMC_OTHERS: [(u32, &str); 5] = [
    (20_240_326, "model"),
    (20_240_327, "debug state"),
    (20_240_328, "tokenizer"),
    (20_240_522, "evaluation set"),
    (20_240_527, "training state"),
];

/// The byte-order mark that some programs write in front of UTF-8 text.
const UTF8_MARK: &[u8] = b"\xEF\xBB\xBF";

/// Byte-order marks of encodings that are not read, the longer ones first.
const OTHER_MARKS: [(&[u8], &str); 4] = [
    (b"\xFF\xFE\0\0", "UTF-32"),
    (b"\0\0\xFE\xFF", "UTF-32"),
    (b"\xFF\xFE", "UTF-16"),
    (b"\xFE\xFF", "UTF-16"),
];

/// Tokens of one file, or of one text.
pub(super) struct Shard {
    /// The file, for messages.
    name: String,
    storage: Storage,
    /// Number of tokens.
    pub(super) len: u64,
}

enum Storage {
    /// Tokens of a file.
    File(TokenArray),
    /// Tokens of an indexed data set of Megatron.
    Indexed(Box<IndexedDataset>),
    /// Tokens of a text that was tokenized here.
    Owned(Vec<u32>),
}

impl Shard {
    /// Tokens made in memory; `name` is for messages.
    pub(super) fn owned(name: &str, tokens: Vec<u32>) -> Self {
        let len = tokens.len() as u64;
        Shard { name: name.to_string(), storage: Storage::Owned(tokens), len }
    }

    /// Opens a file of any of the formats on the module's page.
    pub(super) fn open(path: &Path, tokenizer: &Tokenizer) -> Result<Self> {
        if let Some(index) = IndexedDataset::index_path(path) {
            let dataset = IndexedDataset::open(&index)?;
            token_fingerprint::check(&index, tokenizer)?;
            return Shard::indexed(dataset);
        }
        let input = Input::open(path)?;
        let (offset, token_type) = match input.layout()? {
            TokenLayout::Tokens { offset, token_type } => {
                token_fingerprint::check(path, tokenizer)?;
                (offset as u64, token_type)
            }
            TokenLayout::Text if matches!(tokenizer, Tokenizer::Byte) => {
                let marked = input.head.starts_with(UTF8_MARK);
                (if marked { UTF8_MARK.len() as u64 } else { 0 }, TokenType::U8)
            }
            TokenLayout::Text => {
                let name = input.name();
                let tokens = tokenizer.encode(&input.text()?).map_err(|error| error.at(&name))?;
                return Ok(Shard::owned(&name, tokens));
            }
        };
        let len = (input.bytes - offset) / token_type.bytes() as u64;
        let name = input.name();
        let file = TokenFile::new(path, input.file)
            .map_err(|error| Error::io("data", format!("cannot open '{name}': {error}")))?;
        let storage = Storage::File(TokenArray { file, offset, token_type, len });
        Ok(Shard { name, storage, len })
    }

    /// An indexed data set of Megatron.
    pub(super) fn indexed(dataset: IndexedDataset) -> Result<Self> {
        let (name, len) = (dataset.name().to_string(), dataset.num_tokens());
        match len {
            0 => Err(Error::io("data", format!("'{name}' has an index but no tokens"))),
            _ => Ok(Shard { name, storage: Storage::Indexed(Box::new(dataset)), len }),
        }
    }

    /// Gives the file descriptors back. From now on each read opens its file.
    pub(super) fn close(&mut self) {
        match &mut self.storage {
            Storage::File(tokens) => tokens.file.close(),
            Storage::Indexed(dataset) => dataset.close(),
            Storage::Owned(_) => {}
        }
    }

    /// Compares what the file says of its tokens with itself, as far as opening it has not.
    ///
    /// # Errors
    /// An index of Megatron with a field that is wrong.
    pub(super) fn check(&self) -> Result<()> {
        match &self.storage {
            Storage::Indexed(dataset) => dataset.check(),
            Storage::Owned(_) | Storage::File(_) => Ok(()),
        }
    }

    /// The indexed data set that this is.
    ///
    /// # Errors
    /// A file without sequences.
    pub(super) fn dataset(&self) -> Result<&IndexedDataset> {
        match &self.storage {
            Storage::Indexed(dataset) => Ok(dataset),
            Storage::Owned(_) | Storage::File(_) => {
                Err(Error::value("data", format!("'{}' has no sequences", self.name)))
            }
        }
    }

    /// Copies tokens `at .. at + out.len()`, which the caller has checked against `len`.
    ///
    /// # Errors
    /// A token that is not below `vocab_size`; a file that cannot be read, or has become shorter.
    pub(super) fn read(&self, at: u64, out: &mut [u32], vocab_size: usize) -> Result<()> {
        match &self.storage {
            Storage::Owned(tokens) => {
                out.copy_from_slice(&tokens[at as usize..at as usize + out.len()]);
            }
            Storage::File(tokens) => tokens.read(&self.name, at, out)?,
            Storage::Indexed(dataset) => dataset.read(at, out)?,
        }
        // The maximum first: it vectorises, and nearly always suffices.
        let largest = out.iter().copied().max().unwrap_or(0);
        match (largest as usize) < vocab_size || out.is_empty() {
            true => Ok(()),
            false => Err(self.beyond(at, out, vocab_size)?),
        }
    }

    /// The error that names the first of `tokens`, which begin at token `at`, that is beyond the vocabulary.
    fn beyond(&self, at: u64, tokens: &[u32], vocab_size: usize) -> Result<Error> {
        let is_beyond = |token: u32| token as usize >= vocab_size;
        let wrong = tokens.iter().position(|&token| is_beyond(token)).unwrap_or(0);
        let place = at + wrong as u64;
        let (number, token_type) = match &self.storage {
            Storage::Owned(_) => (tokens[wrong].into(), TokenType::U32),
            Storage::File(file) => (file.number(&self.name, place)?, file.token_type),
            Storage::Indexed(dataset) => (dataset.number(place)?, dataset.token_type()),
        };
        let swapped = |token: &u32| (*token as u16).swap_bytes().into();
        let big_endian = token_type == TokenType::U16 && !tokens.iter().map(swapped).any(is_beyond);
        let question = match big_endian {
            true => "is it big-endian? Swap the two bytes of each token",
            false => "was the file made with another tokenizer?",
        };
        let message = format!(
            "'{}' has token {number} at position {place}, but the vocabulary has {vocab_size} (0 to {}): {question}",
            self.name,
            vocab_size.saturating_sub(1)
        );
        Ok(Error::value("data", message))
    }
}

/// Reads the text of a file, without its byte-order mark.
///
/// # Errors
/// A file that cannot be read, is empty, is a token file, or is not UTF-8.
pub(super) fn read_text(path: &Path, purpose: &str) -> Result<String> {
    if IndexedDataset::index_path(path).is_none() {
        let input = Input::open(path)?;
        if matches!(input.layout()?, TokenLayout::Text) {
            return input.text();
        }
    }
    let message = format!("'{}' holds tokens, not text {purpose}", path.display());
    Err(Error::config("data", message))
}

/// Bytes of a file if it is text: 0 of a file of tokens, and of one that cannot be opened.
pub(super) fn text_bytes(path: &Path) -> u64 {
    if IndexedDataset::index_path(path).is_some() {
        return 0;
    }
    match Input::open(path) {
        Ok(input) if matches!(input.layout(), Ok(TokenLayout::Text)) => input.bytes,
        _ => 0,
    }
}

/// A file that exists and is not empty.
struct Input<'a> {
    path: &'a Path,
    file: File,
    /// Its size.
    bytes: u64,
    /// Its first bytes, at most an llm.c header.
    head: Vec<u8>,
}

/// The tokens' place in a file.
enum TokenLayout {
    Text,
    Tokens { offset: usize, token_type: TokenType },
}

impl Input<'_> {
    fn open(path: &Path) -> Result<Input<'_>> {
        let failed = |what: &str, error: std::io::Error| {
            Error::io("data", format!("cannot {what} '{}': {error}", path.display()))
        };
        // Before it is opened: to open a pipe waits for its writer.
        let metadata = fs::metadata(path).map_err(|error| failed("open", error))?;
        if !metadata.is_file() {
            return Err(Error::io("data", format!("'{}' is not a regular file", path.display())));
        }
        if metadata.len() == 0 {
            return Err(Error::io("data", format!("'{}' is empty", path.display())));
        }
        let (file, mut head) =
            (File::open(path).map_err(|error| failed("open", error))?, Vec::new());
        let read = (&file).take(LLMC_HEADER as u64).read_to_end(&mut head);
        read.map_err(|error| failed("read", error))?;
        Ok(Input { path, file, bytes: metadata.len(), head })
    }

    fn name(&self) -> String {
        self.path.display().to_string()
    }

    /// Recognises the format; sizes that do not fit it are errors.
    fn layout(&self) -> Result<TokenLayout> {
        let name = self.path.display();
        let refuse = |context: String| Err(Error::io("data", context));
        let words = self.head.as_chunks::<4>().0;
        let word = |i: usize| words.get(i).copied().map(u32::from_le_bytes);
        let first = word(0).unwrap_or(0);
        if let Some((_, what)) = LLMC_OTHERS.iter().find(|row| row.0 == first) {
            return refuse(format!("'{name}' is an llm.c {what} file, not a token shard"));
        }
        if let Some(&(_, version, token_type)) = LLMC_SHARDS.iter().find(|row| row.0 == first) {
            let (Some(got), Some(count), LLMC_HEADER) = (word(1), word(2), self.head.len()) else {
                return refuse(format!(
                    "'{name}' is truncated: {} bytes, less than the {LLMC_HEADER} of an llm.c header",
                    self.bytes
                ));
            };
            if got != version {
                return refuse(format!(
                    "'{name}' is an llm.c shard of version {got}; with magic {first} only {version} is known"
                ));
            }
            let want = LLMC_HEADER as u64 + u64::from(count) * token_type.bytes() as u64;
            if self.bytes != want {
                return refuse(format!(
                    "'{name}' has {} bytes, but its header promises {count} tokens, {want} bytes: is it truncated?",
                    self.bytes
                ));
            }
            if count == 0 {
                return refuse(format!("'{name}' has a header but no tokens"));
            }
            return Ok(TokenLayout::Tokens { offset: LLMC_HEADER, token_type });
        }
        // With the version, which is a small number: the magic alone could be two tokens of a nanoGPT file.
        let swapped = [0, 1].map(|i| word(i).unwrap_or(0).swap_bytes());
        if let Some(&(magic, _, token_type)) = LLMC_SHARDS.iter().find(|row| row.0 == swapped[0])
            && swapped[1] < 256
        {
            return refuse(format!(
                "'{name}' is a big-endian llm.c shard (its first word is {magic} with its bytes swapped): write it \
                 little-endian, 256 header words of 4 bytes and tokens of {}",
                token_type.bytes()
            ));
        }
        if self.path.extension().is_none_or(|extension| !extension.eq_ignore_ascii_case("bin")) {
            return Ok(TokenLayout::Text);
        }
        if !self.bytes.is_multiple_of(2) {
            return refuse(format!(
                "'{name}' has {} bytes, an odd number, but nanoGPT tokens take 2 bytes each: is it truncated?",
                self.bytes
            ));
        }
        Ok(TokenLayout::Tokens { offset: 0, token_type: TokenType::U16 })
    }

    /// The whole file as UTF-8, without its byte-order mark.
    fn text(&self) -> Result<String> {
        let refuse =
            |what: String| Err(Error::io("data", format!("'{}' {what}", self.path.display())));
        let mark = OTHER_MARKS.iter().find(|(mark, _)| self.head.starts_with(mark));
        if let Some((_, encoding)) = mark {
            return refuse(format!(
                "is {encoding} text (it begins with that byte-order mark): convert it with \
                 iconv -f {encoding} -t UTF-8"
            ));
        }
        let mut bytes = match fs::read(self.path) {
            Ok(bytes) => bytes,
            Err(error) => return refuse(format!("cannot be read: {error}")),
        };
        let mark = if bytes.starts_with(UTF8_MARK) { UTF8_MARK.len() } else { 0 };
        bytes.drain(..mark);
        String::from_utf8(bytes).or_else(|error| {
            let at = mark + error.utf8_error().valid_up_to();
            refuse(format!(
                "is not UTF-8 text (byte {at}): convert it with iconv, or use --tokenizer byte"
            ))
        })
    }
}
