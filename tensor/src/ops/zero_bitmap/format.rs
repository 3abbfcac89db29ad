//! The sizes of the parts of a compressed vector.

/// Elements per task: a whole number of words.
pub(crate) const CHUNK: usize = 64 * 64;

/// Bytes of the bitmap of `numel` elements; the values after it are aligned to a cache line.
pub(crate) fn mask_bytes(numel: usize) -> usize {
    numel.div_ceil(8).next_multiple_of(64)
}
