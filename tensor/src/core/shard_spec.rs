//! Shards: the coordinates of a global tensor that a rank holds.

use smallvec::{SmallVec, smallvec};
use std::ops::Range;

use crate::core::layout::Dims;
use crate::{Error, Result};

/// A shard of a tensor: the global dims and, for each, the local (offset, length) ranges in local order. Random
/// numbers are indexed by global coordinates, so they do not depend on the sharding.
///
/// ```
/// use ferrotron_tensor::ShardSpec;
/// // Rows 4..6 of an (8, 6) tensor, and of each row the columns 0..2 and 4..6.
/// let place = ShardSpec::new(&[8, 6], &[&[(4, 2)], &[(0, 2), (4, 2)]])?;
/// assert_eq!(place.dims(), [2, 4]);
/// let runs: Vec<_> = place.runs(1).collect();
/// assert_eq!(runs, [(30, 2), (34, 2)]);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardSpec {
    global: Dims,
    pieces: Vec<Pieces>,
    dims: Dims,
}

type Pieces = SmallVec<[(usize, usize); 2]>;

impl ShardSpec {
    /// The unsharded tensor.
    pub fn unsharded(dims: &[usize]) -> ShardSpec {
        ShardSpec {
            global: dims.into(),
            pieces: dims.iter().map(|&len| smallvec![(0, len)]).collect(),
            dims: dims.into(),
        }
    }

    /// A shard with these (offset, length) ranges of each dim.
    ///
    /// # Errors
    ///
    /// Errors if the number of lists is not that of the dims, or a range is out of bounds. Errors if the total length
    /// of a dim's ranges overflows.
    pub fn new(global: &[usize], pieces: &[&[(usize, usize)]]) -> Result<ShardSpec> {
        let inside = |(&size, list): (&usize, &&[(usize, usize)])| {
            list.iter().all(|&(offset, len)| offset.checked_add(len).is_some_and(|end| end <= size))
        };
        let sum = |list: &&[(usize, usize)]| {
            list.iter().try_fold(0_usize, |sum, &(_, len)| sum.checked_add(len))
        };
        let dims = pieces.iter().map(sum).collect::<Option<Dims>>();
        let (true, Some(dims)) =
            (global.len() == pieces.len() && global.iter().zip(pieces).all(inside), dims)
        else {
            return Err(Error::shape(
                "place",
                format!("pieces {pieces:?} do not lie in {global:?}"),
            ));
        };
        Ok(ShardSpec {
            global: global.into(),
            pieces: pieces.iter().map(|&list| list.into()).collect(),
            dims,
        })
    }

    /// The local dims.
    pub fn dims(&self) -> &[usize] {
        &self.dims
    }

    /// The dims of the global tensor.
    pub fn global_dims(&self) -> &[usize] {
        &self.global
    }

    /// The local (offset, length) ranges of one dim, in local order.
    pub fn pieces(&self, dim: usize) -> &[(usize, usize)] {
        &self.pieces[dim]
    }

    /// Intersects this shard with `range` of global dim `dim`.
    ///
    /// ```
    /// use ferrotron_tensor::ShardSpec;
    /// // Of a (12, 4) the rows 0..2, 4..6 and 8..10: a half of each of three blocks of four rows.
    /// let place = ShardSpec::new(&[12, 4], &[&[(0, 2), (4, 2), (8, 2)], &[(0, 4)]])?;
    /// assert_eq!(place.intersect_dim(0, 4..8), ShardSpec::new(&[12, 4], &[&[(4, 2)], &[(0, 4)]])?);
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    #[must_use]
    pub fn intersect_dim(&self, dim: usize, range: Range<usize>) -> ShardSpec {
        let mut part = self.clone();
        let inside = self.pieces[dim].iter().filter_map(|&(offset, len)| {
            let (start, end) = (offset.max(range.start), (offset + len).min(range.end));
            (start < end).then(|| (start, end - start))
        });
        part.pieces[dim] = inside.collect();
        part.dims[dim] = part.pieces[dim].iter().map(|&(_, len)| len).sum();
        part
    }

    /// The shard that remains after a reduction over one dim: all other dims.
    ///
    /// ```
    /// use ferrotron_tensor::ShardSpec;
    /// let rows = ShardSpec::new(&[8, 6], &[&[(4, 2)], &[(0, 6)]])?;
    /// assert_eq!(rows.drop_dim(1), ShardSpec::new(&[8], &[&[(4, 2)]])?);
    /// assert_eq!(rows.drop_dim(0), ShardSpec::unsharded(&[6]));
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    #[must_use]
    pub fn drop_dim(&self, dim: usize) -> ShardSpec {
        let mut rest = self.clone();
        rest.global.remove(dim);
        rest.pieces.remove(dim);
        rest.dims.remove(dim);
        rest
    }

    /// The ranges of consecutive global indices in local row `row` (a row is along the last dim): (first global
    /// index, length).
    pub fn runs(&self, row: usize) -> impl Iterator<Item = (u64, usize)> + '_ {
        let outer = self.global.len().saturating_sub(1);
        let width = self.global.last().map_or(1, |&size| size as u64);
        let mut rest = row;
        let mut scale = width;
        let mut start = 0;
        for d in (0..outer).rev() {
            let local = rest % self.dims[d].max(1);
            rest /= self.dims[d].max(1);
            start += self.global_coordinate(d, local) as u64 * scale;
            scale *= self.global[d] as u64;
        }
        let scalar: &[(usize, usize)] = &[(0, 1)];
        let last = self.pieces.last().map_or(scalar, |pieces| pieces.as_slice());
        last.iter().map(move |&(offset, len)| (start + offset as u64, len))
    }

    /// The boxes that make up the local elements `range`, in row-major order, each as a shard. Checkpoints store
    /// shards of flat buffers as these boxes.
    ///
    /// ```
    /// use ferrotron_tensor::ShardSpec;
    /// // Elements 2..7 of a (3, 3): the end of row 0, row 1, the beginning of row 2.
    /// let boxes = ShardSpec::unsharded(&[3, 3]).boxes(2..7);
    /// let dims: Vec<_> = boxes.iter().map(|part| part.dims().to_vec()).collect();
    /// assert_eq!(dims, [[1, 1], [1, 3], [1, 1]]);
    /// ```
    pub fn boxes(&self, range: Range<usize>) -> Vec<ShardSpec> {
        let mut found = Vec::new();
        cut(&self.dims, range, &[], &mut found);
        found.iter().map(|local| self.narrowed(local)).collect()
    }

    /// The sub-shard at the local box `local`, an (offset, length) per dim.
    fn narrowed(&self, local: &[(usize, usize)]) -> ShardSpec {
        let pieces = self.pieces.iter().zip(local).map(|(pieces, &(from, count))| {
            let mut before = 0;
            let inside = pieces.iter().filter_map(|&(offset, len)| {
                let start = from.clamp(before, before + len) - before;
                let end = (from + count).clamp(before, before + len) - before;
                before += len;
                (start < end).then_some((offset + start, end - start))
            });
            inside.collect()
        });
        ShardSpec {
            global: self.global.clone(),
            pieces: pieces.collect(),
            dims: local.iter().map(|&(_, len)| len).collect(),
        }
    }

    fn global_coordinate(&self, dim: usize, local: usize) -> usize {
        let mut left = local;
        for &(offset, len) in &self.pieces[dim] {
            if left < len {
                return offset + left;
            }
            left -= len;
        }
        unreachable!("local coordinates are below the sum of the pieces")
    }
}

/// Range `index` of `len` elements partitioned into `parts` ranges, whose lengths differ by at most one. Collectives,
/// vocabulary shards and optimizer shards all use this partition. A range beyond the last, thus every range of no
/// parts, is empty.
///
/// ```
/// use ferrotron_tensor::partition_range;
/// let parts: Vec<_> = (0..4).map(|i| partition_range(10, 4, i)).collect();
/// assert_eq!(parts, [0..2, 2..5, 5..7, 7..10]);
/// ```
pub fn partition_range(len: usize, parts: usize, index: usize) -> Range<usize> {
    if index >= parts {
        return len..len;
    }
    // u128, so that no length overflows.
    let bound = |i: usize| (len as u128 * i as u128 / parts as u128) as usize;
    bound(index)..bound(index + 1)
}

/// Splits the row-major elements `range` of a box of `dims` into boxes. `outer` holds (offset, length) of the
/// preceding dims.
fn cut(
    dims: &[usize],
    range: Range<usize>,
    outer: &[(usize, usize)],
    found: &mut Vec<Vec<(usize, usize)>>,
) {
    let Some((_, inner)) = dims.split_first() else {
        found.extend((!range.is_empty()).then(|| outer.to_vec()));
        return;
    };
    let row: usize = inner.iter().product();
    if range.is_empty() || row == 0 {
        return;
    }
    // The end of a row, then whole rows, then the beginning of a row; each may be empty.
    let last = range.end / row;
    let first = range.start.div_ceil(row).min(last);
    let head = range.start..range.end.min(first * row);
    let tail = range.start.max(last * row)..range.end;
    let part_of_row = |index: usize, elements: Range<usize>, found: &mut Vec<_>| {
        let outer = [outer, &[(index, 1)]].concat();
        let start = index * row;
        cut(inner, elements.start - start..elements.end - start, &outer, found);
    };
    if !head.is_empty() {
        part_of_row(first - 1, head, found);
    }
    if first < last {
        let whole: Vec<_> = inner.iter().map(|&len| (0, len)).collect();
        found.push([outer, &[(first, last - first)], &whole].concat());
    }
    if !tail.is_empty() {
        part_of_row(last, tail, found);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The elements of a range's boxes are the elements of the range, in order.
    #[test]
    fn boxes_hold_the_elements_of_a_range() {
        let elements = |place: &ShardSpec| -> Vec<u64> {
            let numel: usize = place.dims().iter().product();
            let rows = numel.checked_div(place.dims().last().copied().unwrap_or(1)).unwrap_or(0);
            let runs = (0..rows).flat_map(|row| place.runs(row).collect::<Vec<_>>());
            runs.flat_map(|(start, len)| start..start + len as u64).collect()
        };
        for dims in [&[][..], &[7], &[3, 4], &[2, 1, 3], &[2, 3, 2, 2], &[3, 0]] {
            // Every other coordinate of a tensor twice as large, so that there are several ranges per dim.
            let global: Vec<usize> = dims.iter().map(|&len| 2 * len).collect();
            let pieces: Vec<Vec<(usize, usize)>> =
                dims.iter().map(|&len| (0..len).map(|i| (2 * i, 1)).collect()).collect();
            let pieces: Vec<&[(usize, usize)]> = pieces.iter().map(Vec::as_slice).collect();
            let place = ShardSpec::new(&global, &pieces).unwrap();
            let (all, numel) = (elements(&place), dims.iter().product());
            for start in 0..=numel {
                for end in start..=numel {
                    let boxes = place.boxes(start..end);
                    let got: Vec<u64> = boxes.iter().flat_map(elements).collect();
                    assert_eq!(got, all[start..end], "{start}..{end} of {dims:?}");
                    assert!(boxes.len() < (2 * dims.len()).max(2), "{start}..{end} of {dims:?}");
                }
            }
        }
    }

    #[test]
    fn ranges_that_no_partition_has_are_empty() {
        for (parts, index) in [(0, 0), (0, 3), (2, 2), (2, usize::MAX), (0, usize::MAX)] {
            assert_eq!(partition_range(10, parts, index), 10..10, "range {index} of {parts}");
        }
        assert_eq!(partition_range(usize::MAX, 1, 0), 0..usize::MAX);
    }

    #[test]
    fn pieces_that_reach_outside_are_refused() {
        let max = usize::MAX;
        for pieces in [[(3, 2)], [(max, 2)]] {
            assert!(ShardSpec::new(&[4], &[&pieces]).is_err(), "{pieces:?}");
        }
        assert!(ShardSpec::new(&[max], &[&[(0, max), (0, 2)]]).is_err());
        assert_eq!(ShardSpec::new(&[4], &[&[(3, 1), (0, 2)]]).unwrap().dims(), [3]);
    }
}
