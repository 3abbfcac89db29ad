//! Finds gradients that are declared parts of a sum over the tensor axis, and are whole on every rank there.
//!
//! With sequence parallelism each rank along the tensor axis sees some positions, and the gradients of the parameters
//! that these ranks replicate are summed. If a model does not cut its positions, every rank has the whole gradient, and
//! the sum is too large by the number of ranks. All ranks agree on that sum, so no comparison of replicas finds it. Parts of
//! a sum have different bits on different ranks, and whole gradients have the same.

use ferrotron_nn::{Axis, ParamAndGradBucket, Sharding};
use ferrotron_tensor::{Device, Error, Result, Tensor};
use std::sync::atomic::Ordering;

use super::replicas::{digest_of, map_pieces};
use super::{DataParallel, ReplicaCheck};
use crate::agreement::{digest, gather_values};
use crate::collective::{Group, Reduction};
use crate::tensor_parallel::SequenceParallel;

impl DataParallel {
    /// Compares the gradients that are parts over the tensor axis, before their reduction there. All ranks call this.
    ///
    /// The first step with gradients sends a few numbers, and refuses a model of which all such gradients are the same on
    /// all ranks. With [`ReplicaCheck::EveryStep`], every step sends a digest of each, and refuses any.
    pub(super) fn check_parts(&self) -> Result<()> {
        let shared = &self.shared;
        let ranks = shared.mesh.axis(Axis::Tensor);
        let every_step = shared.config.replica_check == ReplicaCheck::EveryStep;
        let is_done = self.parts_differ.load(Ordering::Relaxed) && !every_step;
        let sums_positions = shared.mesh.sequence() == SequenceParallel::On && ranks.size() > 1;
        let is_part = |group: &ParamAndGradBucket| group.grad_partial.contains(Axis::Tensor);
        let sums_positions = sums_positions && self.buffers().groups().iter().any(is_part);
        if !sums_positions || is_done || self.device().is_fake() {
            return Ok(());
        }
        let own = self.parts()?;
        match self.compare(ranks, &own)? {
            Parts::None => return Ok(()),
            Parts::Differ => self.parts_differ.store(true, Ordering::Relaxed),
            Parts::Same => {
                // A rank that ends with an error ends the calls of the others: all have the numbers first.
                let _ = ranks.barrier().wait();
                if shared.sharding() > Sharding::None {
                    let _ = shared.mesh.dp_cp().barrier().wait();
                }
                return Err(no_cut(&own, ranks.size()));
            }
        }
        if !every_step {
            return Ok(());
        }
        let all = gather_values(ranks, &own)?;
        match own.iter().find(|part| all.iter().all(|rank| rank.contains(part))) {
            Some((name, _)) => {
                let _ = ranks.barrier().wait();
                Err(whole(name, ranks.size()))
            }
            None => Ok(()),
        }
    }

    /// Whether the parts of a model replica, of which this rank has `own`, differ over the tensor axis.
    fn compare(&self, ranks: &Group, own: &[(String, String)]) -> Result<Parts> {
        let own = number(own);
        let [negative, most] = largest(ranks, [-own, own])?;
        let (is_none, differ) = (most == 0.0 && negative == 0.0, most != -negative);
        let found = [f64::from(u8::from(differ)), f64::from(u8::from(!is_none))];
        // With shards, other ranks have the other parameters.
        let found = match self.shared.sharding() {
            Sharding::None => found,
            _ => largest(self.shared.mesh.dp_cp(), found)?,
        };
        Ok(match found {
            [1.0, _] => Parts::Differ,
            [_, 1.0] => Parts::Same,
            _ => Parts::None,
        })
    }

    /// Names and digests of this rank's gradients that are parts over the tensor axis; not of those that are 0 or not
    /// finite, which may be the same on all ranks.
    fn parts(&self) -> Result<Vec<(String, String)>> {
        let is_telling = |values: &[f64]| {
            values.iter().any(|x| *x != 0.0) && values.iter().all(|x| x.is_finite())
        };
        let mut parts = Vec::new();
        let groups = self.buffers().groups().iter();
        for group in groups.filter(|group| group.grad_partial.contains(Axis::Tensor)) {
            let digests =
                map_pieces(group, &group.gradients, group.gradient_shard.as_ref(), |values| {
                    is_telling(values).then(|| digest_of(values))
                })?;
            let names = group.pieces().into_iter().map(|(name, _)| name);
            parts.extend(names.zip(digests).filter_map(|(name, digest)| Some((name, digest?))));
        }
        Ok(parts)
    }
}

/// The gradients that are parts over the tensor axis.
enum Parts {
    /// They are 0, or overflowed.
    None,
    /// Each is the same on all ranks.
    Same,
    Differ,
}

/// The larger of each number over `ranks`.
fn largest(ranks: &Group, own: [f64; 2]) -> Result<[f64; 2]> {
    let both = Tensor::from_slice(&Device::cpu(1)?, &own, &[2])?;
    let both = ranks.all_reduce(both, Reduction::Max)?.wait()?.to_vec::<f64>()?;
    Ok([both[0], both[1]])
}

/// A number that stands for `parts`, exact in f64; 0 if there are none.
fn number(parts: &[(String, String)]) -> f64 {
    if parts.is_empty() {
        return 0.0;
    }
    let text: String = parts.iter().flat_map(|(name, digest)| [name.as_str(), digest]).collect();
    let digits = digest(text.as_bytes());
    u64::from_str_radix(&digits[..12], 16).map_or(1.0, |number| number as f64)
}

fn no_cut(parts: &[(String, String)], ranks: usize) -> Error {
    let names: Vec<&str> = parts.iter().take(3).map(|(name, _)| name.as_str()).collect();
    let names = match parts.len() - names.len() {
        0 if names.is_empty() => "their parameters".to_string(),
        0 => names.join(", "),
        more => format!("{} and {more} more", names.join(", ")),
    };
    let message = format!(
        "with sequence parallelism, all {ranks} ranks along the tensor axis have the same gradients of {names}, whose sum \
         would be {ranks} times too large: the model does not cut its positions; begin with `VocabParallelEmbedding` \
         or narrow activations to `ctx.residual`, or make the mesh with `SequenceParallel::Off`"
    );
    Error::value("data_parallel", message)
}

fn whole(name: &str, ranks: usize) -> Error {
    let message = format!(
        "all {ranks} ranks along the tensor axis have the same gradient of '{name}', whose sum would be {ranks} times too \
         large: make it in `scope.with_whole_gradients(Axis::Tensor)` if it sees all positions"
    );
    Error::value("check_replicas", message)
}
