//! Finds gradients that are declared parts of a sum over the tensor axis, and are whole on every rank there.
//!
//! With sequence parallelism each rank along the tensor axis sees some positions, and the gradients of the parameters
//! that these ranks replicate are summed. If a model does not cut its positions, every rank has the whole gradient, and
//! the sum is too large by the number of ranks. All ranks agree on that sum, so no comparison of replicas finds it. Parts of
//! a sum have different bits on different ranks, and whole gradients have the same.

use ferrotron_nn::{Axis, ParamAndGradBucket};
use ferrotron_tensor::{Error, Result};
use serde::{Deserialize, Serialize};
use std::sync::atomic::Ordering;

use super::digests::{Comparison, compare_digests};
use super::replicas::{digest_of, map_pieces};
use super::{DataParallel, ReplicaCheck};
use crate::agreement::{digest, gather_distinct, largest_bytes, wait_for_all};
use crate::tensor_parallel::SequenceParallel;

/// A rank's gradients that are parts over the tensor axis.
#[derive(Debug, Serialize, Deserialize)]
struct PartsOfRank {
    /// A digest of those that are neither 0 nor infinite nor NaN, if there are any.
    digest: Option<String>,
    /// The names of the first of these, and their number.
    names: Vec<String>,
    count: usize,
}

/// The gradients of a pipeline stage that are parts over the tensor axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Parts {
    /// No parameter has such gradients.
    Absent,
    /// The sums are 0, or overflowed.
    Unknown,
    /// Each is the same on all ranks.
    Same,
    Differ,
}

impl DataParallel {
    /// Compares the gradients that are parts over the tensor axis, before their reduction there. All ranks call this.
    ///
    /// The first step with gradients reduces a digest along the tensor axis and three flags of each stage over all ranks, and
    /// refuses a model of which all such gradients of a stage are the same. With [`ReplicaCheck::EveryStep`], every step
    /// reduces a digest of each gradient, and refuses any.
    pub(super) fn check_parts(&self) -> Result<()> {
        let shared = &self.shared;
        let (mesh, layout) = (&shared.mesh, shared.mesh.layout());
        let every_step = shared.config.replica_check == ReplicaCheck::EveryStep;
        let is_done = self.parts_differ.load(Ordering::Relaxed) && !every_step;
        let size = layout.size(Axis::Tensor);
        let sums_positions = mesh.sequence() == SequenceParallel::On && size > 1;
        if !sums_positions || is_done || self.device().is_fake() {
            return Ok(());
        }
        let own = self.parts()?;
        let summary = summary(&own);
        let stages = self.compare_stages(&summary)?;
        if let Some(stage) = stages.iter().position(|parts| *parts == Parts::Same) {
            let of_stage = layout.coordinate(mesh.world().rank(), Axis::Pipeline) == stage;
            let own = (of_stage && summary.digest.is_some()).then_some(summary);
            let told = gather_distinct(mesh.world(), own.as_slice())?;
            let told = told.iter().min_by_key(|(_, ranks)| ranks.first());
            wait_for_all(mesh.world());
            return Err(no_cut(told.map(|(told, _)| told), size));
        }
        let is_known = |parts: &Parts| matches!(parts, Parts::Absent | Parts::Differ);
        self.parts_differ.store(stages.iter().all(is_known), Ordering::Relaxed);
        if !every_step {
            return Ok(());
        }
        let ranks = mesh.axis(Axis::Tensor);
        let untold = digest(b"");
        let digests: Vec<Option<&str>> =
            own.iter().map(|(_, part)| Some(part.as_deref().unwrap_or(&untold))).collect();
        let mut compared = own.iter().zip(compare_digests(ranks, &digests)?);
        match compared.find(|((_, part), found)| part.is_some() && *found == Comparison::Same) {
            Some(((name, _), _)) => {
                wait_for_all(ranks);
                Err(whole(name, size))
            }
            None => Ok(()),
        }
    }

    /// Compares the gradients of each stage along the tensor axis. With shards, other ranks of the stage have other
    /// parameters.
    fn compare_stages(&self, own: &PartsOfRank) -> Result<Vec<Parts>> {
        let mesh = &self.shared.mesh;
        let untold = digest(b"");
        let summary = own.digest.as_ref().unwrap_or(&untold).as_str();
        let compared = compare_digests(mesh.axis(Axis::Tensor), &[Some(summary)])?;
        let exist = self.buffers().groups().iter().any(is_part);
        let flags = [!compared.contains(&Comparison::Same), own.digest.is_some(), exist];
        let mut all = vec![0; flags.len() * mesh.layout().size(Axis::Pipeline)];
        all[flags.len() * mesh.axis(Axis::Pipeline).rank()..][..flags.len()]
            .copy_from_slice(&flags.map(u8::from));
        let all = largest_bytes(mesh.world(), &all)?;
        let parts = all.chunks_exact(flags.len()).map(|flags| match flags {
            [1, ..] => Parts::Differ,
            [_, 1, _] => Parts::Same,
            [_, _, 1] => Parts::Unknown,
            _ => Parts::Absent,
        });
        Ok(parts.collect())
    }

    /// Names of this rank's gradients that are parts over the tensor axis, and their digests; none for those that are 0 or not
    /// finite, which may be the same on all ranks.
    fn parts(&self) -> Result<Vec<(String, Option<String>)>> {
        let is_telling = |values: &[f64]| {
            values.iter().any(|x| *x != 0.0) && values.iter().all(|x| x.is_finite())
        };
        let mut parts = Vec::new();
        let groups = self.buffers().groups().iter();
        for group in groups.filter(|group| is_part(group)) {
            let digests =
                map_pieces(group, &group.gradients, group.gradient_shard.as_ref(), |values| {
                    is_telling(values).then(|| digest_of(values))
                })?;
            let names = group.pieces().into_iter().map(|(name, _)| name);
            parts.extend(names.zip(digests));
        }
        Ok(parts)
    }
}

/// Whether gradients of a bucket are parts over the tensor axis.
fn is_part(bucket: &ParamAndGradBucket) -> bool {
    bucket.grad_partial.contains(Axis::Tensor)
}

/// The summary of a rank's [parts](DataParallel::parts).
fn summary(parts: &[(String, Option<String>)]) -> PartsOfRank {
    let told = || parts.iter().filter_map(|(name, part)| Some((name, part.as_ref()?)));
    let text: String = told().flat_map(|(name, part)| [name.as_str(), part.as_str()]).collect();
    let count = told().count();
    PartsOfRank {
        digest: (count > 0).then(|| digest(text.as_bytes())),
        names: told().take(3).map(|(name, _)| name.clone()).collect(),
        count,
    }
}

fn no_cut(parts: Option<&PartsOfRank>, ranks: usize) -> Error {
    let names = parts.map_or(String::new(), |parts| {
        let more = parts.count - parts.names.len();
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        parts.names.join(", ") + &more
    });
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
