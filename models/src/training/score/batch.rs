//! A micro-batch of requests: the tokens that a rank scores, and the outputs that predict them.

use ferrotron_nn::{Axis, Context};
use ferrotron_parallel::collective::Reduction;
use ferrotron_parallel::mesh::Mesh;
use ferrotron_parallel::tensor_parallel::SequenceParallel;
use ferrotron_tensor::{Error, Result, Tensor};
use std::collections::{HashMap, HashSet};

use crate::io::data::tasks::ScoreRequest;
use crate::io::data::{Batch, TokenBatch};
use crate::model::gpt::Gpt;
use crate::training::evaluate::LocalModel;
use crate::training::microbatch::Microbatch;

/// A scored token of a micro-batch.
pub struct ScoredToken {
    /// Row of the request.
    pub row: usize,
    /// Number of the token among those of the request.
    pub number: usize,
    /// The position whose output predicts it.
    pub position: usize,
    /// The token; -1 where the likeliest is asked for.
    pub target: i64,
}

/// A micro-batch with the tokens that this rank scores.
pub struct BatchInFlight {
    pub microbatch: Microbatch,
    /// Scored tokens at the positions that this rank has along the context axis.
    pub scored: Vec<ScoredToken>,
    /// The numbers of the scored tokens, on the rank that reports them.
    pub found: Vec<f64>,
}

impl BatchInFlight {
    /// The micro-batch of the requests `batch`, or a blank one of the least size.
    pub fn new(
        model: &LocalModel<Gpt>,
        requests: &[ScoreRequest],
        batch: &[usize],
    ) -> Result<BatchInFlight> {
        let lengths = batch.iter().map(|&index| requests[index].input_length());
        let width = lengths.max().unwrap_or(1).next_multiple_of(unit(model.mesh));
        let longest = model.config.max_position_embeddings;
        if width > longest {
            let message = format!(
                "requests are padded to {width} positions in this layout, but the model takes {longest}: give a shorter \
                 --seq-length, a multiple of {}",
                unit(model.mesh)
            );
            return Err(Error::config("score", message));
        }
        let dims = [batch.len().max(1), width];
        let mut inputs = vec![0_u32; dims[0] * width];
        let mut scored = Vec::new();
        for (row, &index) in batch.iter().enumerate() {
            let request = &requests[index];
            let length = request.input_length();
            inputs[row * width..][..length].copy_from_slice(&request.tokens[..length]);
            for (number, target) in (request.first_target..).take(request.num_scores()).enumerate()
            {
                let token = request.tokens.get(target).map_or(-1, |&token| i64::from(token));
                scored.push(ScoredToken { row, number, position: target - 1, target: token });
            }
        }
        let batch =
            Batch::new(0, dims[0], width).with_positions(TokenBatch::INPUTS, inputs, &dims)?;
        let ctx = Context::eval(dims[0], width);
        let microbatch = Microbatch::new(model.scope.device(), model.mesh, &batch, ctx)?;
        let held: HashSet<usize> = microbatch.ctx().sequence.coordinates().collect();
        scored.retain(|token| held.contains(&token.position));
        Ok(BatchInFlight { microbatch, scored, found: Vec::new() })
    }

    /// The rows of `x` (B, T, C) that predict the scored tokens: (N, C) for `count` of them from `first` on, rounded up to a
    /// multiple of the ranks that share positions. Each of these gives the rows that it has.
    pub fn rows(
        &self,
        model: &LocalModel<Gpt>,
        x: &Tensor,
        first: usize,
        count: usize,
    ) -> Result<Tensor> {
        let (length, width) = (x.dim(1)?, x.dim(-1)?);
        let tensor = model.mesh.axis(Axis::Tensor);
        let shares = shares(model.mesh);
        let places = self.microbatch.ctx().residual.coordinates().enumerate();
        let places: HashMap<usize, usize> = places.map(|(local, global)| (global, local)).collect();
        let blank = x.numel() / width; // a row of zeros behind the others
        let id = |token: &ScoredToken| {
            let place = places.get(&token.position);
            place.map_or(blank, |place| token.row * length + place) as i64
        };
        let mut ids: Vec<i64> = self.scored[first..][..count].iter().map(id).collect();
        ids.resize(
            count.max(1).next_multiple_of(shares),
            if shares == 1 { 0 } else { blank as i64 },
        );
        let ids = Tensor::from_slice(x.device(), &ids, &[ids.len()])?;
        let flat = x.reshape(&[blank, width])?;
        if shares == 1 {
            return flat.index_select(0, &ids);
        }
        let zeros = Tensor::zeros(x.device(), x.dtype(), &[1, width])?;
        let rows = Tensor::concat(&[&flat, &zeros], 0)?.index_select(0, &ids)?;
        let whole = tensor.all_reduce(rows, Reduction::Sum)?.wait()?;
        let own = tensor.local_range(whole.dim(0)?);
        whole.narrow(0, own.start, own.len())?.contiguous()
    }
}

/// Ranks along the tensor axis that share the positions between layers.
fn shares(mesh: &Mesh) -> usize {
    match mesh.sequence() {
        SequenceParallel::On => mesh.axis(Axis::Tensor).size(),
        SequenceParallel::Off => 1,
    }
}

/// The number of which the positions of a batch must be a multiple.
fn unit(mesh: &Mesh) -> usize {
    let context = mesh.axis(Axis::Context).size();
    least_unit(context, shares(mesh))
}

/// The number for so many ranks along the context axis, whose parts of a sequence have two pieces each, and so many that
/// share the positions of a part.
fn least_unit(context: usize, shares: usize) -> usize {
    context * shares * if context == 1 || shares.is_multiple_of(2) { 1 } else { 2 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A length that training takes is one that scoring takes.
    #[test]
    fn lengths_are_those_of_training() {
        for context in 1..=6 {
            for shares in 1..=6 {
                let trains = |length: &usize| {
                    (context == 1 || length.is_multiple_of(2 * context))
                        && length.is_multiple_of(context)
                        && (length / context).is_multiple_of(shares)
                };
                let least = (1..).find(trains).unwrap();
                assert_eq!(least_unit(context, shares), least, "{context} x {shares}");
            }
        }
    }
}
