//! The tree of all ranks of a world or of a group: rank 0 is its root, and rank r has the children F r + 1 to F r + F.

use std::ops::Range;

/// Children of a rank at most. More of them make fewer levels, and more messages that a rank takes one after another.
pub const FANOUT: usize = 4;

/// The parent of a rank; none of the root.
pub fn parent(rank: usize) -> Option<usize> {
    rank.checked_sub(1).map(|below| below / FANOUT)
}

/// The children of a rank among `size` ranks.
pub fn children(rank: usize, size: usize) -> Range<usize> {
    let first = (FANOUT * rank + 1).min(size);
    first..(first + FANOUT).min(size)
}

/// Returns the neighbour of `own` on the way to `to`, another rank.
pub fn next_hop(own: usize, to: usize) -> usize {
    let mut at = to;
    while let Some(above) = parent(at).filter(|_| at > own) {
        if above == own {
            return at;
        }
        at = above;
    }
    parent(own).unwrap_or(own)
}

/// Messages between the root and the rank that is farthest from it.
pub fn depth(size: usize) -> usize {
    std::iter::successors(size.checked_sub(1), |&rank| parent(rank)).skip(1).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_is_reached_hop_by_hop() {
        for size in [1, 2, 5, 6, 21, 22, 100] {
            for from in 0..size {
                assert!(children(from, size).all(|child| parent(child) == Some(from)));
                for to in (0..size).filter(|&to| to != from) {
                    let (mut at, mut hops) = (from, 0);
                    while at != to {
                        let next = next_hop(at, to);
                        assert!(parent(at) == Some(next) || parent(next) == Some(at));
                        (at, hops) = (next, hops + 1);
                    }
                    assert!(hops <= 2 * depth(size), "{from} to {to} of {size}");
                }
            }
        }
        assert_eq!([1, 2, 5, 6, 21, 22, 1000].map(depth), [0, 1, 1, 2, 2, 3, 5]);
    }
}
