//! Encodes words of any length with the memory of a few windows, for byte pairs.
//!
//! Byte pairs merge the pair of the lowest rank first. So of a text's tokens, any that follow one another are the tokens of
//! their own bytes. Conversely, tokens are those of their bytes as a whole if this holds for each two neighbours: the first
//! merge over a border between two of them would be the first one over it in the bytes of these two as well.
//!
//! Two windows that overlap are encoded by themselves. At a token that both have at the same place they are joined: the
//! first one's tokens in front of it, the second one's from there on. All neighbours then are those of one of the windows,
//! so the joined tokens are exactly those of the bytes of both.

use ferrotron_tensor::{Error, Result};
use std::ops::Range;

/// A token, and the bytes of the word that it has a part of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    pub id: u32,
    pub start: usize,
    pub end: usize,
}

/// Encodes a word by windows of `window` bytes: `encode` returns the pieces of a range of it, with places in the word.
/// `give` gets the tokens, part by part.
///
/// # Errors
/// The errors of `encode` and `give`; windows that have no token in common, however large they are.
pub fn encode_by_windows(
    word: &str,
    window: usize,
    encode: impl Fn(Range<usize>) -> Result<Vec<Piece>>,
    give: &mut dyn FnMut(&[u32]) -> Result<()>,
) -> Result<()> {
    let mut give_pieces = |pieces: &[Piece]| {
        let ids: Vec<u32> = pieces.iter().map(|piece| piece.id).collect();
        give(&ids)
    };
    let least = (window / 16).max(1);
    let mut end = word.floor_char_boundary(window);
    let mut pieces = encode(0..end)?;
    // As long as no token is given, the pieces are all those from the beginning of the word on.
    let (mut is_first, mut size, mut overlap) = (true, window, least);
    while end < word.len() {
        let floor = if is_first { 0 } else { pieces[0].start };
        let start = start_of_next(&pieces, end.saturating_sub(overlap)).unwrap_or(floor);
        let next_end = word.floor_char_boundary(start + size);
        let mut next = encode(start..next_end)?;
        let joined = if next_end > end { common(&pieces, &next) } else { None };
        if let Some((before, from)) = joined {
            give_pieces(&pieces[..before])?;
            is_first &= before == 0;
            pieces = next.split_off(from);
        } else if start > floor {
            overlap *= 4;
            continue;
        } else if is_first && next_end > end {
            pieces = next;
        } else if next_end < word.len() {
            size *= 4;
            continue;
        } else {
            let message = format!("a word of {} bytes cannot be encoded in parts", word.len());
            return Err(Error::value("tokenizer", message));
        }
        (end, size, overlap) = (next_end, window, least);
    }
    give_pieces(&pieces)
}

/// Whether no other piece has bytes of this one: pieces may share those of a character.
fn is_apart(pieces: &[Piece], at: usize) -> bool {
    let Piece { start, end, .. } = pieces[at];
    let behind = at == 0 || pieces[at - 1].end <= start;
    behind && start < end && pieces.get(at + 1).is_none_or(|next| end <= next.start)
}

/// The place of the last piece up to byte `at` with which a window can begin.
fn start_of_next(pieces: &[Piece], at: usize) -> Option<usize> {
    let count = pieces.partition_point(|piece| piece.start <= at);
    (0..count).rev().find(|&piece| is_apart(pieces, piece)).map(|piece| pieces[piece].start)
}

/// The first piece that both have, by its place in each.
fn common(first: &[Piece], second: &[Piece]) -> Option<(usize, usize)> {
    let begin = second.first()?.start;
    let (mut a, mut b) = (first.partition_point(|piece| piece.start < begin), 0);
    while a < first.len() && b < second.len() {
        let (one, other) = (first[a], second[b]);
        if one == other && is_apart(first, a) && is_apart(second, b) {
            return Some((a, b));
        }
        // Pieces within a character have the same place.
        match (one.start, one.end).cmp(&(other.start, other.end)) {
            std::cmp::Ordering::Less => a += 1,
            std::cmp::Ordering::Greater => b += 1,
            std::cmp::Ordering::Equal => (a, b) = (a + 1, b + 1),
        }
    }
    None
}
