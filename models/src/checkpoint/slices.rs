//! Boxes of global tensors: which part of one lies where in another.

use ferrotron_tensor::Place;
use serde::{Deserialize, Serialize};

/// A box of a global tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Slice {
    /// First index in each dim.
    pub offset: Vec<usize>,
    /// Length in each dim.
    pub shape: Vec<usize>,
}

impl Slice {
    pub fn numel(&self) -> usize {
        numel(&self.shape)
    }

    /// Whether the box lies in a tensor of `dims`.
    pub fn lies_in(&self, dims: &[usize]) -> bool {
        let inside = |((&offset, &len), &size): ((&usize, &usize), &usize)| {
            offset.checked_add(len).is_some_and(|end| end <= size)
        };
        self.offset.len() == dims.len()
            && self.shape.len() == dims.len()
            && self.offset.iter().zip(&self.shape).zip(dims).all(inside)
    }

    /// What both boxes hold, unless that is nothing.
    pub fn intersection(&self, other: &Slice) -> Option<Slice> {
        let mut both = Slice { offset: Vec::new(), shape: Vec::new() };
        for d in 0..self.shape.len() {
            let start = self.offset[d].max(other.offset[d]);
            let end = (self.offset[d] + self.shape[d]).min(other.offset[d] + other.shape[d]);
            if start >= end {
                return None;
            }
            both.offset.push(start);
            both.shape.push(end - start);
        }
        Some(both)
    }
}

/// Number of elements; sizes come from a file and may be absurd.
pub(super) fn numel(dims: &[usize]) -> usize {
    dims.iter().fold(1, |n: usize, &size| n.saturating_mul(size))
}

/// The boxes that a place consists of, each with its offset in the local tensor.
pub(super) fn boxes(place: &Place) -> Vec<(Slice, Vec<usize>)> {
    let mut all = vec![(Slice { offset: vec![], shape: vec![] }, vec![])];
    for d in 0..place.dims().len() {
        all = all
            .into_iter()
            .flat_map(|(slice, local)| {
                let mut next = 0;
                place.pieces(d).iter().map(move |&(offset, len)| {
                    let (mut slice, mut local) = (slice.clone(), local.clone());
                    slice.offset.push(offset);
                    slice.shape.push(len);
                    local.push(next);
                    next += len;
                    (slice, local)
                })
            })
            .collect();
    }
    all
}

/// A box that is copied between two row-major arrays.
pub(super) struct Copy<'a> {
    /// Size of the box.
    pub shape: &'a [usize],
    /// Dims of the source and where the box begins in it.
    pub source: (&'a [usize], &'a [usize]),
    /// Dims of the target and where the box begins in it.
    pub target: (&'a [usize], &'a [usize]),
}

impl Copy<'_> {
    /// Calls `f(source index, target index, length)` for every run of elements that is consecutive on
    /// both sides, as long as can be.
    pub fn runs<E>(
        &self,
        mut f: impl FnMut(usize, usize, usize) -> Result<(), E>,
    ) -> Result<(), E> {
        if self.shape.contains(&0) {
            return Ok(());
        }
        let (mut length, mut outer) = (1, self.shape.len());
        while outer > 0 {
            outer -= 1;
            length *= self.shape[outer];
            let whole = self.shape[outer];
            if whole != self.source.0[outer] || whole != self.target.0[outer] {
                break;
            }
        }
        let index = |(dims, start): (&[usize], &[usize]), at: &[usize]| {
            (0..dims.len())
                .fold(0, |index, d| index * dims[d] + start[d] + at.get(d).copied().unwrap_or(0))
        };
        let mut at = vec![0; outer];
        loop {
            f(index(self.source, &at), index(self.target, &at), length)?;
            // The next coordinates of the outer dims, last one fastest.
            let Some(d) = (0..outer).rev().find(|&d| at[d] + 1 < self.shape[d]) else {
                return Ok(());
            };
            at[d] += 1;
            at[d + 1..].fill(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_cut_into_boxes_in_local_order() {
        let place = Place::new(&[8, 6], &[&[(4, 2)], &[(0, 2), (4, 2)]]).unwrap();
        let slice = |offset: [usize; 2]| Slice { offset: offset.to_vec(), shape: vec![2, 2] };
        assert_eq!(boxes(&place), [(slice([4, 0]), vec![0, 0]), (slice([4, 4]), vec![0, 2])]);
        let scalar = Slice { offset: vec![], shape: vec![] };
        assert_eq!(boxes(&Place::whole(&[])), [(scalar, vec![])]);
    }

    #[test]
    fn runs_are_as_long_as_both_sides_allow() {
        let runs = |shape: &[usize], source: [&[usize]; 2], target: [&[usize]; 2]| {
            let mut found = Vec::new();
            let copy =
                Copy { shape, source: (source[0], source[1]), target: (target[0], target[1]) };
            copy.runs(|from, to, len| {
                found.push((from, to, len));
                Ok::<_, ()>(())
            })
            .unwrap();
            found
        };
        assert_eq!(runs(&[2, 3], [&[4, 3], &[1, 0]], [&[2, 3], &[0, 0]]), [(3, 0, 6)]);
        assert_eq!(runs(&[2, 2], [&[4, 3], &[1, 1]], [&[2, 2], &[0, 0]]), [(4, 0, 2), (7, 2, 2)]);
        assert_eq!(runs(&[], [&[], &[]], [&[], &[]]), [(0, 0, 1)]);
        assert_eq!(runs(&[0, 3], [&[4, 3], &[1, 0]], [&[0, 3], &[0, 0]]), []);
        let whole: &[usize] = &[2, 3, 4];
        assert_eq!(runs(whole, [whole, &[0; 3]], [whole, &[0; 3]]), [(0, 0, 24)]);
    }
}
