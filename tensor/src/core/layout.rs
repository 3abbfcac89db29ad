//! The memory layout of a view: dims, strides and an offset, all in elements.
//!
//! Views never copy. A broadcast dim has stride 0; strides are never negative. The constructors limit the number of
//! elements so that sizes, strides and bytes never overflow.

use crate::{Error, Result};
use smallvec::SmallVec;

/// Sizes or strides, inline up to five dims.
pub type Dims = SmallVec<[usize; 5]>;

/// Maximum elements of a layout: in the widest dtype, 8 bytes, they fill the largest possible slice.
const MOST_ELEMENTS: usize = isize::MAX as usize / 8;

/// The dims, strides and offset of a view into a buffer.
#[derive(Debug, PartialEq, Eq)]
pub struct Layout {
    dims: Dims,
    strides: Dims,
    offset: usize,
}

/// Copies dims at once: `SmallVec::clone` takes them one by one, and a step of a small model clones hundreds of layouts.
impl Clone for Layout {
    fn clone(&self) -> Self {
        let Layout { dims, strides, offset } = self;
        Layout { dims: Dims::from_slice(dims), strides: Dims::from_slice(strides), offset: *offset }
    }
}

impl Layout {
    /// Row-major and dense, with offset 0.
    ///
    /// Errors if the elements exceed the address space.
    pub fn contiguous(dims: &[usize]) -> Result<Self> {
        count("layout", dims)?;
        Ok(Layout { strides: row_major(dims), dims: Dims::from_slice(dims), offset: 0 })
    }

    /// A dense vector. The caller already has memory for `len` elements, so the size needs no check.
    pub(crate) fn vector(len: usize) -> Self {
        Layout { dims: Dims::from_elem(len, 1), strides: Dims::from_elem(1, 1), offset: 0 }
    }

    /// Sizes, outermost first.
    pub fn dims(&self) -> &[usize] {
        &self.dims
    }

    /// Stride of each dim, in elements.
    pub fn strides(&self) -> &[usize] {
        &self.strides
    }

    /// Index of the first element.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Number of dims.
    pub fn rank(&self) -> usize {
        self.dims.len()
    }

    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.dims.iter().product()
    }

    /// One more than the index of the last element; 0 if there are no elements.
    pub(crate) fn end(&self) -> usize {
        if self.numel() == 0 {
            return 0;
        }
        let reach = |(&size, &stride): (&usize, &usize)| (size - 1) * stride;
        1 + self.offset + self.dims.iter().zip(&self.strides).map(reach).sum::<usize>()
    }

    /// Returns whether the elements are dense in row-major order (dims of size 1 are ignored).
    pub fn is_contiguous(&self) -> bool {
        let mut expected = 1;
        for (&size, &stride) in self.dims.iter().zip(&self.strides).rev() {
            if size == 0 {
                return true;
            }
            if size != 1 && stride != expected {
                return false;
            }
            expected *= size;
        }
        true
    }

    /// Returns whether an element appears at more than one index, so that writing through this view is not allowed.
    pub(crate) fn overlaps(&self) -> bool {
        // Only broadcasting makes indices alias, and its strides are 0.
        self.numel() > 0
            && self.dims.iter().zip(&self.strides).any(|(&n, &stride)| n > 1 && stride == 0)
    }

    /// The same elements under other dims, or `None` if that needs a copy.
    pub fn reshape(&self, dims: &[usize]) -> Option<Layout> {
        if count("reshape", dims).ok()? != self.numel() {
            return None;
        }
        if self.is_contiguous() {
            return Some(Layout {
                strides: row_major(dims),
                dims: Dims::from_slice(dims),
                offset: self.offset,
            });
        }
        // Walks both shapes from the innermost dim; each dense group of old dims can be split into new dims freely.
        let old: Vec<(usize, usize)> = self
            .dims
            .iter()
            .copied()
            .zip(self.strides.iter().copied())
            .filter(|&(size, _)| size != 1)
            .collect();
        let mut strides = Dims::from_elem(1, dims.len());
        let mut next_new = dims.len();
        let mut next_old = old.len();
        while next_old > 0 {
            let mut group = 1;
            let base = old[next_old - 1].1;
            let mut expected = base;
            loop {
                let (size, stride) = old[next_old - 1];
                if stride != expected {
                    break;
                }
                group *= size;
                expected = stride * size;
                next_old -= 1;
                if next_old == 0 {
                    break;
                }
            }
            let mut filled = 1;
            while filled < group {
                next_new = next_new.checked_sub(1)?;
                strides[next_new] = base * filled;
                filled *= dims[next_new];
            }
            if filled != group {
                return None;
            }
        }
        Some(Layout { dims: Dims::from_slice(dims), strides, offset: self.offset })
    }

    /// Reorders the dims: `permute(&[1, 0])` transposes a matrix.
    pub fn permute(&self, order: &[usize]) -> Result<Layout> {
        let mut seen = Dims::from_elem(0, self.rank());
        let valid = order.len() == self.rank()
            && order.iter().all(|&d| d < self.rank() && std::mem::replace(&mut seen[d], 1) == 0);
        if !valid {
            return Err(Error::shape(
                "permute",
                format!("{order:?} is no order of the dims of {:?}", &self.dims[..]),
            ));
        }
        let mut layout = self.clone();
        for (to, &from) in order.iter().enumerate() {
            (layout.dims[to], layout.strides[to]) = (self.dims[from], self.strides[from]);
        }
        Ok(layout)
    }

    /// Restricts one dim to elements `start..start + len`.
    pub fn narrow(&self, dim: usize, start: usize, len: usize) -> Result<Layout> {
        let end = start.saturating_add(len); // `usize::MAX` is out of bounds for every dim
        if dim >= self.rank() || end > self.dims[dim] {
            return Err(Error::shape(
                "narrow",
                format!("{start}..{end} of dim {dim} is outside of {:?}", &self.dims[..]),
            ));
        }
        let mut layout = self.clone();
        layout.dims[dim] = len;
        // An empty view keeps its offset: past the last element there may be no memory.
        if layout.numel() > 0 {
            layout.offset += start * layout.strides[dim];
        }
        Ok(layout)
    }

    /// Expands dims of size 1, and adds leading dims, with stride 0 (NumPy's rule).
    pub fn broadcast_to(&self, dims: &[usize]) -> Result<Layout> {
        let refuse = || {
            Err(Error::shape(
                "broadcast",
                format!("{:?} does not broadcast to {dims:?}", &self.dims[..]),
            ))
        };
        let Some(extra) = dims.len().checked_sub(self.rank()) else { return refuse() };
        let mut strides = Dims::from_elem(0, dims.len());
        for (d, (&size, &stride)) in self.dims.iter().zip(&self.strides).enumerate() {
            if size == dims[extra + d] {
                strides[extra + d] = stride;
            } else if size != 1 {
                return refuse();
            }
        }
        count("broadcast", dims)?;
        Ok(Layout { dims: Dims::from_slice(dims), strides, offset: self.offset })
    }

    /// Size and stride of the last dim; (1, 1) for a scalar.
    pub(crate) fn row(&self) -> (usize, usize) {
        match (self.dims.last(), self.strides.last()) {
            (Some(&size), Some(&stride)) => (size, stride),
            _ => (1, 1),
        }
    }

    /// Index into the buffer of the `row`-th row's first element.
    pub(crate) fn row_offset(&self, row: usize) -> usize {
        let outer = self.rank().saturating_sub(1);
        let mut rest = row;
        let mut index = self.offset;
        for d in (0..outer).rev() {
            index += rest % self.dims[d] * self.strides[d];
            rest /= self.dims[d];
        }
        index
    }
}

/// Number of elements of `dims`.
///
/// Errors if it exceeds the address space with dims of size 0 counted as 1, so that no partial product overflows
/// either.
pub(crate) fn count(op: &'static str, dims: &[usize]) -> Result<usize> {
    let product = dims.iter().try_fold(1_usize, |product, &size| product.checked_mul(size.max(1)));
    match product {
        Some(most) if most <= MOST_ELEMENTS => Ok(dims.iter().product()),
        _ => Err(Error::shape(op, format!("{dims:?} has more elements than memory could hold"))),
    }
}

/// Strides of a dense row-major tensor.
fn row_major(dims: &[usize]) -> Dims {
    let mut strides = Dims::from_elem(1, dims.len());
    for d in (1..dims.len()).rev() {
        strides[d - 1] = strides[d] * dims[d].max(1);
    }
    strides
}

/// The dims that two shapes broadcast to (NumPy's rule). Errors, naming `op`, if they are incompatible.
pub fn broadcast_dims(op: &'static str, lhs: &[usize], rhs: &[usize]) -> Result<Dims> {
    let rank = lhs.len().max(rhs.len());
    let size = |dims: &[usize], d: usize| (d + dims.len()).checked_sub(rank).map_or(1, |d| dims[d]);
    (0..rank)
        .map(|d| match (size(lhs, d), size(rhs, d)) {
            (a, b) if a == b => Ok(a),
            (1, b) => Ok(b),
            (a, 1) => Ok(a),
            _ => {
                let hint = if share_of_sequence(lhs, rhs) { SHARE_OF_SEQUENCE } else { "" };
                let message = format!("shapes do not broadcast: lhs {lhs:?}, rhs {rhs:?}{hint}");
                Err(Error::shape(op, message))
            }
        })
        .collect()
}

/// A remedy for operands where one has the positions of one rank and the other those of all.
const SHARE_OF_SEQUENCE: &str = "; with sequence parallelism dim 1 has ctx.residual.len() positions between blocks, \
                                 and ctx.sequence.len() within attention";

/// Returns whether activations (B, T, ..) differ in T alone, one being a multiple of the other.
fn share_of_sequence(lhs: &[usize], rhs: &[usize]) -> bool {
    let (&[b, t, ref features @ ..], &[c, u, ref others @ ..]) = (lhs, rhs) else { return false };
    let (more, less) = (t.max(u), t.min(u));
    b == c && features == others && !features.is_empty() && less > 1 && more % less == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reshape_keeps_views_where_strides_allow() {
        let x = Layout::contiguous(&[2, 3, 4]).unwrap();
        assert_eq!(x.reshape(&[6, 4]).unwrap().strides(), &[4, 1]);
        let t = x.permute(&[1, 0, 2]).unwrap(); // (3, 2, 4), strides (4, 12, 1)
        assert!(t.reshape(&[6, 4]).is_none());
        assert_eq!(t.reshape(&[3, 2, 2, 2]).unwrap().strides(), &[4, 12, 2, 1]);
        let narrow = x.narrow(2, 1, 2).unwrap();
        assert_eq!(narrow.reshape(&[6, 2]).unwrap().strides(), &[4, 1]);
        assert!(narrow.reshape(&[12]).is_none());
    }

    #[test]
    fn rows_are_visited_in_row_major_order() {
        let t = Layout::contiguous(&[2, 3, 4]).unwrap().permute(&[2, 0, 1]).unwrap();
        assert_eq!(
            (0..8).map(|row| t.row_offset(row)).collect::<Vec<_>>(),
            [0, 12, 1, 13, 2, 14, 3, 15]
        );
        assert_eq!(t.row(), (3, 4));
    }

    #[test]
    fn broadcasting_follows_numpy() {
        assert_eq!(&broadcast_dims("add", &[4, 1, 3], &[2, 1]).unwrap()[..], &[4, 2, 3]);
        let error = broadcast_dims("add", &[4], &[3]).unwrap_err();
        assert_eq!(error.to_string(), "add: shapes do not broadcast: lhs [4], rhs [3]");
        let error = broadcast_dims("add", &[2, 4, 6], &[2, 8, 6]).unwrap_err();
        assert!(error.to_string().contains("rhs [2, 8, 6]; with sequence parallelism"), "{error}");
        assert_eq!(
            Layout::contiguous(&[3, 1]).unwrap().broadcast_to(&[2, 3, 4]).unwrap().strides(),
            &[0, 1, 0]
        );
    }

    #[test]
    fn sizes_that_no_memory_holds_are_refused() {
        let message = |result: Result<Layout>| result.unwrap_err().to_string();
        let refused = "layout: [2305843009213693952] has more elements than memory could hold";
        assert_eq!(message(Layout::contiguous(&[1 << 61])), refused);
        for dims in [&[1 << 63, 2][..], &[0, 1 << 63, 2], &[1 << 32, 1 << 32]] {
            assert!(Layout::contiguous(dims).is_err(), "{dims:?}");
        }
        let empty = Layout::contiguous(&[0]).unwrap();
        assert!(empty.reshape(&[1 << 63, 2]).is_none() && empty.reshape(&[4, 0]).is_some());
        let one = Layout::contiguous(&[1]).unwrap();
        assert!(message(one.broadcast_to(&[1 << 40, 1 << 40])).starts_with("broadcast: "));
        let ten = Layout::contiguous(&[10]).unwrap();
        assert_eq!(message(ten.narrow(0, 0, 11)), "narrow: 0..11 of dim 0 is outside of [10]");
        assert!(ten.narrow(0, usize::MAX, 2).is_err());
        assert_eq!(ten.narrow(0, 10, 0).unwrap().offset(), 0);
    }

    #[test]
    fn only_broadcast_views_overlap() {
        let x = Layout::contiguous(&[1, 3]).unwrap();
        let stretched = x.broadcast_to(&[4, 3]).unwrap();
        assert!(stretched.overlaps() && stretched.reshape(&[2, 2, 3]).unwrap().overlaps());
        assert!(!stretched.narrow(0, 2, 1).unwrap().overlaps());
        assert!(!x.permute(&[1, 0]).unwrap().overlaps());
    }
}
