//! The sizes of the parts of a text that is encoded part by part.

/// Bytes of a text that are in memory at a time in larger forms than that of text. They do not change the tokens.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    /// Bytes that are normalized at a time.
    pub chunk: usize,
    /// Bytes of a word that byte pairs encode at a time.
    pub window: usize,
}

pub(super) const SIZES: Sizes = Sizes { chunk: 64 << 10, window: 64 << 10 };
