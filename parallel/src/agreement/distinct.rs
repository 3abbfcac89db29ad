//! Tells ranks what others have: along a tree, in which equal values become one, and in which a value goes down only to those
//! that it concerns.

use ferrotron_tensor::{DType, Device, Error, Result, Tensor};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::Range;

use crate::collective::Group;
use crate::collective::tree::{children, parent};

/// Ascending ranks, as runs at equal distances: the first, their number, and the distance.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ranks(Vec<(usize, usize, usize)>);

impl Ranks {
    fn of(mut ranks: Vec<usize>) -> Ranks {
        ranks.sort_unstable();
        let mut runs: Vec<(usize, usize, usize)> = Vec::new();
        for rank in ranks {
            match runs.last_mut() {
                Some((first, count @ 1, step)) => (*count, *step) = (2, rank - *first),
                Some((first, count, step)) if *first + *count * *step == rank => *count += 1,
                _ => runs.push((rank, 1, 1)),
            }
        }
        Ranks(runs)
    }

    /// The lowest rank.
    pub fn first(&self) -> usize {
        self.0.first().map_or(0, |&(first, ..)| first)
    }

    /// All ranks in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.0.iter().flat_map(|&(first, count, step)| (0..count).map(move |i| first + i * step))
    }

    fn join(&mut self, other: &Ranks) {
        *self = Ranks::of(self.iter().chain(other.iter()).collect());
    }
}

/// Values as JSON, and the ranks that have each.
type Table = BTreeMap<String, Ranks>;

/// The distinct values of the ranks of a group, and the ranks that have each, on every rank. All ranks call this.
///
/// See [`tell_distinct`] for messages and bytes; here every value concerns all ranks.
///
/// ```
/// use ferrotron_parallel::agreement::gather_distinct;
/// use ferrotron_parallel::collective::{WorldConfig, run_threads};
/// let found = run_threads(6, &WorldConfig::default(), |world| {
///     gather_distinct(&world.everyone()?, &[world.rank() % 2])
/// });
/// for found in found {
///     let [(0, even), (1, odd)] = &found?[..] else { panic!("two values") };
///     assert_eq!(even.iter().collect::<Vec<_>>(), [0, 2, 4]);
///     assert_eq!(odd.iter().collect::<Vec<_>>(), [1, 3, 5]);
/// }
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub fn gather_distinct<T: Serialize + DeserializeOwned>(
    ranks: &Group,
    own: &[T],
) -> Result<Vec<(T, Ranks)>> {
    let everyone = 0..ranks.size();
    tell_distinct(ranks, own, |_| Ok(vec![everyone.clone()]))
}

/// The values of each rank, in the order of the ranks.
pub(crate) fn by_rank<T>(found: &[(T, Ranks)]) -> Vec<(usize, &T)> {
    let mut all: Vec<(usize, &T)> = found
        .iter()
        .flat_map(|(value, ranks)| ranks.iter().map(move |rank| (rank, value)))
        .collect();
    all.sort_by_key(|&(rank, _)| rank);
    all
}

/// Tells each rank of a group the distinct values that concern it, and the ranks that have them; `concerned` gives the ranks
/// that a value concerns. All ranks call this, with the same function.
///
/// Values go up a tree of the ranks and come down again: 4 (n - 1) messages. On the way up each is as long as the distinct
/// values of the ranks behind it, on the way down as long as those that concern a rank behind it. A value takes a few bytes
/// more for each run of ranks that have it, which are those at equal distances from one another.
pub fn tell_distinct<T: Serialize + DeserializeOwned>(
    ranks: &Group,
    own: &[T],
    concerned: impl Fn(&T) -> Result<Vec<Range<usize>>>,
) -> Result<Vec<(T, Ranks)>> {
    let (rank, size) = (ranks.rank(), ranks.size());
    let mut table = Table::new();
    for value in own {
        let text = serde_json::to_string(value).map_err(broken)?;
        table.insert(text, Ranks::of(vec![rank]));
    }
    for child in children(rank, size) {
        for (value, ranks) in receive(ranks, child)? {
            table.entry(value).or_default().join(&ranks);
        }
    }
    if let Some(parent) = parent(rank) {
        send(ranks, parent, &table)?;
        table = receive(ranks, parent)?;
    }
    let mut told = Vec::new();
    let mut below: Vec<(usize, Vec<Range<usize>>, Table)> =
        children(rank, size).map(|child| (child, subtree(child, size), Table::new())).collect();
    for (text, ranks) in table {
        let value = serde_json::from_str(&text).map_err(broken)?;
        let concerned = concerned(&value)?;
        for (_, subtree, table) in &mut below {
            if concerned.iter().any(|range| subtree.iter().any(|ranks| overlap(range, ranks))) {
                table.insert(text.clone(), ranks.clone());
            }
        }
        if concerned.iter().any(|range| range.contains(&rank)) {
            told.push((value, ranks));
        }
    }
    for (child, _, table) in &below {
        send(ranks, *child, table)?;
    }
    Ok(told)
}

/// A rank and its descendants, level by level.
fn subtree(rank: usize, size: usize) -> Vec<Range<usize>> {
    let below = |level: &Range<usize>| {
        let next = children(level.start, size).start..children(level.end - 1, size).end;
        (!next.is_empty()).then_some(next)
    };
    std::iter::successors(Some(rank..rank + 1), below).collect()
}

fn overlap(one: &Range<usize>, other: &Range<usize>) -> bool {
    one.start < other.end && other.start < one.end
}

fn send(ranks: &Group, to: usize, table: &Table) -> Result<()> {
    let bytes = serde_json::to_vec(table).map_err(broken)?;
    let device = Device::cpu(1)?;
    let length = Tensor::from_slice(&device, &[bytes.len() as i64], &[1])?;
    ranks.send(length, to)?.wait()?;
    ranks.send(Tensor::from_slice(&device, &bytes, &[bytes.len()])?, to)?.wait()
}

fn receive(ranks: &Group, from: usize) -> Result<Table> {
    let device = Device::cpu(1)?;
    let length = Tensor::from_slice(&device, &[0_i64], &[1])?;
    let length = ranks.recv(length, from)?.wait()?.to_vec::<i64>()?[0] as usize;
    let bytes = Tensor::empty(&device, DType::U8, &[length])?;
    serde_json::from_slice(&ranks.recv(bytes, from)?.wait()?.to_vec::<u8>()?).map_err(broken)
}

fn broken(error: serde_json::Error) -> Error {
    Error::value("agreement", error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::{WorldConfig, run_threads};

    #[test]
    fn runs_give_the_same_ranks_again() {
        for (ranks, count) in [
            (vec![], 0),
            (vec![7], 1),
            ((0..500).map(|i| 2 * i + 1).collect(), 1),
            (vec![0, 1, 2, 8, 9, 10, 16], 3),
        ] {
            let (odd, even): (Vec<usize>, Vec<usize>) =
                ranks.iter().partition(|&rank| rank % 2 == 1);
            let mut found = Ranks::of(odd);
            found.join(&Ranks::of(even));
            assert_eq!(found.iter().collect::<Vec<_>>(), ranks);
            assert_eq!(
                (found.0.len(), found.first()),
                (count, ranks.first().copied().unwrap_or(0))
            );
        }
    }

    #[test]
    fn every_rank_is_in_the_subtrees_of_its_ancestors_alone() {
        for size in [1, 2, 5, 6, 22, 300] {
            for rank in 0..size {
                let ancestors: Vec<_> =
                    std::iter::successors(Some(rank), |&rank| parent(rank)).collect();
                let found = (0..size).filter(|&other| {
                    subtree(other, size).iter().any(|level| level.contains(&rank))
                });
                let mut found: Vec<_> = found.collect();
                found.reverse();
                assert_eq!(found, ancestors, "{rank} of {size}");
            }
        }
    }

    /// Each rank has values that all have and one of its own, which concerns the two ranks behind it: all bytes are those of
    /// ranks times levels of the tree, not of ranks times ranks.
    #[test]
    fn bytes_grow_as_ranks() {
        let sent = |size: usize| -> u64 {
            let ranks = run_threads(size, &WorldConfig::default(), |world| {
                let (group, rank) = (world.everyone()?, world.rank());
                let own = [(0, "a".repeat(50)), (1, "b".repeat(50)), (100 + rank, "c".repeat(50))];
                let concerned = |(number, _): &(usize, String)| match number.checked_sub(100) {
                    Some(owner) => Ok([1, 2].map(|d| (owner + d) % size).map(|r| r..r + 1).into()),
                    None => Ok(std::iter::once(0..size).collect()),
                };
                let told = tell_distinct(&group, &own, concerned)?;
                let mut told: Vec<(usize, usize)> = told
                    .iter()
                    .map(|((number, _), ranks)| (*number, ranks.iter().count()))
                    .collect();
                told.sort_unstable();
                let mut before = [1, 2].map(|d| (100 + (rank + size - d) % size, 1));
                before.sort_unstable();
                assert_eq!(told, [[(0, size), (1, size)], before].concat());
                Ok(group.traffic().bytes())
            });
            ranks.into_iter().map(Result::unwrap).sum()
        };
        let (few, many) = (sent(16), sent(128));
        assert!(many < 16 * few, "{few} and {many} bytes");
    }
}
