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

use super::replicas::{digest_of, map_pieces};
use super::{DataParallel, ReplicaCheck};
use crate::agreement::{digest, gather_values, wait_for_all};
use crate::mesh::ParallelDims;
use crate::tensor_parallel::SequenceParallel;

/// A rank's gradients that are parts over the tensor axis.
#[derive(Debug, Serialize, Deserialize)]
struct PartsOfRank {
    /// Whether it has parameters with such gradients.
    exist: bool,
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
    /// The first step with gradients sends a digest to all ranks, and refuses a model of which all such gradients of a
    /// stage are the same along the tensor axis. With [`ReplicaCheck::EveryStep`], every step sends a digest of each
    /// gradient, and refuses any.
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
        let all = gather_values(mesh.world(), &[self.summary(&own)])?;
        let all: Vec<PartsOfRank> = all.into_iter().flatten().collect();
        let stages = (0..layout.size(Axis::Pipeline)).map(|stage| compare(layout, &all, stage));
        let stages: Vec<Parts> = stages.collect();
        if let Some(stage) = stages.iter().position(|parts| *parts == Parts::Same) {
            wait_for_all(mesh.world());
            let told = of_stage(layout, &all, stage).find(|(_, told)| told.digest.is_some());
            return Err(no_cut(told.map(|(_, told)| told), size));
        }
        let is_known = |parts: &Parts| matches!(parts, Parts::Absent | Parts::Differ);
        self.parts_differ.store(stages.iter().all(is_known), Ordering::Relaxed);
        if !every_step {
            return Ok(());
        }
        let ranks = mesh.axis(Axis::Tensor);
        let all = gather_values(ranks, &own)?;
        match own.iter().find(|part| all.iter().all(|rank| rank.contains(part))) {
            Some((name, _)) => {
                wait_for_all(ranks);
                Err(whole(name, size))
            }
            None => Ok(()),
        }
    }

    /// The summary of this rank's [parts](DataParallel::parts).
    fn summary(&self, parts: &[(String, String)]) -> PartsOfRank {
        let text: String =
            parts.iter().flat_map(|(name, digest)| [name.as_str(), digest.as_str()]).collect();
        PartsOfRank {
            exist: self.buffers().groups().iter().any(is_part),
            digest: (!parts.is_empty()).then(|| digest(text.as_bytes())),
            names: parts.iter().take(3).map(|(name, _)| name.clone()).collect(),
            count: parts.len(),
        }
    }

    /// Names and digests of this rank's gradients that are parts over the tensor axis; not of those that are 0 or not
    /// finite, which may be the same on all ranks.
    fn parts(&self) -> Result<Vec<(String, String)>> {
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
            parts.extend(names.zip(digests).filter_map(|(name, digest)| Some((name, digest?))));
        }
        Ok(parts)
    }
}

/// Whether gradients of a bucket are parts over the tensor axis.
fn is_part(bucket: &ParamAndGradBucket) -> bool {
    bucket.grad_partial.contains(Axis::Tensor)
}

/// The ranks of a pipeline stage, and their gradients.
fn of_stage<'a>(
    layout: &'a ParallelDims,
    all: &'a [PartsOfRank],
    stage: usize,
) -> impl Iterator<Item = (usize, &'a PartsOfRank)> {
    let ranks = all.iter().enumerate();
    ranks.filter(move |&(rank, _)| layout.coordinate(rank, Axis::Pipeline) == stage)
}

/// Compares the gradients of a stage along the tensor axis. With shards, other ranks of the stage have other parameters.
fn compare(layout: &ParallelDims, all: &[PartsOfRank], stage: usize) -> Parts {
    let ranks = || of_stage(layout, all, stage);
    // Ranks along the tensor axis are next to one another.
    let first = |rank: usize| &all[rank - layout.coordinate(rank, Axis::Tensor)];
    if ranks().any(|(rank, told)| told.digest != first(rank).digest) {
        return Parts::Differ;
    }
    match (ranks().any(|(_, told)| told.digest.is_some()), ranks().any(|(_, told)| told.exist)) {
        (true, _) => Parts::Same,
        (false, true) => Parts::Unknown,
        (false, false) => Parts::Absent,
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
