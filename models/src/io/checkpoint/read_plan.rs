//! The plan of a load that reads each byte once: which rank reads which bytes when, and who needs them.
//!
//! All files of tensors, one behind the other, are one row of bytes. Each rank reads an equal share of it from
//! beginning to end, in windows of a few megabytes, so that a rank opens few files and each of them once. In a round, every
//! rank reads one window, and sends each rank what that one needs of it. All ranks make the same plan from the index
//! and the lists of what each rank holds, so messages need no headers.

use ferrotron_tensor::{DType, ShardSpec};
use std::collections::HashMap;
use std::ops::Range;

use super::index::{Index, TensorRecord};
use super::slices::{Copy, boxes};
use super::{CONFIG, PROGRESS, TOKENIZER};
use crate::io::checked_file::FileRecord;

/// Shares and windows begin at multiples of so many bytes in a file, which cut no element of any dtype.
const ALIGNMENT: u64 = 8;

/// The files of tensors as one row of bytes, cut between ranks.
pub(super) struct ReadPlan<'a> {
    /// Files in the order of their names, and the position of the first byte of each.
    pub files: Vec<(&'a str, &'a FileRecord, u64)>,
    /// The position of the first byte of each file, by its name.
    first: HashMap<&'a str, u64>,
    total: u64,
    ranks: u64,
    window: u64,
}

impl<'a> ReadPlan<'a> {
    /// A plan for so many ranks, with windows of `window` bytes.
    pub fn new(index: &'a Index, ranks: usize, window: u64) -> ReadPlan<'a> {
        let mut total = 0;
        let files = index.files.iter().filter(|(file, _)| !is_document(file));
        let files = files.map(|(file, record)| {
            let first = total;
            total += record.bytes.next_multiple_of(ALIGNMENT);
            (file.as_str(), record, first)
        });
        let files: Vec<_> = files.collect();
        let first = files.iter().map(|&(file, _, first)| (file, first)).collect();
        ReadPlan {
            files,
            first,
            total,
            ranks: ranks as u64,
            window: window.next_multiple_of(ALIGNMENT),
        }
    }

    /// The positions that `rank` reads.
    pub fn share(&self, rank: usize) -> Range<u64> {
        let units = u128::from(self.total / ALIGNMENT);
        let cut = |rank: usize| (units * rank as u128 / u128::from(self.ranks)) as u64 * ALIGNMENT;
        cut(rank)..cut(rank + 1)
    }

    /// The rank that reads a position.
    fn reader(&self, position: u64) -> usize {
        let unit = u128::from(position / ALIGNMENT);
        let units = u128::from(self.total / ALIGNMENT).max(1);
        let mut rank = (unit * u128::from(self.ranks) / units) as usize;
        while self.share(rank).end <= position {
            rank += 1;
        }
        rank
    }

    /// The ranks that read something of a target.
    ///
    /// Errors if a dtype is not known.
    pub fn readers(
        &self,
        wanted: (&'a TensorRecord, ShardSpec),
    ) -> ferrotron_tensor::Result<Vec<Range<usize>>> {
        let parts = self.parts(&[wanted], self.all())?;
        let bytes = parts.iter().map(Part::span).filter(|span| !span.is_empty());
        Ok(bytes.map(|span| self.reader(span.start)..self.reader(span.end - 1) + 1).collect())
    }

    /// The positions that `rank` reads in a round; none behind the end of its share.
    pub fn window(&self, rank: usize, round: u64) -> Range<u64> {
        let share = self.share(rank);
        let start = (share.start + round * self.window).min(share.end);
        start..(start + self.window).min(share.end)
    }

    /// All positions.
    pub fn all(&self) -> Range<u64> {
        0..self.total
    }

    /// Number of rounds in which all ranks have read their shares.
    pub fn rounds(&self) -> u64 {
        let longest = (0..self.ranks as usize).map(|rank| self.share(rank)).max_by_key(length);
        longest.map_or(0, |share| length(&share).div_ceil(self.window))
    }

    /// The stretches of files within `window`: number of the file, range of its bytes, and where they lie in the window.
    pub fn stretches(
        &self,
        window: &Range<u64>,
    ) -> impl Iterator<Item = (usize, Range<u64>, usize)> {
        let window = window.clone();
        let first =
            self.files.partition_point(|(_, record, first)| first + record.bytes <= window.start);
        let files = self.files.iter().enumerate().skip(first);
        let files = files.take_while({
            let end = window.end;
            move |(_, file)| file.2 < end
        });
        files.filter_map(move |(number, &(_, record, first))| {
            let start = window.start.max(first);
            let end = window.end.min(first + record.bytes);
            (start < end)
                .then(|| (number, start - first..end - first, (start - window.start) as usize))
        })
    }

    /// Returns the parts of the positions in `share` that a rank with `wanted` needs, in their order.
    ///
    /// Errors if a dtype is not known.
    pub fn parts(
        &self,
        wanted: &[(&'a TensorRecord, ShardSpec)],
        share: Range<u64>,
    ) -> ferrotron_tensor::Result<Vec<Part<'a>>> {
        let mut parts = Vec::new();
        for (target, (record, place)) in wanted.iter().enumerate() {
            let dtype = record.dtype()?;
            let size = dtype.size();
            for (wanted, local) in boxes(place) {
                for piece in &record.pieces {
                    let Some(&first) = self.first.get(piece.file.as_str()) else { continue };
                    let position = first + piece.start;
                    let end = position + (piece.slice.numel() * size) as u64;
                    if position >= share.end || end <= share.start {
                        continue;
                    }
                    let Some(both) = wanted.intersection(&piece.slice) else { continue };
                    let from = difference(&both.offset, &piece.slice.offset);
                    let inner = difference(&both.offset, &wanted.offset);
                    let to = inner.iter().zip(&local).map(|(a, b)| a + b).collect();
                    let dims = place.dims().to_vec();
                    parts.push(Part {
                        target,
                        positions: position..end,
                        dtype,
                        size,
                        piece: &piece.slice.shape,
                        shape: both.shape,
                        from,
                        dims,
                        to,
                    });
                }
            }
        }
        in_order(&mut parts);
        Ok(parts)
    }
}

/// The part of a piece in a file that belongs to a target.
#[derive(Clone)]
pub(super) struct Part<'a> {
    /// Number of the target among those of its rank.
    pub target: usize,
    /// Positions of all bytes of the piece.
    positions: Range<u64>,
    /// The stored dtype, and the bytes of an element.
    pub dtype: DType,
    size: usize,
    /// Dims of the piece, and where the box begins in it.
    piece: &'a [usize],
    from: Vec<usize>,
    /// Size of the box.
    shape: Vec<usize>,
    /// Dims of the target, and where the box begins in it.
    dims: Vec<usize>,
    to: Vec<usize>,
}

impl Part<'_> {
    /// The positions from its first byte to its last.
    fn span(&self) -> Range<u64> {
        let start = self.positions.start;
        if self.shape.contains(&0) {
            return start..start;
        }
        let element = |at: &dyn Fn(usize) -> usize| {
            let index = (0..self.piece.len()).fold(0, |index, d| index * self.piece[d] + at(d));
            (index * self.size) as u64
        };
        let last = element(&|d| self.from[d] + self.shape[d] - 1);
        start + element(&|d| self.from[d])..start + last + self.size as u64
    }

    /// Calls `f(position, offset in the target, length)`, all in bytes, for each run of the part's bytes that lies in
    /// `window`.
    pub fn runs<E>(
        &self,
        window: &Range<u64>,
        mut f: impl FnMut(u64, usize, usize) -> Result<(), E>,
    ) -> Result<(), E> {
        let (mut shape, mut from, mut to) =
            (self.shape.clone(), self.from.clone(), self.to.clone());
        if let Some(&rows) = shape.first() {
            // Rows that the window does not touch are skipped at once.
            let row = (self.piece[1..].iter().product::<usize>() * self.size).max(1) as u64;
            let low = window.start.saturating_sub(self.positions.start) / row;
            let high = window.end.saturating_sub(self.positions.start).div_ceil(row);
            let low = (low as usize).clamp(from[0], from[0] + rows);
            let high = (high as usize).clamp(low, from[0] + rows);
            to[0] += low - from[0];
            (shape[0], from[0]) = (high - low, low);
        }
        let copy = Copy { shape: &shape, source: (self.piece, &from), target: (&self.dims, &to) };
        copy.runs(|from, to, length| {
            let first = self.positions.start + (from * self.size) as u64;
            let start = first.max(window.start);
            let end = (first + (length * self.size) as u64).min(window.end);
            match start < end {
                true => f(start, to * self.size + (start - first) as usize, (end - start) as usize),
                false => Ok(()),
            }
        })
    }
}

/// Sorts parts by their positions; those of one piece stay in their order.
pub(super) fn in_order(parts: &mut [Part]) {
    parts.sort_by_key(|part| part.positions.start);
}

/// The parts, of those in the order of their positions, that have bytes in `window`.
pub(super) fn overlapping<'p, 'a>(parts: &'p [Part<'a>], window: &Range<u64>) -> &'p [Part<'a>] {
    let first = parts.partition_point(|part| part.positions.end <= window.start);
    let end = parts.partition_point(|part| part.positions.start < window.end);
    &parts[first..end.max(first)]
}

/// Number of bytes in `window` of all `parts`.
pub(super) fn bytes_in(parts: &[Part], window: &Range<u64>) -> usize {
    let mut bytes = 0;
    for part in parts {
        let counted = part.runs(window, |_, _, length| {
            bytes += length;
            Ok::<(), std::convert::Infallible>(())
        });
        counted.unwrap_or_else(|never| match never {});
    }
    bytes
}

/// Whether this is one of the small files, which every rank reads and compares for itself.
pub(super) fn is_document(file: &str) -> bool {
    [CONFIG, PROGRESS, TOKENIZER].contains(&file)
}

fn length(range: &Range<u64>) -> u64 {
    range.end - range.start
}

pub(super) fn difference(a: &[usize], b: &[usize]) -> Vec<usize> {
    a.iter().zip(b).map(|(a, b)| a - b).collect()
}
