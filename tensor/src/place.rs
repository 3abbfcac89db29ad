//! Which part of a global tensor a rank holds.

use smallvec::{SmallVec, smallvec};

use crate::layout::Dims;
use crate::{Error, Result};

/// The global dims of a tensor and, for each, the (offset, length) pieces that are held here, in
/// local order. Randomness is indexed by what this says, so it does not depend on the sharding.
///
/// ```
/// use ferrotron_tensor::Place;
/// // Rows 4..6 of an (8, 6) tensor, and of each row the columns 0..2 and 4..6.
/// let place = Place::new(&[8, 6], &[&[(4, 2)], &[(0, 2), (4, 2)]])?;
/// assert_eq!(place.dims(), [2, 4]);
/// let runs: Vec<_> = place.runs(1).collect();
/// assert_eq!(runs, [(30, 2), (34, 2)]);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    global: Dims,
    pieces: Vec<Pieces>,
    dims: Dims,
}

type Pieces = SmallVec<[(usize, usize); 2]>;

impl Place {
    /// The whole tensor.
    pub fn whole(dims: &[usize]) -> Place {
        Place {
            global: dims.into(),
            pieces: dims.iter().map(|&len| smallvec![(0, len)]).collect(),
            dims: dims.into(),
        }
    }

    /// The given pieces of each dim.
    ///
    /// Errors if there are not as many lists as dims, a piece reaches outside, or the pieces of a dim are
    /// longer together than can be counted.
    pub fn new(global: &[usize], pieces: &[&[(usize, usize)]]) -> Result<Place> {
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
        Ok(Place {
            global: global.into(),
            pieces: pieces.iter().map(|&list| list.into()).collect(),
            dims,
        })
    }

    /// The local dims.
    pub fn dims(&self) -> &[usize] {
        &self.dims
    }

    /// The dims of the whole tensor.
    pub fn global_dims(&self) -> &[usize] {
        &self.global
    }

    /// The (offset, length) pieces of one dim that are held, in local order.
    pub fn pieces(&self, dim: usize) -> &[(usize, usize)] {
        &self.pieces[dim]
    }

    /// The runs of consecutive global indices that make up local row `row` (a row runs along the last
    /// dim): (first global index, length).
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_that_reach_outside_are_refused() {
        let max = usize::MAX;
        for pieces in [[(3, 2)], [(max, 2)]] {
            assert!(Place::new(&[4], &[&pieces]).is_err(), "{pieces:?}");
        }
        assert!(Place::new(&[max], &[&[(0, max), (0, 2)]]).is_err());
        assert_eq!(Place::new(&[4], &[&[(3, 1), (0, 2)]]).unwrap().dims(), [3]);
    }
}
