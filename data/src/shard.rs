//! One file of tokens: recognises its format and reads tokens out of it by position.
//!
//! Token files are read with `pread`, not mapped: a file that another program cuts short is an error with its name,
//! where reading a map would end the process by SIGBUS.

use super::token_file::TokenFile;
use crate::tokenizer::Tokenizer;
use ferrotron_tensor::{Error, Result};
use std::io::Read;
use std::{fs, fs::File, path::Path};

/// llm.c's header: 256 x i32.
const LLMC_HEADER: usize = 1024;

/// First words of llm.c's token shards, with version and bytes per token (dataloader.h and the
/// scripts under dev/data).
const LLMC_SHARDS: [(u32, u32, usize); 2] = [(20_240_520, 1, 2), (20_240_801, 7, 4)];

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
    /// Tokens of `width` bytes, little-endian, from byte `offset` of a file.
    File { file: TokenFile, offset: u64, width: usize },
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
        let input = Input::open(path)?;
        let (offset, width) = match input.layout()? {
            TokenLayout::Tokens { offset, width } => (offset as u64, width),
            TokenLayout::Text if matches!(tokenizer, Tokenizer::Byte) => {
                let marked = input.head.starts_with(UTF8_MARK);
                (if marked { UTF8_MARK.len() as u64 } else { 0 }, 1)
            }
            TokenLayout::Text => {
                let name = input.name();
                let tokens = tokenizer.encode(&input.text()?).map_err(|error| error.at(&name))?;
                return Ok(Shard::owned(&name, tokens));
            }
        };
        let len = (input.bytes - offset) / width as u64;
        let name = input.name();
        let file = TokenFile::new(path, input.file)
            .map_err(|error| Error::io("data", format!("cannot open '{name}': {error}")))?;
        Ok(Shard { name, storage: Storage::File { file, offset, width }, len })
    }

    /// Gives the file descriptor back. From now on each read opens the file.
    pub(super) fn close(&mut self) {
        if let Storage::File { file, .. } = &mut self.storage {
            file.close();
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
            Storage::File { file, offset, width } => {
                let mut bytes = vec![0; out.len() * width];
                let first = offset + at * *width as u64;
                file.read_exact_at(&mut bytes, first).map_err(|error| self.unreadable(&error))?;
                match width {
                    1 => out.iter_mut().zip(&bytes).for_each(|(out, &byte)| *out = byte.into()),
                    2 => out.iter_mut().zip(bytes.as_chunks::<2>().0).for_each(|(out, token)| {
                        *out = u16::from_le_bytes(*token).into();
                    }),
                    _ => out.iter_mut().zip(bytes.as_chunks::<4>().0).for_each(|(out, token)| {
                        *out = u32::from_le_bytes(*token);
                    }),
                }
            }
        }
        // The maximum first: it vectorises, and nearly always suffices.
        let largest = out.iter().copied().max().unwrap_or(0);
        match (largest as usize) < vocab_size || out.is_empty() {
            true => Ok(()),
            false => Err(self.beyond(at, out, vocab_size)),
        }
    }

    /// Names the first of `tokens`, which begin at token `at`, that is beyond the vocabulary.
    fn beyond(&self, at: u64, tokens: &[u32], vocab_size: usize) -> Error {
        let is_beyond = |token: u32| token as usize >= vocab_size;
        let wrong = tokens.iter().position(|&token| is_beyond(token)).unwrap_or(0);
        let swapped = |token: &u32| (*token as u16).swap_bytes().into();
        let big_endian = matches!(self.storage, Storage::File { width: 2, .. })
            && !tokens.iter().map(swapped).any(is_beyond);
        let question = match big_endian {
            true => "is it big-endian? Swap the two bytes of each token",
            false => "was the file made with another tokenizer?",
        };
        Error::value(
            "data",
            format!(
                "'{}' has token {} at position {}, but the vocabulary has {vocab_size} (0 to {}): {question}",
                self.name,
                tokens[wrong],
                at + wrong as u64,
                vocab_size.saturating_sub(1)
            ),
        )
    }

    fn unreadable(&self, error: &std::io::Error) -> Error {
        let why = match error.kind() {
            std::io::ErrorKind::UnexpectedEof => {
                format!(
                    "it ends before its {} tokens, which it had when it was opened: do not change a file \
                     while a run reads it",
                    self.len
                )
            }
            _ => error.to_string(),
        };
        Error::io("data", format!("cannot read '{}': {why}", self.name))
    }
}

/// Reads the text of a file, without its byte-order mark.
///
/// # Errors
/// A file that cannot be read, is empty, is a token file, or is not UTF-8.
pub(super) fn read_text(path: &Path, purpose: &str) -> Result<String> {
    let input = Input::open(path)?;
    match input.layout()? {
        TokenLayout::Text => input.text(),
        TokenLayout::Tokens { .. } => Err(Error::config(
            "data",
            format!("'{}' holds tokens, not text {purpose}", path.display()),
        )),
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
    Tokens { offset: usize, width: usize },
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
        if let Some(&(_, version, width)) = LLMC_SHARDS.iter().find(|row| row.0 == first) {
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
            let want = LLMC_HEADER as u64 + u64::from(count) * width as u64;
            if self.bytes != want {
                return refuse(format!(
                    "'{name}' has {} bytes, but its header promises {count} tokens, {want} bytes: is it truncated?",
                    self.bytes
                ));
            }
            if count == 0 {
                return refuse(format!("'{name}' has a header but no tokens"));
            }
            return Ok(TokenLayout::Tokens { offset: LLMC_HEADER, width });
        }
        // With the version, which is a small number: the magic alone could be two tokens of a nanoGPT file.
        let swapped = [0, 1].map(|i| word(i).unwrap_or(0).swap_bytes());
        if let Some(&(magic, _, width)) = LLMC_SHARDS.iter().find(|row| row.0 == swapped[0])
            && swapped[1] < 256
        {
            return refuse(format!(
                "'{name}' is a big-endian llm.c shard (its first word is {magic} with its bytes swapped): write it \
                 little-endian, 256 header words of 4 bytes and tokens of {width}"
            ));
        }
        if self.path.extension().is_none_or(|extension| !extension.eq_ignore_ascii_case("bin")) {
            return Ok(TokenLayout::Text);
        }
        if is_megatron_index(&self.path.with_extension("idx")) {
            return refuse(format!(
                "'{name}' is a Megatron indexed dataset (an .idx file lies beside it), which is not read: \
                 give text, nanoGPT or llm.c files"
            ));
        }
        if !self.bytes.is_multiple_of(2) {
            return refuse(format!(
                "'{name}' has {} bytes, an odd number, but nanoGPT tokens take 2 bytes each: is it truncated?",
                self.bytes
            ));
        }
        Ok(TokenLayout::Tokens { offset: 0, width: 2 })
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

/// Whether a file begins as Megatron-LM's `.idx` files do. Their `.bin` has no header and may hold
/// i32 tokens, which would read as nonsense without an error.
fn is_megatron_index(path: &Path) -> bool {
    let mut magic = [0; 7];
    let read =
        File::open(path).and_then(|mut file| std::io::Read::read_exact(&mut file, &mut magic));
    read.is_ok() && &magic == b"MMIDIDX"
}
