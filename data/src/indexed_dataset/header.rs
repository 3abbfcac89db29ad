//! The layout of an `.idx` file and what its header says.
//!
//! | byte | type | field |
//! |---|---|---|
//! | 0 | 9 bytes | magic: `MMIDIDX`, 0, 0 |
//! | 9 | u64 | version: 1 |
//! | 17 | u8 | dtype code |
//! | 18 | u64 | sequence count N |
//! | 26 | u64 | document index count D: documents + 1 |
//! | 34 | i32\[N\] | sequence lengths, in tokens |
//! | 34 + 4N | i64\[N\] | sequence offsets, in bytes of the `.bin` |
//! | 34 + 12N | i64\[D\] | document index: the first sequence of each document, and N |
//! | 34 + 12N + 8D | i8\[N\] | sequence modes, in multimodal files only |
//!
//! Source: `megatron/core/datasets/indexed_dataset.py` of Megatron-LM. All numbers are little-endian.

use crate::token_type::TokenType;

/// Bytes in front of the sequence lengths.
pub const HEADER: usize = 34;

/// The first bytes.
pub const MAGIC: &[u8; 9] = b"MMIDIDX\0\0";

/// The version that is read and written.
const VERSION: u64 = 1;

/// The dtype codes of integers.
const CODES: [(u8, TokenType); 6] = [
    (1, TokenType::U8),
    (2, TokenType::I8),
    (3, TokenType::I16),
    (4, TokenType::I32),
    (5, TokenType::I64),
    (8, TokenType::U16),
];

/// The fields of the header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    pub token_type: TokenType,
    /// Number of sequences.
    pub sequences: u64,
    /// Number of document boundaries: documents + 1.
    pub boundaries: u64,
    /// Whether each sequence has a mode.
    pub has_modes: bool,
}

impl Header {
    /// Reads the header of a file of `size` bytes.
    ///
    /// # Errors
    /// The field that is wrong, and why.
    pub fn parse(head: &[u8], size: u64) -> Result<Header, String> {
        let Some(head) = head.first_chunk::<HEADER>() else {
            return Err(format!(
                "header: the file has {size} bytes, less than the {HEADER} of a header"
            ));
        };
        if &head[..9] != MAGIC {
            let found = head[..9].escape_ascii();
            return Err(format!("magic: '{found}' in place of '{}'", MAGIC.escape_ascii()));
        }
        let word = |at: usize| {
            u64::from_le_bytes(*head[at..].first_chunk().expect("the header is longer"))
        };
        if word(9) != VERSION {
            return Err(format!("version: {}, and only {VERSION} is known", word(9)));
        }
        let Some(&(_, token_type)) = CODES.iter().find(|row| row.0 == head[17]) else {
            let why = match head[17] {
                6 | 7 => "floating-point numbers, which are no tokens",
                _ => "unknown: 1 to 5 and 8 are integers",
            };
            return Err(format!("dtype code: {} is {why}", head[17]));
        };
        let (sequences, boundaries) = (word(18), word(26));
        if boundaries == 0 {
            return Err(
                "document index count: 0, and the index has at least its first entry, 0".into()
            );
        }
        let bytes = |per_sequence: u128| {
            HEADER as u128 + per_sequence * u128::from(sequences) + 8 * u128::from(boundaries)
        };
        let has_modes = u128::from(size) == bytes(13) && sequences > 0;
        if u128::from(size) != bytes(12) && !has_modes {
            return Err(format!(
                "sequence count and document index count: {sequences} and {boundaries} make a file of {} bytes (or {} \
                 with modes), but it has {size}: is it truncated?",
                bytes(12),
                bytes(13)
            ));
        }
        Ok(Header { token_type, sequences, boundaries, has_modes })
    }

    /// The bytes of the header.
    ///
    /// # Panics
    /// For a type that Megatron has no code for: `U32`.
    pub fn to_bytes(self) -> [u8; HEADER] {
        let code =
            CODES.iter().find(|row| row.1 == self.token_type).expect("U32 is refused before");
        let mut bytes = [0; HEADER];
        bytes[..9].copy_from_slice(MAGIC);
        bytes[9..17].copy_from_slice(&VERSION.to_le_bytes());
        bytes[17] = code.0;
        bytes[18..26].copy_from_slice(&self.sequences.to_le_bytes());
        bytes[26..].copy_from_slice(&self.boundaries.to_le_bytes());
        bytes
    }

    /// Whether Megatron has a code for this type.
    pub fn has_code(token_type: TokenType) -> bool {
        CODES.iter().any(|row| row.1 == token_type)
    }

    /// Byte of the sequence lengths.
    pub fn lengths(&self) -> u64 {
        HEADER as u64
    }

    /// Byte of the sequence offsets.
    pub fn offsets(&self) -> u64 {
        HEADER as u64 + 4 * self.sequences
    }

    /// Byte of the document index.
    pub fn documents(&self) -> u64 {
        HEADER as u64 + 12 * self.sequences
    }

    /// Byte of the sequence modes.
    pub fn modes(&self) -> u64 {
        self.documents() + 8 * self.boundaries
    }
}
