//! Agreement of all ranks on what they are about to do, before they do it.
//!
//! Ranks that were started by hand or by a script may have other options, another checkpoint or other data than
//! their peers. They would train a mixture, or wait for one another forever. [`agree`] compares what each rank
//! knows about the job, as facts by name, and ends all ranks with the same line where two differ:
//!
//! ```text
//! --lr is 0.001 on ranks 0, 2 and 0.002 on rank 1: give all ranks the same
//! ```
//!
//! In the good case ranks reduce 64 bytes: the largest and the least digest of facts. Otherwise they gather the digests, and
//! one rank of each digest sends its facts to rank 0, which broadcasts one line.

mod distinct;

use ferrotron_tensor::{Device, Error, ErrorKind, Result, Tensor};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;

use crate::collective::{Group, Reduction};

pub(crate) use distinct::by_rank;
pub use distinct::{Ranks, gather_distinct, tell_distinct};

/// Facts that one rank knows about the job, by name.
pub type Facts = BTreeMap<String, String>;

/// Bytes that every rank sends: the kind of its report, the report's length, and a digest of it.
const ROW: usize = 32;

/// Differing facts, and differing values of one, that a line names at most.
const NAMED: usize = 4;

/// The kind of a rank's report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Facts,
    /// The rank cannot continue because of its options.
    Refused,
    /// The rank cannot continue for another reason.
    Failed,
}

/// Compares the facts of all ranks of `group`. All ranks call this; a rank that cannot continue gives its error
/// instead.
///
/// # Errors
/// The same line on all ranks, of [`ErrorKind::Config`] if facts differ, and naming the first rank that gave an
/// error if one did. A rank that gave an error returns that one.
///
/// ```
/// use ferrotron_parallel::agreement::agree;
/// use ferrotron_parallel::collective::{WorldConfig, run_threads};
/// let results = run_threads(3, &WorldConfig::default(), |world| {
///     let lr = if world.rank() == 1 { "0.002" } else { "0.001" };
///     agree(&world.everyone()?, Ok(&[("--lr".to_string(), lr.to_string())].into()))
/// });
/// for result in results {
///     let line = result.unwrap_err().to_string();
///     assert_eq!(line, "--lr is 0.001 on ranks 0, 2 and 0.002 on rank 1: give all ranks the same");
/// }
/// ```
pub fn agree(group: &Group, facts: std::result::Result<&Facts, &Error>) -> Result<()> {
    let copied = |error: &Error| Error::new(error.kind(), "", error.to_string());
    if group.size() == 1 {
        return facts.map(drop).map_err(copied);
    }
    let (kind, report) = match facts {
        Ok(facts) => (Kind::Facts, encode(facts)?),
        Err(error) if error.kind() == ErrorKind::Config => (Kind::Refused, error.to_string()),
        Err(error) => (Kind::Failed, error.to_string()),
    };
    let own = row(kind, report.as_bytes());
    if all_equal(group, &own)? && kind == Kind::Facts {
        return Ok(());
    }
    let device = Device::cpu(1)?;
    let rows = gather_rows(group, &device, &own)?;
    let failed = rows.iter().position(|row| Kind::of(row) != Kind::Facts);
    // The ranks whose reports are needed: one of each digest, or the first that cannot continue.
    let speakers: Vec<usize> = match failed {
        Some(rank) => vec![rank],
        None => (0..rows.len()).filter(|&rank| !rows[..rank].contains(&rows[rank])).collect(),
    };
    let reports = reports(group, &device, &rows, &speakers, report)?;
    let line = match (group.rank(), failed) {
        (0, Some(rank)) => format!("rank {rank}: {}", reports[0]),
        (0, None) => difference(&rows, &speakers, &reports)?,
        _ => String::new(),
    };
    let line = broadcast_bytes(group, line.into_bytes())?;
    wait_for_all(group);
    facts.map_err(copied)?;
    let kind = match failed.map(|rank| Kind::of(&rows[rank])) {
        Some(Kind::Failed) => ErrorKind::Io,
        _ => ErrorKind::Config,
    };
    Err(Error::new(kind, "", String::from_utf8_lossy(&line)))
}

/// Waits until all ranks of `group` have come here, before they return an error that each of them knows: a rank that ends
/// with an error ends the calls of the others. A barrier that is ended so has been entered by all.
pub fn wait_for_all(group: &Group) {
    drop(group.barrier().wait());
}

/// The bytes of the first rank, on every rank. All ranks call this; what the others give is ignored.
pub fn broadcast_bytes(group: &Group, bytes: Vec<u8>) -> Result<Vec<u8>> {
    if group.size() == 1 {
        return Ok(bytes);
    }
    let device = Device::cpu(1)?;
    let length = Tensor::from_slice(&device, &[bytes.len() as i64], &[1])?;
    let length = group.broadcast(length, 0)?.wait()?.to_vec::<i64>()?[0] as usize;
    let own = if group.rank() == 0 { bytes } else { vec![0; length] };
    let tensor = Tensor::from_slice(&device, &own, &[length])?;
    group.broadcast(tensor, 0)?.wait()?.to_vec::<u8>()
}

/// The largest of each byte over all ranks of a group, which give equally many. All ranks call this.
pub fn largest_bytes(group: &Group, own: &[u8]) -> Result<Vec<u8>> {
    if group.size() == 1 || own.is_empty() {
        return Ok(own.to_vec());
    }
    let own = Tensor::from_slice(&Device::cpu(1)?, own, &[own.len()])?;
    group.all_reduce(own, Reduction::Max)?.wait()?.to_vec::<u8>()
}

/// A short digest of bytes, in hexadecimal digits: equal digests mean equal bytes.
pub fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

impl Kind {
    fn of(row: &[u8; ROW]) -> Kind {
        match row[0] {
            0 => Kind::Facts,
            1 => Kind::Refused,
            _ => Kind::Failed,
        }
    }
}

fn row(kind: Kind, report: &[u8]) -> [u8; ROW] {
    let mut row = [0; ROW];
    row[0] = kind as u8;
    row[1..8].copy_from_slice(&report.len().to_le_bytes()[..7]);
    row[8..].copy_from_slice(&Sha256::digest(report)[..ROW - 8]);
    row
}

fn length(row: &[u8; ROW]) -> usize {
    let mut bytes = [0; 8];
    bytes[..7].copy_from_slice(&row[1..8]);
    u64::from_le_bytes(bytes) as usize
}

/// Returns whether all ranks have the same row: the largest of each byte is the least, too.
fn all_equal(group: &Group, own: &[u8; ROW]) -> Result<bool> {
    let both: Vec<u8> = own.iter().copied().chain(own.iter().map(|byte| !byte)).collect();
    Ok(largest_bytes(group, &both)? == both)
}

fn gather_rows(group: &Group, device: &Device, own: &[u8; ROW]) -> Result<Vec<[u8; ROW]>> {
    let own = Tensor::from_slice(device, own, &[1, ROW])?;
    let all = group.all_gather(own, group.size())?.wait()?.to_vec::<u8>()?;
    let (rows, _) = all.as_chunks::<ROW>();
    Ok(rows.to_vec())
}

/// The reports of `speakers`, on the first rank; nothing on the others.
fn reports(
    group: &Group,
    device: &Device,
    rows: &[[u8; ROW]],
    speakers: &[usize],
    own: String,
) -> Result<Vec<String>> {
    let rank = group.rank();
    if rank > 0 {
        if speakers.contains(&rank) {
            let report = Tensor::from_slice(device, own.as_bytes(), &[own.len()])?;
            group.send(report, 0)?.wait()?;
        }
        return Ok(Vec::new());
    }
    let received = speakers.iter().map(|&speaker| {
        if speaker == 0 {
            return Ok(own.clone());
        }
        let length = length(&rows[speaker]);
        let report = Tensor::from_slice(device, &vec![0_u8; length], &[length])?;
        let report = group.recv(report, speaker)?.wait()?.to_vec::<u8>()?;
        Ok(String::from_utf8_lossy(&report).into_owned())
    });
    received.collect()
}

/// The facts that differ, with the ranks of each value.
fn difference(rows: &[[u8; ROW]], speakers: &[usize], reports: &[String]) -> Result<String> {
    let facts = reports.iter().map(|report| decode(report)).collect::<Result<Vec<Facts>>>()?;
    let ranks_like = |speaker: usize| {
        (0..rows.len()).filter(move |&rank| rows[rank] == rows[speaker]).collect::<Vec<_>>()
    };
    let mut names: Vec<&String> = facts.iter().flat_map(Facts::keys).collect();
    names.sort_unstable();
    names.dedup();
    let mut differing = Vec::new();
    for name in names {
        let mut values: Vec<(&str, Vec<usize>)> = Vec::new();
        for (facts, &speaker) in facts.iter().zip(speakers) {
            let value = facts.get(name).map_or("unknown", String::as_str);
            match values.iter_mut().find(|(known, _)| *known == value) {
                Some((_, ranks)) => ranks.extend(ranks_like(speaker)),
                None => values.push((value, ranks_like(speaker))),
            }
        }
        if values.len() > 1 {
            let text =
                values.into_iter().map(|(value, ranks)| format!("{value} on {}", list(ranks)));
            differing.push(format!("{name} is {}", joined(text.collect(), " and ")));
        }
    }
    Ok(format!("{}: give all ranks the same", joined(differing, "; ")))
}

/// The first few of `parts`, and how many more there are.
fn joined(mut parts: Vec<String>, separator: &str) -> String {
    if parts.len() > NAMED {
        let more = parts.len() - (NAMED - 1);
        parts.truncate(NAMED - 1);
        parts.push(format!("{more} more"));
    }
    parts.join(separator)
}

/// `rank 3`, or `ranks 0-2, 5`.
fn list(mut ranks: Vec<usize>) -> String {
    ranks.sort_unstable();
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for &rank in &ranks {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == rank => *last = rank,
            _ => runs.push((rank, rank)),
        }
    }
    let text = |(first, last): (usize, usize)| match last - first {
        0 => first.to_string(),
        1 => format!("{first}, {last}"),
        _ => format!("{first}-{last}"),
    };
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{noun} {}", joined(runs.into_iter().map(text).collect(), ", "))
}

fn encode(facts: &Facts) -> Result<String> {
    serde_json::to_string(facts).map_err(|error| Error::io("agreement", error.to_string()))
}

fn decode(report: &str) -> Result<Facts> {
    serde_json::from_str(report).map_err(|error| Error::io("agreement", error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::{WorldConfig, run_threads};

    fn facts(pairs: &[(&str, &str)]) -> Facts {
        pairs.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect()
    }

    fn lines(size: usize, own: impl Fn(usize) -> Result<Facts> + Sync) -> Vec<Result<()>> {
        run_threads(size, &WorldConfig::default(), |world| {
            let own = own(world.rank());
            agree(&world.everyone()?, own.as_ref())
        })
    }

    #[test]
    fn equal_facts_take_one_call_of_64_bytes() {
        let results = run_threads(5, &WorldConfig::default(), |world| {
            let group = world.everyone()?;
            agree(&group, Ok(&facts(&[("--lr", "1"), ("data", &"long ".repeat(1000))])))?;
            Ok(group.traffic())
        });
        let traffic: Vec<_> = results.into_iter().map(|traffic| traffic.unwrap()).collect();
        assert!(traffic.iter().all(|own| own.calls_and_bytes("all_reduce").0 == 1));
        assert_eq!(traffic.iter().map(|own| own.bytes()).sum::<u64>(), 2 * 4 * 64);
    }

    #[test]
    fn every_difference_is_named_with_its_ranks() {
        let own = |rank: usize| {
            let lr = if rank == 40 { "0.1" } else { "0.2" };
            let data = if rank < 2 { "9 tokens" } else { "8 tokens" };
            let mut own = facts(&[("--lr", lr), ("--seed", "1"), ("data", data)]);
            if rank == 7 {
                own.remove("--seed");
            }
            Ok(own)
        };
        for result in lines(64, own) {
            let error = result.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config);
            assert_eq!(
                error.to_string(),
                "--lr is 0.2 on ranks 0-39, 41-63 and 0.1 on rank 40; --seed is 1 on ranks 0-6, 8-63 and unknown on \
                 rank 7; data is 9 tokens on ranks 0, 1 and 8 tokens on ranks 2-63: give all ranks the same"
            );
        }
    }

    #[test]
    fn many_values_are_counted() {
        for result in lines(12, |rank| Ok(facts(&[("seed", &rank.to_string())]))) {
            assert_eq!(
                result.unwrap_err().to_string(),
                "seed is 0 on rank 0 and 1 on rank 1 and 2 on rank 2 and 9 more: give all ranks the same"
            );
        }
    }

    #[test]
    fn a_rank_that_cannot_go_on_ends_all_with_its_reason() {
        let own = |rank: usize| match rank {
            2 => Err(Error::io("data", "there is no 'a.txt'")),
            _ => Ok(facts(&[("--lr", &rank.to_string())])),
        };
        for (rank, result) in lines(4, own).into_iter().enumerate() {
            let error = result.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Io);
            let prefix = if rank == 2 { "" } else { "rank 2: " };
            assert_eq!(error.to_string(), format!("{prefix}data: there is no 'a.txt'"));
        }
        for result in lines(3, |_| Err(Error::config("--lr", "no"))) {
            assert_eq!(result.unwrap_err().to_string(), "--lr: no");
        }
    }
}
