//! Dims that methods of the shared list compute: negative dims, ranges, parts and repetitions.

use std::ops::{Bound, Range, RangeBounds};

use crate::{Error, Result};

/// The index of a dim that may be counted from the end.
///
/// Errors if there is none.
pub fn resolve_dim(op: &'static str, dims: &[usize], dim: isize) -> Result<usize> {
    let rank = dims.len() as isize;
    let resolved = if dim < 0 { dim + rank } else { dim };
    if (0..rank).contains(&resolved) {
        Ok(resolved as usize)
    } else {
        Err(Error::shape(op, format!("there is no dim {dim} in {dims:?}")))
    }
}

/// The place of a new dim, from 0 to the rank; -1 is behind the last dim.
pub fn resolve_new_dim(op: &'static str, dims: &[usize], dim: isize) -> Result<usize> {
    let rank = dims.len() as isize;
    let resolved = if dim < 0 { dim + rank + 1 } else { dim };
    if (0..=rank).contains(&resolved) {
        Ok(resolved as usize)
    } else {
        let message =
            format!("no dim can be added at {dim} of {dims:?}: use -{} to {rank}", rank + 1);
        Err(Error::shape(op, message))
    }
}

/// The positions of a range along a dim of `size`. Bounds may be counted from the end, as in Python.
///
/// Errors if the range exceeds the dim or ends before it begins.
pub fn resolve_range(
    op: &'static str,
    size: usize,
    range: &impl RangeBounds<isize>,
) -> Result<Range<usize>> {
    let wrapped = |at: isize| if at < 0 { at.saturating_add(size as isize) } else { at };
    let start = match range.start_bound() {
        Bound::Unbounded => 0,
        Bound::Included(&at) => wrapped(at),
        Bound::Excluded(&at) => wrapped(at).saturating_add(1),
    };
    let end = match range.end_bound() {
        Bound::Unbounded => size as isize,
        Bound::Included(&at) => wrapped(at).saturating_add(1),
        Bound::Excluded(&at) => wrapped(at),
    };
    if 0 <= start && start <= end && end <= size as isize {
        Ok(start as usize..end as usize)
    } else {
        Err(Error::shape(op, format!("the range {start}..{end} is outside of a dim of {size}")))
    }
}

/// `dims` with a dim of size 1 removed, or unchanged if its size is not 1.
pub fn squeezed(dims: &[usize], dim: isize) -> Result<Vec<usize>> {
    let dim = resolve_dim("squeeze", dims, dim)?;
    let mut dims = dims.to_vec();
    if dims[dim] == 1 {
        dims.remove(dim);
    }
    Ok(dims)
}

/// `dims` with a dim of size 1 added.
pub fn unsqueezed(op: &'static str, dims: &[usize], dim: isize) -> Result<Vec<usize>> {
    let dim = resolve_new_dim(op, dims, dim)?;
    let mut dims = dims.to_vec();
    dims.insert(dim, 1);
    Ok(dims)
}

/// `dims` with those from `start` to `end`, inclusive, merged into one.
pub fn flattened(dims: &[usize], start: isize, end: isize) -> Result<Vec<usize>> {
    if dims.is_empty() && (-1..=0).contains(&start) && (-1..=0).contains(&end) {
        return Ok(vec![1]);
    }
    let first = resolve_dim("flatten", dims, start)?;
    let last = resolve_dim("flatten", dims, end)?;
    if first > last {
        let message = format!("dim {start} of {dims:?} comes after dim {end}");
        return Err(Error::shape("flatten", message));
    }
    let merged = product(&dims[first..=last]).ok_or_else(|| {
        Error::shape("flatten", format!("dims {start} to {end} of {dims:?} have too many elements"))
    })?;
    Ok([&dims[..first], &[merged], &dims[last + 1..]].concat())
}

/// The product, unless it overflows.
fn product(sizes: &[usize]) -> Option<usize> {
    sizes.iter().try_fold(1_usize, |product, &size| product.checked_mul(size))
}

/// The sizes of at most `chunks` parts of equal size; the last may be smaller. An empty dim has as many empty parts.
pub fn chunk_sizes(size: usize, chunks: usize) -> Result<Vec<usize>> {
    if chunks == 0 {
        return Err(Error::value("chunk", "needs one chunk or more, got 0"));
    }
    if size == 0 {
        return Ok(vec![0; chunks]);
    }
    let part = size.div_ceil(chunks);
    let count = size.div_ceil(part);
    Ok((0..count).map(|i| part.min(size - i * part)).collect())
}

/// The three shapes through which a tensor is repeated: with a dim of size 1 before each, with that dim expanded, and
/// with both merged.
pub fn repeated(dims: &[usize], counts: &[usize]) -> Result<[Vec<usize>; 3]> {
    let Some(extra) = counts.len().checked_sub(dims.len()) else {
        let message = format!("needs a count for each dim of {dims:?}, got {counts:?}");
        return Err(Error::shape("repeat", message));
    };
    let size = |d: usize| if d < extra { 1 } else { dims[d - extra] };
    let pairs = |f: &dyn Fn(usize) -> usize| {
        counts.iter().enumerate().flat_map(|(d, _)| [f(d), size(d)]).collect::<Vec<_>>()
    };
    let merged: Option<Vec<usize>> =
        counts.iter().enumerate().map(|(d, count)| count.checked_mul(size(d))).collect();
    // As many elements as the address space has bytes fit no memory.
    let fits = |sizes: &Vec<usize>| product(sizes).is_some_and(|n| isize::try_from(n).is_ok());
    let Some(merged) = merged.filter(fits) else {
        let message = format!("{counts:?} times {dims:?} are too many elements");
        return Err(Error::shape("repeat", message));
    };
    Ok([pairs(&|_| 1), pairs(&|d| counts[d]), merged])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_count_from_the_end_and_never_reach_beyond_it() {
        let last = -1;
        assert_eq!(resolve_range("slice", 5, &(1..last)).unwrap(), 1..4);
        assert_eq!(resolve_range("slice", 5, &(-2..)).unwrap(), 3..5);
        assert_eq!(resolve_range("slice", 5, &(..=-1)).unwrap(), 0..5);
        assert_eq!(resolve_range("slice", 0, &(..)).unwrap(), 0..0);
        for (start, end) in [(0, 6), (-6, 5), (3, 2), (0, isize::MAX), (isize::MIN, 5)] {
            assert!(resolve_range("slice", 5, &(start..end)).is_err(), "{start}..{end}");
        }
    }

    #[test]
    fn chunks_are_those_of_pytorch() {
        assert_eq!(chunk_sizes(11, 6).unwrap(), [2, 2, 2, 2, 2, 1]);
        assert_eq!(chunk_sizes(12, 5).unwrap(), [3, 3, 3, 3]);
        assert_eq!(chunk_sizes(2, 5).unwrap(), [1, 1]);
        assert_eq!(chunk_sizes(0, 3).unwrap(), [0, 0, 0]);
    }

    #[test]
    fn merged_and_repeated_dims() {
        assert_eq!(flattened(&[2, 3, 4], 1, -1).unwrap(), [2, 12]);
        assert_eq!(flattened(&[], 0, -1).unwrap(), [1]);
        assert!(flattened(&[2, 3], 1, 0).is_err());
        assert_eq!(repeated(&[3], &[4, 2]).unwrap()[2], [4, 6]);
        assert!(repeated(&[3, 3], &[2]).is_err());
        for counts in [[usize::MAX, 1], [1 << 40, 1 << 40], [1, usize::MAX / 2]] {
            let error = repeated(&[3, 3], &counts).unwrap_err().to_string();
            assert_eq!(error, format!("repeat: {counts:?} times [3, 3] are too many elements"));
        }
        assert!(flattened(&[1 << 40, 1 << 40, 0], 0, 1).is_err());
        assert!(resolve_range("slice", 5, &(0..=isize::MAX)).is_err());
    }
}
