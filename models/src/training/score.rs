//! Scores tokens: the log-probability of each given those before it, and the likeliest ones, in any layout.
//!
//! ```text
//! requests --longest first--> micro-batches --by turns--> data-parallel replicas
//!     --pipeline, forward only--> head over the scored positions alone --> sum over all ranks --> scores on every rank
//! ```
//!
//! Under context parallelism a rank scores the positions that it holds. Replicas that run out of requests run blank
//! micro-batches along: where they share weights (ZeRO stage 3), each gathers those of the others.

mod batch;

use ferrotron_autograd::{Var, no_grad};
use ferrotron_nn::Axis;
use ferrotron_parallel::collective::Reduction;
use ferrotron_parallel::pipeline::{PipelineModel, PipelineSchedule, execute};
use ferrotron_tensor::ops::reduce::KeepDims;
use ferrotron_tensor::{DType, Device, Error, Result, Tensor};
use std::collections::HashMap;

use crate::finite::first_not_finite;
use crate::io::data::TokenBatch;
use crate::io::data::tasks::{ScoreRequest, TokenScore};
use crate::model::config::GptConfig;
use crate::model::gpt::Gpt;
use crate::training::evaluate::LocalModel;
use crate::training::model::Model;
use crate::training::stop::StopFlag;
use batch::BatchInFlight;

/// Elements of the logits that are in memory at once, unless a single position has more.
const LOGITS_AT_ONCE: usize = 1 << 24;

/// Options of scoring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScoreConfig {
    /// Requests that go through the model together.
    pub micro_batch_size: usize,
    /// Likeliest tokens that are reported for each position; at least 1.
    pub top: usize,
}

/// Scores `requests`; each result has the scores of [`ScoreRequest::num_scores`] tokens. All ranks of the model's mesh call
/// this with the same requests and get the same results; `None` if one of them was asked to stop. `done` is told how many
/// requests are scored, several times.
///
/// Attention is causal, so what is padded and what else is in a batch changes no score, but by the rounding of sums.
///
/// # Errors
/// The errors of [`check_requests`], of the model and of the communication; scores that are not finite.
pub fn score(
    model: &LocalModel<Gpt>,
    requests: &[ScoreRequest],
    config: ScoreConfig,
    stop: &StopFlag,
    mut done: impl FnMut(usize),
) -> Result<Option<Vec<Vec<TokenScore>>>> {
    let LocalModel { parts, mesh, .. } = model;
    let ScoreConfig { micro_batch_size: micro, top } = config;
    if micro == 0 {
        return Err(Error::config("score", "--micro-batch-size 0 must be at least 1"));
    }
    check_requests(model.config, requests)?;
    let top = top.clamp(1, model.config.vocab_size);
    // Those of one length meet, and the largest batch comes first.
    let mut order: Vec<usize> = (0..requests.len()).collect();
    order.sort_by_key(|&index| std::cmp::Reverse(requests[index].input_length()));
    let (data, stages) = (mesh.axis(Axis::Data), mesh.axis(Axis::Pipeline).size());
    // A pipeline of so many micro-batches is mostly full.
    let in_flight = if stages == 1 { 1 } else { 4 * stages };
    let mut results = vec![Vec::new(); requests.len()];
    let mut scored = 0;
    let host = Device::cpu(1)?;
    // Ranks agree on the end, but do not wait for one another: each round asks for the next one.
    let mut stops = stop.ask_all(mesh.world(), &host)?;
    for round in order.chunks(micro * data.size() * in_flight) {
        let next = stop.ask_all(mesh.world(), &host)?;
        if std::mem::replace(&mut stops, next).wait()? {
            stops.wait()?;
            return Ok(None);
        }
        let each = round.len().div_ceil(micro).div_ceil(data.size());
        let own: Vec<&[usize]> = round
            .chunks(micro)
            .skip(data.rank())
            .step_by(data.size())
            .chain(std::iter::repeat(&[][..]))
            .take(each)
            .collect();
        let batches = own.iter().map(|batch| BatchInFlight::new(model, requests, batch));
        let batches = batches.collect::<Result<Vec<_>>>()?;
        let mut run = ScoringModel { model, top, batches };
        let schedule = PipelineSchedule::forward_only(stages, each, parts.len())?;
        no_grad(|| execute(&schedule, &mut run, mesh, 1.0))?;
        let found = own.iter().copied().zip(run.batches);
        let numbers = exchange(model, requests, round, top, found)?;
        let mut numbers = numbers.chunks_exact(1 + 2 * top);
        for &index in round {
            let request = &requests[index];
            let positions = (request.first_target..).take(request.num_scores());
            let scores = positions.zip(&mut numbers).map(|(position, numbers)| {
                let pairs = numbers[1..].chunks_exact(2).map(|pair| (pair[0] as u32, pair[1]));
                let top: Vec<(u32, f64)> = pairs.collect();
                // Behind the last token, the likeliest one stands for it.
                let token = request.tokens.get(position).copied().unwrap_or(top[0].0);
                TokenScore { token, log_prob: numbers[0], top }
            });
            results[index] = scores.collect();
            if let Err(error) = check_finite(parts, mesh.world().size(), &results[index], request) {
                // All ranks have this error and may go on.
                stops.wait()?;
                return Err(error);
            }
        }
        scored += round.len();
        done(scored);
    }
    stops.wait()?;
    Ok(Some(results))
}

/// Errors for requests that a model of `config` cannot score.
///
/// # Errors
/// A request without a scored token, longer than the model's positions, or with a token outside its vocabulary.
pub fn check_requests(config: &GptConfig, requests: &[ScoreRequest]) -> Result<()> {
    let (longest, vocab) = (config.max_position_embeddings, config.vocab_size);
    for (index, request) in requests.iter().enumerate() {
        let refuse = |why: String| Err(Error::value("score", format!("request {index}: {why}")));
        let length = request.tokens.len();
        if request.first_target == 0 || request.first_target > length || request.num_scores() == 0 {
            let first = request.first_target;
            return refuse(format!("tokens from {first} on of {length} cannot be scored"));
        }
        if request.input_length() > longest {
            let length = request.input_length();
            return refuse(format!("{length} tokens, but the model takes {longest}"));
        }
        if let Some(token) = request.tokens.iter().find(|&&token| token as usize >= vocab) {
            return refuse(format!("token {token} is outside of the vocabulary of {vocab}"));
        }
    }
    Ok(())
}

/// Errors, where a weight can be named with it, for a score that is not finite.
fn check_finite(
    parts: &[Gpt],
    ranks: usize,
    scores: &[TokenScore],
    request: &ScoreRequest,
) -> Result<()> {
    let finite = |score: &TokenScore| score.log_prob.is_finite() && score.top[0].1.is_finite();
    let Some(at) = scores.iter().position(|score| !finite(score)) else { return Ok(()) };
    let weight = match (ranks, parts) {
        (1, [whole]) => first_not_finite(whole)?,
        _ => None,
    };
    let message = weight.unwrap_or_else(|| {
        let (position, value) = (request.first_target + at, scores[at].log_prob);
        format!(
            "the log-probability of token {position} is {value}: weights are damaged, or {} overflows",
            parts[0].scope().dtype()
        )
    });
    Err(Error::value("score", message))
}

/// The numbers of a round on every rank: of each scored token its log-probability and the pairs of the likeliest, in the
/// order of `round`.
fn exchange<'a>(
    model: &LocalModel<Gpt>,
    requests: &[ScoreRequest],
    round: &[usize],
    top: usize,
    found: impl Iterator<Item = (&'a [usize], BatchInFlight)>,
) -> Result<Vec<f64>> {
    let width = 1 + 2 * top;
    let mut starts = HashMap::new();
    let mut length = 0;
    for &index in round {
        starts.insert(index, length);
        length += requests[index].num_scores() * width;
    }
    let mut numbers = vec![0.0; length];
    for (batch, BatchInFlight { scored, found, .. }) in found {
        // Only ranks with the head have some.
        for (place, values) in scored.iter().zip(found.chunks_exact(width)) {
            let start = starts[&batch[place.row]] + place.number * width;
            numbers[start..start + width].copy_from_slice(values);
        }
    }
    let world = model.mesh.world();
    if world.size() == 1 {
        return Ok(numbers);
    }
    let own = Tensor::from_slice(&Device::cpu(1)?, &numbers, &[length])?;
    world.all_reduce(own, Reduction::Sum)?.wait()?.to_vec::<f64>()
}

/// A rank's chunks on the micro-batches of a round.
struct ScoringModel<'a> {
    model: &'a LocalModel<'a, Gpt>,
    top: usize,
    batches: Vec<BatchInFlight>,
}

impl ScoringModel<'_> {
    /// The numbers of the scored tokens of a micro-batch, for x (B, T, C); none on all tensor-parallel ranks but the first.
    fn numbers(&self, part: &Gpt, batch: &BatchInFlight, x: &Tensor) -> Result<Vec<f64>> {
        let at_once = self.positions_at_once(part, x);
        let reports = self.model.mesh.axis(Axis::Tensor).rank() == 0;
        let mut numbers = Vec::new();
        // Ranks without a scored token run the head along.
        for first in (0..batch.scored.len().max(1)).step_by(at_once) {
            let count = at_once.min(batch.scored.len() - first);
            let rows = batch.rows(self.model, x, first, count)?; // (n, C), or a share
            let dims = [1, rows.dim(0)?, rows.dim(1)?];
            let logits = part.logits(&Var::constant(rows.reshape(&dims)?))?.into_value(); // (1, n, V)
            if reports && count > 0 {
                let wide = if logits.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
                let logits = logits.narrow(1, 0, count)?.contiguous()?;
                let logits = logits.reshape(&[count, logits.dim(-1)?])?.cast(wide)?;
                let targets: Vec<i64> =
                    batch.scored[first..][..count].iter().map(|token| token.target).collect();
                numbers.extend(self.token_numbers(&logits.log_softmax(-1)?, &targets)?);
            }
        }
        Ok(numbers)
    }

    /// The positions whose logits are in memory at once. With their copies in at least f32 they take no more than a training
    /// step over x (B, T, C) does: there each tensor-parallel rank has the logits of its share of the vocabulary.
    fn positions_at_once(&self, part: &Gpt, x: &Tensor) -> usize {
        let (size, wide) = (x.dtype().size(), x.dtype().size().max(4));
        let ranks = self.model.mesh.axis(Axis::Tensor).size();
        let share = x.numel() / part.config().hidden_size * size / (size + 2 * wide) / ranks;
        (LOGITS_AT_ONCE / part.config().vocab_size).min(share).max(1)
    }

    /// The same for log-probabilities (n, V).
    fn token_numbers(&self, log_probs: &Tensor, targets: &[i64]) -> Result<Vec<f64>> {
        let (count, vocab) = (targets.len(), log_probs.dim(-1)?);
        let top: Vec<(u32, f64)> = match self.top {
            1 => {
                let (best, ids) = log_probs.max(-1, KeepDims::Drop)?;
                let ids = ids.to_vec::<i64>()?.into_iter().map(|id| id as u32);
                ids.zip(best.to_f64()?).collect()
            }
            top => {
                let all = log_probs.to_f64()?;
                all.chunks_exact(vocab).flat_map(|row| likeliest(row, top)).collect()
            }
        };
        let likeliest = top.chunks_exact(self.top).map(|top| i64::from(top[0].0));
        let ids = targets.iter().zip(likeliest);
        let ids: Vec<i64> =
            ids.map(|(&target, best)| if target < 0 { best } else { target }).collect();
        let ids = Tensor::from_slice(log_probs.device(), &ids, &[count, 1])?;
        let own = log_probs.gather(-1, &ids)?.to_f64()?;
        let pairs = |top: &[(u32, f64)]| {
            top.iter().flat_map(|&(id, log_prob)| [f64::from(id), log_prob]).collect::<Vec<_>>()
        };
        let rows = own.iter().zip(top.chunks_exact(self.top));
        Ok(rows.flat_map(|(&own, top)| std::iter::once(own).chain(pairs(top))).collect())
    }
}

/// The largest `count` elements with their indices, in descending order; of equal ones the first comes first.
fn likeliest(row: &[f64], count: usize) -> Vec<(u32, f64)> {
    let before = |&a: &usize, &b: &usize| row[b].total_cmp(&row[a]).then(a.cmp(&b));
    let mut order: Vec<usize> = (0..row.len()).collect();
    if count < order.len() {
        order.select_nth_unstable_by(count, before);
        order.truncate(count);
    }
    order.sort_by(before);
    order.into_iter().map(|index| (index as u32, row[index])).collect()
}

impl PipelineModel for ScoringModel<'_> {
    fn activation(&self, microbatch: usize) -> (Vec<usize>, DType, Device) {
        let dims = self.model.parts[0].activation_dims(&self.batches[microbatch].microbatch);
        (dims, self.model.scope.dtype(), self.model.scope.device().clone())
    }

    fn forward(&mut self, microbatch: usize, chunk: usize, input: Option<Var>) -> Result<Var> {
        let batch = &self.batches[microbatch];
        let (ctx, part) = (batch.microbatch.ctx(), &self.model.parts[chunk]);
        let x = match input {
            Some(x) => x,
            None => part.embed(ctx, batch.microbatch.get(TokenBatch::INPUTS)?)?,
        };
        let x = part.run_blocks(ctx, x)?;
        if part.chunk().last {
            let found = self.numbers(part, batch, x.value())?;
            self.batches[microbatch].found = found;
            // The pipeline takes a loss of the last chunk, which nobody reads.
            return Tensor::full(self.model.scope.device(), DType::F64, &[], 0.0)
                .map(Var::constant);
        }
        Ok(x)
    }

    fn end_backward(&mut self, _: usize, _: usize) -> Result<()> {
        Ok(())
    }
}
