//! Boxes of global tensors: which part of one lies where in another.

use ferrotron_tensor::ShardSpec;
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

    /// The intersection of both boxes, unless it is empty.
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

/// Whether `boxes` of a tensor of `dims` hold every element of it once.
///
/// The number of boxes that hold an element is a sum over the corners of all boxes at or before it: each corner counts
/// 1 or, with an odd number of upper coordinates, -1. So the boxes tile the whole exactly if their corners, added up,
/// are those of the whole. That takes O(n log n) time for n boxes of few dims.
pub(super) fn is_tiled<'a>(dims: &[usize], boxes: impl Iterator<Item = &'a Slice>) -> bool {
    let mut corners: Vec<(Vec<usize>, i64)> = Vec::new();
    let mut add = |offset: &[usize], shape: &[usize], count: i64| {
        for upper in 0_usize..1 << dims.len() {
            let coordinate = |d: usize| offset[d] + if upper >> d & 1 == 1 { shape[d] } else { 0 };
            let sign = if upper.count_ones() % 2 == 0 { count } else { -count };
            corners.push(((0..dims.len()).map(coordinate).collect(), sign));
        }
    };
    boxes.for_each(|slice| add(&slice.offset, &slice.shape, 1));
    add(&vec![0; dims.len()], dims, -1);
    corners.sort_unstable();
    corners
        .chunk_by(|a, b| a.0 == b.0)
        .all(|same| same.iter().map(|corner| corner.1).sum::<i64>() == 0)
}

/// The boxes that a place consists of, each with its offset in the local tensor.
pub(super) fn boxes(place: &ShardSpec) -> Vec<(Slice, Vec<usize>)> {
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
        let place = ShardSpec::new(&[8, 6], &[&[(4, 2)], &[(0, 2), (4, 2)]]).unwrap();
        let slice = |offset: [usize; 2]| Slice { offset: offset.to_vec(), shape: vec![2, 2] };
        assert_eq!(boxes(&place), [(slice([4, 0]), vec![0, 0]), (slice([4, 4]), vec![0, 2])]);
        let scalar = Slice { offset: vec![], shape: vec![] };
        assert_eq!(boxes(&ShardSpec::unsharded(&[])), [(scalar, vec![])]);
    }

    /// The same by looking at every pair of boxes.
    fn is_tiled_by_pairs(dims: &[usize], boxes: &[Slice]) -> bool {
        let pairs = (0..boxes.len()).flat_map(|i| (0..i).map(move |j| (i, j)));
        let overlap = pairs.into_iter().any(|(i, j)| boxes[i].intersection(&boxes[j]).is_some());
        !overlap && boxes.iter().map(Slice::numel).sum::<usize>() == numel(dims)
    }

    /// Cuts a box in two again and again.
    fn cut(mut boxes: Vec<Slice>, cuts: &[(usize, usize, usize)]) -> Vec<Slice> {
        for &(which, dim, at) in cuts {
            let cut = boxes.swap_remove(which % boxes.len());
            let dim = dim % cut.shape.len();
            let (mut low, mut high) = (cut.clone(), cut);
            low.shape[dim] = at % (low.shape[dim] + 1);
            high.offset[dim] += low.shape[dim];
            high.shape[dim] -= low.shape[dim];
            boxes.extend([low, high]);
        }
        boxes
    }

    proptest::proptest! {
        #[test]
        fn corners_find_what_pairs_find(
            dims in proptest::collection::vec(1..7_usize, 1..4),
            cuts in proptest::collection::vec((0..9_usize, 0..3_usize, 0..7_usize), 0..9),
            fault in (0..5_usize, 0..9_usize, 0..3_usize),
        ) {
            let whole = Slice { offset: vec![0; dims.len()], shape: dims.clone() };
            let mut boxes = cut(vec![whole], &cuts);
            assert!(is_tiled(&dims, boxes.iter()) && is_tiled_by_pairs(&dims, &boxes));
            let (kind, which, dim) = (fault.0, fault.1 % boxes.len(), fault.2 % dims.len());
            match kind {
                0 => drop(boxes.swap_remove(which)),
                1 => boxes.push(boxes[which].clone()),
                2 if boxes[which].offset[dim] > 0 => boxes[which].offset[dim] -= 1,
                3 if boxes[which].shape[dim] > 0 => boxes[which].shape[dim] -= 1,
                _ => {
                    let other = boxes[(which + 1) % boxes.len()].offset.clone();
                    boxes[which].offset = other;
                }
            }
            let inside = boxes.iter().all(|slice| slice.lies_in(&dims));
            assert!(!inside || is_tiled(&dims, boxes.iter()) == is_tiled_by_pairs(&dims, &boxes));
        }
    }

    #[test]
    fn a_hundred_thousand_boxes_take_a_moment() {
        let (rows, columns) = (500, 200);
        let cell =
            |i: usize| Slice { offset: vec![2 * (i / columns), i % columns], shape: vec![2, 1] };
        let mut boxes: Vec<Slice> = (0..rows * columns).map(cell).collect();
        let start = std::time::Instant::now();
        assert!(is_tiled(&[2 * rows, columns], boxes.iter()));
        boxes[77_777].offset[0] -= 1;
        assert!(!is_tiled(&[2 * rows, columns], boxes.iter()));
        // Pairs would take minutes.
        assert!(start.elapsed() < std::time::Duration::from_secs(10), "{:?}", start.elapsed());
    }

    #[test]
    fn tensors_without_dims_or_elements_are_tiled_once() {
        let scalar = Slice { offset: vec![], shape: vec![] };
        let tiled = |count: usize| is_tiled(&[], std::iter::repeat_n(&scalar, count));
        assert_eq!([tiled(0), tiled(1), tiled(2)], [false, true, false]);
        let empty = Slice { offset: vec![0, 0], shape: vec![0, 3] };
        assert!(
            is_tiled(&[0, 3], [].into_iter()) && is_tiled(&[0, 3], [&empty, &empty].into_iter())
        );
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
