//! The answers of many ranks to one question, joined on their way.

use serde::{Deserialize, Serialize};

use crate::collective::host::runtime::world_health::{Answer, Entry};
use crate::collective::host::transport::connect::GroupId;

/// Ranks of each kind that a census names at most.
const NAMED: usize = 8;

/// Asks the members of a group whether they have entered a call.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Query {
    /// The group.
    pub group: GroupId,
    /// Its ranks.
    pub members: Members,
    /// The call.
    pub entry: Entry,
}

/// Numbers in the world of a group's ranks. Those of a mesh are three numbers, however many ranks they are.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Members {
    /// `count` ranks: `first`, `first + step`, ...
    Strided {
        /// The first.
        first: usize,
        /// The distance between two.
        step: usize,
        /// Their number.
        count: usize,
    },
    /// These.
    Listed(Vec<usize>),
}

impl Members {
    /// The members `ranks`.
    pub fn new(ranks: &[usize]) -> Members {
        let listed = || Members::Listed(ranks.to_vec());
        let [first, second, ..] = *ranks else { return listed() };
        let Some(step) = second.checked_sub(first).filter(|&step| step > 0) else {
            return listed();
        };
        let strided = ranks.windows(2).all(|pair| pair[1].checked_sub(pair[0]) == Some(step));
        if strided { Members::Strided { first, step, count: ranks.len() } } else { listed() }
    }

    /// The members, in order.
    pub fn ranks(&self) -> Box<dyn Iterator<Item = usize> + '_> {
        match *self {
            Members::Strided { first, step, count } => Box::new(
                (0..count).map(move |index| first.saturating_add(index.saturating_mul(step))),
            ),
            Members::Listed(ref ranks) => Box::new(ranks.iter().copied()),
        }
    }

    /// Returns whether all are ranks of a world of `size`, and no more than it has.
    pub fn are_within(&self, size: usize) -> bool {
        match *self {
            Members::Strided { first, step, count } => {
                let last = count.saturating_sub(1).checked_mul(step);
                let last = last.and_then(|ahead| first.checked_add(ahead));
                count <= size && last.is_some_and(|last| last < size)
            }
            Members::Listed(ref ranks) => {
                ranks.len() <= size && ranks.iter().all(|&rank| rank < size)
            }
        }
    }

    /// Returns whether `rank` is one of them.
    pub fn contains(&self, rank: usize) -> bool {
        match *self {
            Members::Strided { first, step, count } => {
                rank.checked_sub(first).is_some_and(|ahead| {
                    step > 0 && ahead.is_multiple_of(step) && ahead / step < count
                })
            }
            Members::Listed(ref ranks) => ranks.contains(&rank),
        }
    }
}

/// The ranks that stand out, in ascending order and a few of each kind.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Census {
    /// Those that do not answer. What lies behind them in the tree is not known.
    pub silent: Vec<usize>,
    /// Those that have not entered the call, and what they did last.
    pub missing: Vec<(usize, Answer)>,
}

impl Census {
    /// The share of one rank: nothing, or that it is missing.
    pub fn of(rank: usize, answer: Answer) -> Census {
        let missing = if answer.entered { Vec::new() } else { vec![(rank, answer)] };
        Census { missing, ..Census::default() }
    }

    /// Adds what others have found.
    pub fn join(&mut self, other: Census) {
        self.silent.extend(other.silent);
        self.missing.extend(other.missing);
        self.silent.sort_unstable();
        self.missing.sort_unstable();
        self.silent.dedup();
        self.silent.truncate(NAMED);
        self.missing.truncate(NAMED);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_bounded_by_the_world() {
        let strided = |first, step, count| Members::Strided { first, step, count };
        assert!(strided(3, 4, 3).are_within(12));
        assert!(Members::Listed(vec![0, 11]).are_within(12));
        for (members, size) in [
            (strided(3, 4, 3), 11),
            (strided(0, 0, 1_000_000), 12),
            (strided(0, 1, usize::MAX), 12),
            (strided(1, usize::MAX, 2), 12),
            (Members::Listed(vec![0, 12]), 12),
            (Members::Listed(vec![0; 13]), 12),
        ] {
            assert!(!members.are_within(size), "{members:?}");
        }
    }

    #[test]
    fn groups_of_a_mesh_are_three_numbers() {
        for (ranks, strided) in [
            (vec![3, 7, 11], true),
            (vec![0, 1], true),
            (vec![5, 1], false),
            (vec![0, 1, 3], false),
        ] {
            let members = Members::new(&ranks);
            assert_eq!(matches!(members, Members::Strided { .. }), strided, "{ranks:?}");
            assert_eq!(members.ranks().collect::<Vec<_>>(), ranks);
            for rank in 0..20 {
                assert_eq!(members.contains(rank), ranks.contains(&rank), "{rank} of {ranks:?}");
            }
        }
    }
}
