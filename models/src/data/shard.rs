//! One file of tokens: recognising its format, mapping it, and reading tokens out of it.

use crate::tokenizer::Tokenizer;
use ferrotron_tensor::{Error, Result};
use memmap2::Mmap;
use std::{fs::File, path::Path};

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
    Mapped { map: Mmap, offset: usize, width: usize },
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
        let name = path.display().to_string();
        let map = map(path)?;
        let (offset, width) = match layout(path, &map)? {
            Layout::Tokens { offset, width } => (offset, width),
            Layout::Text if matches!(tokenizer, Tokenizer::Byte) => (0, 1),
            Layout::Text => {
                let tokens =
                    tokenizer.encode(utf8(path, &map)?).map_err(|error| error.at(&name))?;
                return Ok(Shard::owned(&name, tokens));
            }
        };
        let len = ((map.len() - offset) / width) as u64;
        Ok(Shard { name, storage: Storage::Mapped { map, offset, width }, len })
    }

    /// Copies tokens `at .. at + out.len()`, which the caller has checked against `len`.
    ///
    /// # Errors
    /// A token that is not below `vocab_size`.
    pub(super) fn read(&self, at: u64, out: &mut [u32], vocab_size: usize) -> Result<()> {
        let range = at as usize..at as usize + out.len();
        match &self.storage {
            Storage::Owned(tokens) => out.copy_from_slice(&tokens[range]),
            Storage::Mapped { map, offset, width } => {
                let bytes = &map[offset + range.start * width..offset + range.end * width];
                match width {
                    1 => out.iter_mut().zip(bytes).for_each(|(out, &byte)| *out = byte.into()),
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
        if (largest as usize) < vocab_size || out.is_empty() {
            return Ok(());
        }
        let wrong = out.iter().position(|&token| token as usize >= vocab_size).unwrap_or(0);
        Err(Error::value(
            "data",
            format!(
                "'{}' has token {} at position {}, but the vocabulary has {vocab_size} (0 to {}): \
                 was the file made with another tokenizer?",
                self.name,
                out[wrong],
                at + wrong as u64,
                vocab_size.saturating_sub(1)
            ),
        ))
    }
}

/// The text of a file.
///
/// # Errors
/// One that cannot be read, is empty, is a token file, or is not UTF-8.
pub(super) fn read_text(path: &Path) -> Result<String> {
    let map = map(path)?;
    match layout(path, &map)? {
        Layout::Text => utf8(path, &map).map(str::to_string),
        Layout::Tokens { .. } => Err(Error::config(
            "data",
            format!(
                "'{}' holds tokens, not text from which a char vocabulary could be built: \
                 name the tokenizer it was made with (gpt2 or a tokenizer.json)",
                path.display()
            ),
        )),
    }
}

/// Maps a file that exists and is not empty.
fn map(path: &Path) -> Result<Mmap> {
    let failed = |what: &str, error: std::io::Error| {
        Error::io("data", format!("cannot {what} '{}': {error}", path.display()))
    };
    let file = File::open(path).map_err(|error| failed("open", error))?;
    let metadata = file.metadata().map_err(|error| failed("read", error))?;
    if !metadata.is_file() {
        return Err(Error::io("data", format!("'{}' is not a regular file", path.display())));
    }
    if metadata.len() == 0 {
        return Err(Error::io("data", format!("'{}' is empty", path.display())));
    }
    // SAFETY: the map is only read. Its bytes could change if another program writes to the file
    // meanwhile, which the module's page forbids; every read token is checked against the vocabulary.
    unsafe { Mmap::map(&file) }.map_err(|error| failed("map", error))
}

/// Where the tokens of a file lie.
enum Layout {
    Text,
    Tokens { offset: usize, width: usize },
}

/// Recognises the format; sizes that do not fit it are errors.
fn layout(path: &Path, bytes: &[u8]) -> Result<Layout> {
    let name = path.display();
    let refuse = |context: String| Err(Error::io("data", context));
    let word = |i: usize| bytes.as_chunks::<4>().0.get(i).copied().map(u32::from_le_bytes);
    let first = word(0).unwrap_or(0);
    if let Some((_, what)) = LLMC_OTHERS.iter().find(|row| row.0 == first) {
        return refuse(format!("'{name}' is an llm.c {what} file, not a token shard"));
    }
    if let Some(&(_, version, width)) = LLMC_SHARDS.iter().find(|row| row.0 == first) {
        let (Some(got), Some(count), true) = (word(1), word(2), bytes.len() >= LLMC_HEADER) else {
            return refuse(format!(
                "'{name}' is truncated: {} bytes, less than the {LLMC_HEADER} of an llm.c header",
                bytes.len()
            ));
        };
        if got != version {
            return refuse(format!(
                "'{name}' is an llm.c shard of version {got}; with magic {first} only {version} is known"
            ));
        }
        let want = LLMC_HEADER as u64 + u64::from(count) * width as u64;
        if bytes.len() as u64 != want {
            return refuse(format!(
                "'{name}' has {} bytes, but its header promises {count} tokens, {want} bytes: is it truncated?",
                bytes.len()
            ));
        }
        if count == 0 {
            return refuse(format!("'{name}' has a header but no tokens"));
        }
        return Ok(Layout::Tokens { offset: LLMC_HEADER, width });
    }
    if path.extension().is_none_or(|extension| !extension.eq_ignore_ascii_case("bin")) {
        return Ok(Layout::Text);
    }
    if is_megatron_index(&path.with_extension("idx")) {
        return refuse(format!(
            "'{name}' is a Megatron indexed dataset (an .idx file lies beside it), which is not read: \
             give text, nanoGPT or llm.c files"
        ));
    }
    if !bytes.len().is_multiple_of(2) {
        return refuse(format!(
            "'{name}' has {} bytes, an odd number, but nanoGPT tokens take 2 bytes each: is it truncated?",
            bytes.len()
        ));
    }
    Ok(Layout::Tokens { offset: 0, width: 2 })
}

/// Whether a file begins as Megatron-LM's `.idx` files do. Their `.bin` has no header and may hold
/// i32 tokens, which would read as nonsense without an error.
fn is_megatron_index(path: &Path) -> bool {
    let mut magic = [0; 7];
    let read =
        File::open(path).and_then(|mut file| std::io::Read::read_exact(&mut file, &mut magic));
    read.is_ok() && &magic == b"MMIDIDX"
}

/// The bytes as text.
fn utf8<'a>(path: &Path, bytes: &'a [u8]) -> Result<&'a str> {
    std::str::from_utf8(bytes).map_err(|error| {
        Error::io(
            "data",
            format!(
                "'{}' is not UTF-8 text (byte {}): convert it, or use --tokenizer byte",
                path.display(),
                error.valid_up_to()
            ),
        )
    })
}
