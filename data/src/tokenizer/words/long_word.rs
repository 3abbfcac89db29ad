//! Encodes words of any length with the memory of a few windows, for byte pairs.
//!
//! Byte pairs merge the pair of the lowest rank first. So of a text's tokens, any that follow one another are the tokens of
//! their own bytes. Conversely, tokens are those of their bytes as a whole if this holds for each two neighbours: the first
//! merge over a border between two of them would be the first one over it in the bytes of these two as well.
//!
//! Each character has a token: one that a model leaves out would shift the places of those behind it, and two windows could
//! join where their characters differ. `recognize.rs` excludes models that leave characters out.
//!
//! Two windows that overlap are encoded by themselves. At tokens that both have for the same characters they are joined: the
//! first one's tokens in front of them, the second one's from there on. All neighbours then are those of one of the windows,
//! so the joined tokens are exactly those of the bytes of both.

use super::super::char_boundary;
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
    let mut end = char_boundary::floor(word, window);
    let mut pieces = encode(0..end)?;
    // As long as no token is given, the pieces are all those from the beginning of the word on.
    let (mut is_first, mut size, mut overlap) = (true, window, least);
    while end < word.len() {
        let floor = if is_first { 0 } else { pieces[0].start };
        let start = start_of_next(&pieces, end.saturating_sub(overlap)).unwrap_or(floor);
        let end_of = |size: usize| char_boundary::floor(word, start + size);
        // A window joins another only if it reaches beyond it.
        while end_of(size) <= end {
            size *= 4;
        }
        let next_end = end_of(size);
        let mut next = encode(start..next_end)?;
        if let Some((before, from)) = common(&pieces, &next) {
            give_pieces(&pieces[..before])?;
            is_first &= before == 0;
            pieces = next.split_off(from);
        } else if start > floor {
            overlap *= 4;
            continue;
        } else if is_first {
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

/// Whether a piece begins where the one in front of it ends. Those that have parts of the same characters do not.
fn is_clean(pieces: &[Piece], at: usize) -> bool {
    at == 0 || pieces[at - 1].end <= pieces[at].start
}

/// The place of the last piece up to byte `at` with which a window can begin.
fn start_of_next(pieces: &[Piece], at: usize) -> Option<usize> {
    let count = pieces.partition_point(|piece| piece.start <= at);
    (0..count).rev().find(|&piece| is_clean(pieces, piece)).map(|piece| pieces[piece].start)
}

/// The first pieces that both have for the same characters, by the place of the first one in each.
fn common(first: &[Piece], second: &[Piece]) -> Option<(usize, usize)> {
    let begin = second.first()?.start;
    let group = |pieces: &[Piece], from: usize| {
        let end = (from + 1..pieces.len()).find(|&at| is_clean(pieces, at));
        from..end.unwrap_or(pieces.len())
    };
    let behind = first.partition_point(|piece| piece.start < begin);
    let mut a = (behind..first.len()).find(|&at| is_clean(first, at))?;
    let mut b = 0;
    while a < first.len() && b < second.len() {
        let (one, other) = (group(first, a), group(second, b));
        if first[one.clone()] == second[other.clone()] {
            return Some((a, b));
        }
        let span = |pieces: &[Piece]| (pieces[0].start, pieces[pieces.len() - 1].end);
        let order = span(&first[one.clone()]).cmp(&span(&second[other.clone()]));
        if order.is_le() {
            a = one.end;
        }
        if order.is_ge() {
            b = other.end;
        }
    }
    None
}
