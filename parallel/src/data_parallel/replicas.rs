//! Compares the replicas of parameters over ranks: values and gradients that should have the same bits.
//!
//! A parameter with a wrong fact trains without an error: a norm whose gradient lacks the positions of other ranks, a
//! tied embedding whose two copies drift apart. Its replicas differ after the first backward, which this finds.

use ferrotron_autograd::SharedFlatBuffer;
use ferrotron_nn::{Axis, ParamAndGradBucket, Sharding};
use ferrotron_tensor::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

use super::DataParallel;
use crate::agreement::{digest, gather_distinct};
use crate::collective::Group;

/// This rank's copy of a parameter, or of a shard that it updates.
#[derive(Debug, Serialize, Deserialize)]
struct Replica {
    name: String,
    /// The elements, as a shard of the global tensor.
    place: String,
    /// Its position among those of its rank: the first that differs is named.
    number: usize,
    /// Whether it is declared replicated along each axis.
    replicated: [bool; 4],
    value: String,
    gradient: String,
}

impl DataParallel {
    /// Compares the values and gradients of replicated parameters over ranks, after
    /// [`DataParallel::finish_step`]. All ranks of the mesh call this. Without it, nothing is computed or sent.
    ///
    /// # Errors
    ///
    /// Errors, naming the first parameter whose replicas differ, on all ranks along the axis where they do. Errors if
    /// ranks hold the same elements of a parameter that is declared sharded there.
    pub fn check_replicas(&self) -> Result<()> {
        if self.device().is_fake() {
            return Ok(());
        }
        let shared = &self.shared;
        let own = self.replicas()?;
        let mesh = &shared.mesh;
        compare(mesh.axis(Axis::Tensor), Axis::Tensor, &own)?;
        compare(mesh.axis(Axis::Pipeline), Axis::Pipeline, &own)?;
        // Otherwise these ranks update other shards, or other weights.
        if shared.sharding() == Sharding::None && !shared.is_local() {
            compare(mesh.dp_cp(), Axis::Data, &own)?;
        }
        Ok(())
    }

    /// The copies of this rank that have elements.
    fn replicas(&self) -> Result<Vec<Replica>> {
        let mut all = Vec::new();
        for group in self.buffers().groups() {
            let values = digests(group, &group.weights, group.weight_shard.as_ref())?;
            let gradients = digests(group, &group.gradients, group.gradient_shard.as_ref())?;
            let replicated = Axis::ALL.map(|axis| group.replicated.contains(axis));
            let pieces = group.pieces().into_iter().zip(values.into_iter().zip(gradients));
            all.extend(pieces.filter(|((_, place), _)| !place.dims().contains(&0)).map(
                |((name, place), (value, gradient))| {
                    let place = format!("{place:?}");
                    Replica { name, place, number: 0, replicated, value, gradient }
                },
            ));
        }
        all.iter_mut().enumerate().for_each(|(number, replica)| replica.number = number);
        Ok(all)
    }
}

/// Digests of the pieces that this rank updates, in a whole flat or in its shard; empty where a flat has no memory.
fn digests(
    group: &ParamAndGradBucket,
    whole: &SharedFlatBuffer,
    shard: Option<&SharedFlatBuffer>,
) -> Result<Vec<String>> {
    if shard.unwrap_or(whole).lock()?.is_empty() {
        return Ok(vec![String::new(); group.pieces().len()]);
    }
    map_pieces(group, whole, shard, digest_of)
}

/// Applies `f` to the values of each piece that this rank updates, in a whole flat or in its shard.
pub(super) fn map_pieces<T>(
    group: &ParamAndGradBucket,
    whole: &SharedFlatBuffer,
    shard: Option<&SharedFlatBuffer>,
    f: impl Fn(&[f64]) -> T,
) -> Result<Vec<T>> {
    let mut start = if shard.is_some() { 0 } else { group.owned.start };
    let flat = shard.unwrap_or(whole).lock()?;
    let pieces = group.pieces().into_iter().map(|(_, place)| {
        let end = start + place.dims().iter().product::<usize>();
        let piece = flat.slice(std::mem::replace(&mut start, end)..end)?;
        Ok(f(&piece.to_f64()?))
    });
    pieces.collect()
}

/// A digest of the bits of floats of at most 64 bits, which f64 holds exactly.
pub(super) fn digest_of(values: &[f64]) -> String {
    let bits: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    digest(&bits)
}

/// Compares this rank's replicas with those of the other ranks along an axis.
fn compare(ranks: &Group, axis: Axis, own: &[Replica]) -> Result<()> {
    if ranks.size() == 1 {
        return Ok(());
    }
    let found = gather_distinct(ranks, own)?;
    let mut copies: BTreeMap<(&str, &str), Vec<(usize, &Replica)>> = BTreeMap::new();
    for (replica, holders) in &found {
        let key = (replica.name.as_str(), replica.place.as_str());
        // One other rank that has the same bits shows whether these may be the same.
        copies.entry(key).or_default().extend(holders.iter().take(2).map(|rank| (rank, replica)));
    }
    let differing = copies.into_values().filter_map(|mut copies| {
        copies.sort_unstable_by_key(|&(rank, _)| rank);
        let (&(first, known), others) = copies.split_first()?;
        others.iter().filter(|&&(rank, _)| rank != first).find_map(|&(rank, replica)| {
            let why = difference(axis, known, replica)?;
            Some(((rank, replica.number), (first, &replica.name, why)))
        })
    });
    let Some(((rank, _), (other, name, why))) = differing.min_by_key(|&(at, _)| at) else {
        return Ok(());
    };
    let message = format!("'{name}' on ranks {other} and {rank} along {axis:?}: {why}");
    Err(Error::value("check_replicas", message))
}

/// The difference between two ranks' copies of the same elements; `None` if they are equal.
fn difference(axis: Axis, one: &Replica, other: &Replica) -> Option<String> {
    let declared = |replica: &Replica| replica.replicated[axis as usize];
    if !declared(one) || !declared(other) {
        return Some(format!(
            "both hold these elements, but it is not declared replicated along {axis:?}: make it in a scope without \
             `sharded_along`"
        ));
    }
    let remedy = format!(
        "if these ranks see other positions, samples or uses of it, make it in a scope `with_partial_gradients({axis:?})`, \
         such as that of `mesh.scope(..)`"
    );
    if one.gradient != other.gradient {
        return Some(format!("the gradients of the same elements differ: {remedy}"));
    }
    (one.value != other.value).then(|| {
        "the values of the same elements differ: ranks need the same seed, checkpoint and updates".into()
    })
}
