//! Scores tokens: the log-probability of each given those before it, and the likeliest ones, in any layout.
//!
//! ```text
//! requests --longest first--> micro-batches --by turns--> data-parallel replicas
//!     --pipeline, forward only--> head over the scored positions alone --> sum over all ranks --> scores on every rank
//! ```

use ferrotron_autograd::{Var, no_grad};
use ferrotron_nn::{Axis, Context};
use ferrotron_parallel::collective::Reduction;
use ferrotron_parallel::pipeline::{PipelineModel, PipelineSchedule, execute};
use ferrotron_tensor::ops::reduce::KeepDims;
use ferrotron_tensor::{DType, Device, Error, Result, Tensor};

use crate::finite::first_not_finite;
use crate::io::data::tasks::{ScoreRequest, TokenScore};
use crate::io::data::{Batch, TokenBatch};
use crate::model::gpt::Gpt;
use crate::training::evaluate::LocalModel;
use crate::training::microbatch::Microbatch;
use crate::training::model::Model;

/// Elements of the logits that are in memory at once, unless a single position has more.
const LOGITS_AT_ONCE: usize = 1 << 24;

/// How requests are scored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScoreConfig {
    /// Requests that go through the model together.
    pub micro_batch_size: usize,
    /// Likeliest tokens that are reported for each position; at least 1.
    pub top: usize,
}

/// Scores `requests`; each result has the scores of [`ScoreRequest::num_scores`] tokens. All ranks of the model's mesh call
/// this with the same requests and get the same results. `done` is told how many requests are scored, several times.
///
/// Attention is causal, so what is padded and what else is in a batch changes no score, but by the rounding of sums.
///
/// # Errors
/// A request without a scored token, longer than the model's positions, or with a token outside its vocabulary; scores
/// that are not finite; as the model and the communication do.
pub fn score(
    model: &LocalModel<Gpt>,
    requests: &[ScoreRequest],
    config: ScoreConfig,
    mut done: impl FnMut(usize),
) -> Result<Vec<Vec<TokenScore>>> {
    let LocalModel { parts: [part], mesh, .. } = model else {
        return Err(Error::config("score", "a rank must have one chunk of the model"));
    };
    if mesh.axis(Axis::Context).size() > 1 {
        return Err(Error::config("score", "context-parallel-size must be 1"));
    }
    let ScoreConfig { micro_batch_size: micro, top } = config;
    if micro == 0 {
        return Err(Error::config("score", "--micro-batch-size 0 must be at least 1"));
    }
    check(model, requests)?;
    let top = top.clamp(1, part.config().vocab_size);
    // Those of one length meet, and the largest batch comes first.
    let mut order: Vec<usize> = (0..requests.len()).collect();
    order.sort_by_key(|&index| std::cmp::Reverse(requests[index].input_length()));
    let (data, stages) = (mesh.axis(Axis::Data), mesh.axis(Axis::Pipeline).size());
    // A pipeline of so many micro-batches is mostly full.
    let in_flight = if stages == 1 { 1 } else { 4 * stages };
    let mut results = vec![Vec::new(); requests.len()];
    let mut scored = 0;
    for round in order.chunks(micro * data.size() * in_flight) {
        let own: Vec<&[usize]> =
            round.chunks(micro).skip(data.rank()).step_by(data.size()).collect();
        let batches = own.iter().map(|batch| BatchInFlight::new(model, requests, batch));
        let batches = batches.collect::<Result<Vec<_>>>()?;
        let mut run = ScoringModel { part, model, top, batches };
        if !own.is_empty() {
            let schedule = PipelineSchedule::forward_only(stages, own.len(), 1)?;
            let device = model.scope.device();
            device.run(|| no_grad(|| execute(&schedule, &mut run, mesh, 1.0)))?;
        }
        let found = run.batches.into_iter().map(|batch| batch.found);
        let found = own.iter().copied().zip(found);
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
            check_finite(part, mesh.world().size(), &results[index], request)?;
        }
        scored += round.len();
        done(scored);
    }
    Ok(results)
}

/// Errors for requests that the model cannot score.
fn check(model: &LocalModel<Gpt>, requests: &[ScoreRequest]) -> Result<()> {
    let (longest, vocab) = (model.config.max_position_embeddings, model.config.vocab_size);
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
    part: &Gpt,
    ranks: usize,
    scores: &[TokenScore],
    request: &ScoreRequest,
) -> Result<()> {
    let finite = |score: &TokenScore| score.log_prob.is_finite() && score.top[0].1.is_finite();
    let Some(at) = scores.iter().position(|score| !finite(score)) else { return Ok(()) };
    let weight = if ranks == 1 { first_not_finite(part)? } else { None };
    let message = weight.unwrap_or_else(|| {
        let (position, value) = (request.first_target + at, scores[at].log_prob);
        format!(
            "the log-probability of token {position} is {value}: weights are damaged, or {} overflows",
            part.scope().dtype()
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
    found: impl Iterator<Item = (&'a [usize], Vec<f64>)>,
) -> Result<Vec<f64>> {
    let width = 1 + 2 * top;
    let mut starts = std::collections::HashMap::new();
    let mut length = 0;
    for &index in round {
        starts.insert(index, length);
        length += requests[index].num_scores() * width;
    }
    let mut numbers = vec![0.0; length];
    for (batch, values) in found {
        if values.is_empty() {
            continue; // only ranks with the head have some
        }
        let mut values = values.as_slice();
        for &index in batch {
            let (own, rest) = values.split_at(requests[index].num_scores() * width);
            numbers[starts[&index]..][..own.len()].copy_from_slice(own);
            values = rest;
        }
    }
    let world = model.mesh.world();
    if world.size() == 1 {
        return Ok(numbers);
    }
    let own = Tensor::from_slice(&Device::cpu(1)?, &numbers, &[length])?;
    world.all_reduce(own, Reduction::Sum)?.wait()?.to_vec::<f64>()
}

/// A micro-batch with the rows of its scored tokens.
struct BatchInFlight {
    microbatch: Microbatch,
    /// The positions, in (B T), whose outputs predict scored tokens.
    rows: Vec<i64>,
    /// The scored tokens; -1 where the likeliest is asked for.
    targets: Vec<i64>,
    /// The numbers of the scored tokens, on the rank that reports them.
    found: Vec<f64>,
}

impl BatchInFlight {
    fn new(
        model: &LocalModel<Gpt>,
        requests: &[ScoreRequest],
        batch: &[usize],
    ) -> Result<BatchInFlight> {
        let lengths = batch.iter().map(|&index| requests[index].input_length());
        let width = lengths.max().unwrap_or(1);
        let mut inputs = vec![0_u32; batch.len() * width];
        let (mut rows, mut targets) = (Vec::new(), Vec::new());
        for (row, &index) in batch.iter().enumerate() {
            let request = &requests[index];
            let length = request.input_length();
            inputs[row * width..][..length].copy_from_slice(&request.tokens[..length]);
            for target in (request.first_target..).take(request.num_scores()) {
                rows.push((row * width + target - 1) as i64);
                targets.push(request.tokens.get(target).map_or(-1, |&token| i64::from(token)));
            }
        }
        let dims = [batch.len(), width];
        let batch =
            Batch::new(0, dims[0], width).with_positions(TokenBatch::INPUTS, inputs, &dims)?;
        let ctx = Context::eval(dims[0], width);
        let microbatch = Microbatch::new(model.scope.device(), model.mesh, &batch, ctx)?;
        Ok(BatchInFlight { microbatch, rows, targets, found: Vec::new() })
    }
}

/// A rank's chunk on the micro-batches of a round.
struct ScoringModel<'a> {
    part: &'a Gpt,
    model: &'a LocalModel<'a, Gpt>,
    top: usize,
    batches: Vec<BatchInFlight>,
}

impl ScoringModel<'_> {
    /// The numbers of the scored tokens of a micro-batch, for x (B, T, C); none on all tensor-parallel ranks but the first.
    fn numbers(&self, batch: &BatchInFlight, x: &Tensor) -> Result<Vec<f64>> {
        let device = x.device();
        let width = x.dim(-1)?;
        let ids = Tensor::from_slice(device, &batch.rows, &[batch.rows.len()])?;
        let x = x.reshape(&[x.numel() / width, width])?.index_select(0, &ids)?; // (N, C)
        let at_once = (LOGITS_AT_ONCE / self.part.config().vocab_size).max(1);
        let reports = self.model.mesh.axis(Axis::Tensor).rank() == 0;
        let mut numbers = Vec::new();
        for (chunk, targets) in batch.targets.chunks(at_once).enumerate() {
            let count = targets.len();
            let rows = x.narrow(0, chunk * at_once, count)?.reshape(&[1, count, width])?;
            let logits = self.part.logits(&Var::constant(rows))?.into_value(); // (1, n, V)
            if reports {
                let wide = if logits.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
                let logits = logits.reshape(&[count, logits.dim(-1)?])?.cast(wide)?;
                numbers.extend(self.token_numbers(&logits.log_softmax(-1)?, targets)?);
            }
        }
        Ok(numbers)
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
        let dims = self.part.activation_dims(&self.batches[microbatch].microbatch);
        (dims, self.model.scope.dtype(), self.model.scope.device().clone())
    }

    fn forward(&mut self, microbatch: usize, _: usize, input: Option<Var>) -> Result<Var> {
        let batch = &self.batches[microbatch];
        let ctx = batch.microbatch.ctx();
        let x = match input {
            Some(x) => x,
            None => self.part.embed(ctx, batch.microbatch.get(TokenBatch::INPUTS)?)?,
        };
        let x = self.part.run_blocks(ctx, x)?;
        if self.part.chunk().last {
            let found = self.numbers(batch, x.value())?;
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
