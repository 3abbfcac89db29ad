//! Comparisons of digests between ranks, by one small reduction: no rank gets a row of every other one.

use ferrotron_tensor::Result;

use crate::agreement::largest_bytes;
use crate::collective::Group;

/// Bytes of a [`digest`](crate::agreement::digest): its hexadecimal digits.
const DIGEST: usize = 16;

/// The result of comparing the digests of several ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Comparison {
    /// No rank has one.
    Absent,
    /// All ranks that have one have the same.
    Same,
    Differ,
}

/// Compares digests over the ranks of `group`, each with those of the same place, in one call of 32 bytes a digest. All ranks
/// call this, with as many places.
pub(super) fn compare_digests(group: &Group, own: &[Option<&str>]) -> Result<Vec<Comparison>> {
    // The largest of each byte and of its complement: the complement of the least.
    let mut rows = vec![0; own.len() * 2 * DIGEST];
    for (row, digest) in rows.chunks_exact_mut(2 * DIGEST).zip(own) {
        let Some(digest) = digest else { continue };
        let (bytes, complements) = row.split_at_mut(DIGEST);
        bytes.copy_from_slice(digest.as_bytes());
        complements.iter_mut().zip(bytes).for_each(|(complement, byte)| *complement = !*byte);
    }
    let largest = largest_bytes(group, &rows)?;
    let compared = largest.chunks_exact(2 * DIGEST).map(|row| {
        let (largest, least) = row.split_at(DIGEST);
        if row.iter().all(|&byte| byte == 0) {
            Comparison::Absent
        } else if largest.iter().zip(least).all(|(largest, least)| *largest == !least) {
            Comparison::Same
        } else {
            Comparison::Differ
        }
    });
    Ok(compared.collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agreement::digest;
    use crate::collective::{WorldConfig, run_threads};

    #[test]
    fn equal_and_missing_digests_are_told_from_others_in_one_call() {
        let digests = [b"a", b"b"].map(|text| digest(text));
        let [a, b] = [0, 1].map(|i| Some(digests[i].as_str()));
        let given = [[a, None, b, a], [a, None, None, a], [a, None, b, b]];
        let found = run_threads(3, &WorldConfig::default(), |world| {
            let group = world.everyone()?;
            let compared = compare_digests(&group, &given[world.rank()])?;
            Ok((compared, group.traffic().calls_and_bytes("all_reduce").0))
        });
        use Comparison::{Absent, Differ, Same};
        for found in found {
            assert_eq!(found.unwrap(), (vec![Same, Absent, Same, Differ], 1));
        }
        assert_eq!(compare_digests(&Group::single(), &[b, None]).unwrap(), [Same, Absent]);
    }
}
