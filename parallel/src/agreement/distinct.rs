//! Gathering what many ranks have alike: along a tree, in which equal values become one.

use ferrotron_tensor::{DType, Device, Error, Result, Tensor};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;

use super::broadcast_bytes;
use crate::collective::Group;
use crate::collective::tree::{children, parent};

/// Ranks at equal distances: the first, their number, and the distance.
type Run = (usize, usize, usize);

/// Values as JSON, and the ranks that have each.
type Table = BTreeMap<String, Vec<Run>>;

/// The distinct values of the ranks of a group, and for each rank the place of its value among them. All ranks call this.
///
/// Values go up a tree of the ranks and the table of all comes down again: 4 (n - 1) messages at most, each as long as the
/// distinct values, where ranks that have the same are at equal distances from one another.
///
/// ```
/// use ferrotron_parallel::agreement::gather_distinct;
/// use ferrotron_parallel::collective::{WorldConfig, run_threads};
/// let found = run_threads(6, &WorldConfig::default(), |world| {
///     gather_distinct(&world.everyone()?, &["even", "odd"][world.rank() % 2].to_string())
/// });
/// for found in found {
///     assert_eq!(found?, (vec!["even".to_string(), "odd".to_string()], vec![0, 1, 0, 1, 0, 1]));
/// }
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub fn gather_distinct<T: Serialize + DeserializeOwned>(
    ranks: &Group,
    own: &T,
) -> Result<(Vec<T>, Vec<usize>)> {
    let (rank, size) = (ranks.rank(), ranks.size());
    let mut known: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    known.insert(serde_json::to_string(own).map_err(broken)?, vec![rank]);
    for child in children(rank, size) {
        let table: Table = serde_json::from_slice(&receive(ranks, child)?).map_err(broken)?;
        for (value, runs) in table {
            known.entry(value).or_default().extend(of_runs(&runs));
        }
    }
    known.values_mut().for_each(|ranks| ranks.sort_unstable());
    let table: Table = known.into_iter().map(|(value, ranks)| (value, to_runs(&ranks))).collect();
    let table = serde_json::to_vec(&table).map_err(broken)?;
    if let Some(parent) = parent(rank) {
        send(ranks, parent, &table)?;
    }
    let table: Table = serde_json::from_slice(&broadcast_bytes(ranks, table)?).map_err(broken)?;
    let mut places = vec![0; size];
    for (place, runs) in table.values().enumerate() {
        of_runs(runs).filter(|&rank| rank < size).for_each(|rank| places[rank] = place);
    }
    let values = table.keys().map(|value| serde_json::from_str(value).map_err(broken));
    Ok((values.collect::<Result<_>>()?, places))
}

fn send(ranks: &Group, to: usize, bytes: &[u8]) -> Result<()> {
    let device = Device::cpu(1)?;
    let length = Tensor::from_slice(&device, &[bytes.len() as i64], &[1])?;
    ranks.send(length, to)?.wait()?;
    ranks.send(Tensor::from_slice(&device, bytes, &[bytes.len()])?, to)?.wait()
}

fn receive(ranks: &Group, from: usize) -> Result<Vec<u8>> {
    let device = Device::cpu(1)?;
    let length = Tensor::from_slice(&device, &[0_i64], &[1])?;
    let length = ranks.recv(length, from)?.wait()?.to_vec::<i64>()?[0] as usize;
    let bytes = Tensor::empty(&device, DType::U8, &[length])?;
    ranks.recv(bytes, from)?.wait()?.to_vec::<u8>()
}

/// The runs of ascending numbers.
fn to_runs(numbers: &[usize]) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for &number in numbers {
        match runs.last_mut() {
            Some((first, count @ 1, step)) => (*count, *step) = (2, number - *first),
            Some((first, count, step)) if *first + *count * *step == number => *count += 1,
            _ => runs.push((number, 1, 1)),
        }
    }
    runs
}

fn of_runs(runs: &[Run]) -> impl Iterator<Item = usize> {
    runs.iter().flat_map(|&(first, count, step)| (0..count).map(move |i| first + i * step))
}

fn broken(error: serde_json::Error) -> Error {
    Error::value("agreement", error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::{WorldConfig, run_threads};

    #[test]
    fn runs_give_the_same_numbers_again() {
        for (numbers, count) in [
            (vec![], 0),
            (vec![7], 1),
            ((0..500).map(|i| 2 * i + 1).collect(), 1),
            (vec![0, 1, 2, 8, 9, 10, 16], 3),
        ] {
            let runs = to_runs(&numbers);
            assert_eq!(of_runs(&runs).collect::<Vec<_>>(), numbers);
            assert_eq!(runs.len(), count, "{runs:?}");
        }
    }

    /// With many ranks that have few values, a rank gets no row of each other one.
    #[test]
    fn bytes_grow_as_ranks() {
        let sent = |size: usize| -> u64 {
            let ranks = run_threads(size, &WorldConfig::default(), |world| {
                let group = world.everyone()?;
                let own = vec![world.rank() % 3; 100];
                let (values, places) = gather_distinct(&group, &own)?;
                assert_eq!(values, [0, 1, 2].map(|value| vec![value; 100]));
                assert!(places.iter().enumerate().all(|(rank, &place)| place == rank % 3));
                Ok(group.traffic().bytes())
            });
            ranks.into_iter().map(Result::unwrap).sum()
        };
        let (few, many) = (sent(12), sent(48));
        assert!(many < 5 * few, "{few} and {many} bytes");
    }
}
