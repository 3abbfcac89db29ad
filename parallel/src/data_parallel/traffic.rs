//! Computes the communication volume of a step in advance.

use ferrotron_nn::shard_exchange::ExchangeSize;
use ferrotron_nn::{Axis, Optimizer, ParamAndGradBucket, Sharding};
use ferrotron_tensor::DType;
use std::ops::Range;

use super::DataParallel;
use super::sharded_weights::{PrefetchWindow, lines};
use crate::collective::routes::{all_reduced, gathered_rows, scattered};
use crate::collective::{Group, partition_range};
use crate::pipeline::Instruction;

/// Bytes that a rank sends for gradients and weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ExpectedTraffic {
    /// Bytes to the ranks along the batch axes (data and context).
    pub batch: u64,
    /// Bytes to other holders of the same parameters. They are along the tensor axis for norms with sequence
    /// parallelism, and at the other end of the pipeline for tied embeddings.
    pub holders: u64,
}

impl DataParallel {
    /// The bytes that this rank sends in `steps` steps of `microbatches` micro-batches each, the first of them right
    /// after a synchronization. The reduction of the scalar norm is not included.
    ///
    /// With `bytes` of parameters, N ranks and m micro-batches, it sends (N - 1) / N times the following. This is
    /// exact up to the rounding of shards. Gradients must have the dtype of the weights, as half of each sum is an
    /// all-gather of reduced values.
    ///
    /// - 2 `bytes` without sharding (once in `synchronize_every` steps) and with a sharded optimizer,
    /// - (m + 1) `bytes` with sharded gradients,
    /// - with sharded weights, m `bytes` for gradients and 2 m `bytes` for weights, minus the buckets that stay
    ///   gathered between forward and backward. With buckets b1..bn in forward order, each of m backwards does not
    ///   gather the last two again. Each of the m - 1 forwards after the first does not gather the first two again. A
    ///   matrix that is used again at the end is gathered once more, unless its bucket is one of those.
    ///   [Recomputed](Self::recomputing) regions traverse their buckets forward and back again.
    ///
    /// With [`Unused::Skip`](ferrotron_nn::Unused::Skip), sharded weights are gathered once in each micro-batch instead,
    /// and the flags that ranks exchange are not included.
    ///
    /// The count for sharded weights assumes that backward reads a parameter of every bucket. A bucket of biases only
    /// is gathered less often. In a pipeline use [`DataParallel::expected_pipeline_traffic`].
    pub fn expected_traffic(&self, microbatches: usize, steps: usize) -> ExpectedTraffic {
        let all = 0..self.visits.len();
        let one = [Pass::Forward(all.clone()), Pass::Backward(all)];
        self.traffic_of(&vec![one; microbatches].concat(), microbatches, steps)
    }

    /// The bytes that this rank sends in `steps` steps, each of which runs the instructions of a pipeline stage on
    /// `microbatches` micro-batches. Sums of gradients are as in [`DataParallel::expected_traffic`].
    ///
    /// Sharded weights are gathered in the order in which the schedule runs chunks. A stage with one chunk whose
    /// buckets b1..bn follow one another turns around for nothing where a backward follows a forward or a forward a backward.
    /// Where a forward follows a forward, or a backward a backward, it gathers the first two of the pass again, but for
    /// one that is there.
    pub fn expected_pipeline_traffic(
        &self,
        instructions: &[Instruction],
        microbatches: usize,
        steps: usize,
    ) -> ExpectedTraffic {
        let pass = |instruction: &Instruction| match *instruction {
            Instruction::Forward { chunk, .. } => Some(Pass::Forward(self.chunks[chunk].clone())),
            Instruction::Backward { chunk, .. } | Instruction::BackwardInput { chunk, .. } => {
                Some(Pass::Backward(self.chunks[chunk].clone()))
            }
            _ => None,
        };
        let passes: Vec<Pass> = instructions.iter().filter_map(pass).collect();
        self.traffic_of(&passes, microbatches, steps)
    }

    fn traffic_of(&self, passes: &[Pass], microbatches: usize, steps: usize) -> ExpectedTraffic {
        let shared = &self.shared;
        let batch = shared.mesh.dp_cp();
        let groups = shared.buffers.groups();
        let gathers = self.gathers(passes);
        let (mut in_batch, mut to_holders) = (0, 0);
        for (bucket, group) in groups.iter().enumerate() {
            let len = group.padded_numel();
            let weight = group.params[0].leaf().dtype().size();
            let dtype = group.gradients.dtype();
            let gradient = dtype.size();
            let (scattered, gathered) = match group.owners.is_empty() {
                true => (scatter(batch, len, gradient), gather(batch, len, weight)),
                false => (reduce(batch, group, dtype), broadcast(batch, group)),
            };
            let sent = match shared.sharding() {
                Sharding::None if shared.is_local() => all_reduce(batch, len, weight),
                Sharding::None => all_reduce(batch, len, gradient),
                Sharding::Optimizer => gradient * scattered + weight * gathered,
                Sharding::Gradients => microbatches * gradient * scattered + weight * gathered,
                Sharding::Weights => {
                    microbatches * gradient * scattered + gathers[bucket] * weight * gathered
                }
            };
            in_batch += sent * (steps / shared.config.synchronize_every);
            for (axis, ranks) in shared.holders() {
                if group.grad_partial.contains(axis) {
                    let len = if shared.keeps_gradients() { len } else { group.owned.len() };
                    to_holders += all_reduce(ranks, len, gradient) * steps;
                }
            }
        }
        ExpectedTraffic { batch: in_batch as u64, holders: to_holders as u64 }
    }

    /// The bytes that this rank sends in each step for sums over shards and gathered shards, which `optimizer` needs along
    /// the tensor axis.
    pub fn expected_shard_exchanges(&self, optimizer: &Optimizer) -> u64 {
        let ranks = self.shared.mesh.axis(Axis::Tensor);
        let sent = |exchange: ExchangeSize| {
            let ExchangeSize { numel, dtype, gathered_dim } = exchange;
            match gathered_dim {
                None => all_reduce(ranks, numel, dtype.size()),
                Some(len) => {
                    let row = dtype.size() * numel.checked_div(len).unwrap_or(0);
                    row * gather(ranks, len, row)
                }
            }
        };
        optimizer.shard_exchanges().into_iter().map(sent).sum::<usize>() as u64
    }

    /// Number of gathers of each bucket in a step with sharded weights.
    fn gathers(&self, passes: &[Pass]) -> Vec<usize> {
        let mut gathers = vec![0; self.shared.buffers.groups().len()];
        if self.shared.gathers_all() {
            // What a forward gathered stays until the end of a backward.
            let mut held = false;
            for pass in passes {
                gathers.iter_mut().for_each(|count| *count += usize::from(!held));
                held = matches!(pass, Pass::Forward(_));
            }
            return gathers;
        }
        for line in lines(self.shared.buffers.groups()) {
            let mut walk = PrefetchWindow::new(line.len());
            for visit in passes.iter().flat_map(|pass| self.visits_of(pass)) {
                let bucket = self.visits[visit].1;
                let position = line.iter().position(|&other| other == bucket);
                let gathered = position.map_or(Vec::new(), |position| walk.advance(position));
                gathered.into_iter().for_each(|at| gathers[line[at]] += 1);
            }
        }
        gathers
    }

    /// The visits of a pass, in its order.
    fn visits_of(&self, pass: &Pass) -> Vec<usize> {
        let range = match pass {
            Pass::Forward(visits) => return visits.clone().collect(),
            Pass::Backward(visits) => visits,
        };
        let mut order = Vec::new();
        let mut end = range.end;
        while end > range.start {
            let again = self.recomputed.iter().find(|range| range.end == end && !range.is_empty());
            let range = again.cloned().unwrap_or(end - 1..end);
            order.extend(again.cloned().into_iter().flatten());
            order.extend(range.clone().rev());
            end = range.start;
        }
        order
    }
}

/// The pass of a micro-batch over the visits of a chunk, or of all.
#[derive(Debug, Clone)]
enum Pass {
    Forward(Range<usize>),
    Backward(Range<usize>),
}

/// Elements of `bytes` bytes that this rank sends in a reduce-scatter of `len` elements.
fn scatter(ranks: &Group, len: usize, bytes: usize) -> usize {
    scattered(ranks.size(), ranks.rank(), len, bytes)
}

/// Rows of `bytes` bytes that this rank sends in an all-gather of `rows` rows.
fn gather(ranks: &Group, rows: usize, bytes: usize) -> usize {
    gathered_rows(ranks.size(), ranks.rank(), rows, bytes)
}

/// Bytes that this rank sends in an all-reduce of `len` elements of `bytes` bytes.
fn all_reduce(ranks: &Group, len: usize, bytes: usize) -> usize {
    all_reduced(ranks.size(), ranks.rank(), len, bytes)
}

/// Elements that this rank sends when each parameter is reduced to its owner: all but its own. Sums of 16-bit numbers
/// are computed in shards by all ranks; the owner then also sends the shards that other ranks compute.
fn reduce(ranks: &Group, group: &ParamAndGradBucket, dtype: DType) -> usize {
    let parts_of_others = |numel: usize, rows: usize| {
        let row = numel.checked_div(rows).unwrap_or(0);
        numel - row * partition_range(rows, ranks.size(), ranks.rank()).len()
    };
    let params = group.params.iter().zip(&group.owners);
    let own = params.filter(|&(_, &owner)| dtype.size() == 2 && owner == ranks.rank());
    let own = own.map(|(param, _)| parts_of_others(param.leaf().numel(), param.leaf().dims()[0]));
    numel_of_others(ranks.rank(), group) + own.sum::<usize>()
}

/// Elements that this rank sends when owners broadcast around the ring: all but those owned by the next rank.
fn broadcast(ranks: &Group, group: &ParamAndGradBucket) -> usize {
    numel_of_others((ranks.rank() + 1) % ranks.size(), group)
}

fn numel_of_others(rank: usize, group: &ParamAndGradBucket) -> usize {
    let params = group.params.iter().zip(&group.owners);
    params.filter(|&(_, &owner)| owner != rank).map(|(param, _)| param.leaf().numel()).sum()
}
