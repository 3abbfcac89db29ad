//! Continues texts on ranks that share a model, with caches of keys and values: a token costs a forward over one position.
//!
//! ```text
//! texts --by turns--> data- and context-parallel ranks, which have the same weights
//!     --pipeline, forward only, each stage with the caches of its blocks--> head at the last position, a token
//!     --sum over all ranks--> the tokens on every rank --> rank 0 says which texts go on
//! ```
//!
//! A tensor-parallel rank caches the keys and values of its heads. A context-parallel rank caches whole texts of its own:
//! a single new position cannot be shared.

use ferrotron_autograd::{Var, no_grad};
use ferrotron_nn::{Axis, Context, KvCache};
use ferrotron_parallel::agreement::{Facts, agree, broadcast_bytes};
use ferrotron_parallel::collective::Reduction;
use ferrotron_parallel::mesh::Mesh;
use ferrotron_parallel::pipeline::{PipelineModel, PipelineSchedule, execute};
use ferrotron_parallel::tensor_parallel::SequenceParallel;
use ferrotron_tensor::{DType, Device, Error, ErrorKind, Result, Tensor};
use std::ops::ControlFlow;

use crate::model::generate::{GenerationRequest, Text, continue_texts, join, split};
use crate::model::gpt::Gpt;
use crate::training::evaluate::LocalModel;

/// Continues several texts, each as [`generate`](crate::generate::generate) continues it on one rank, up to the rounding of sums.
/// All ranks of the model's mesh call this with the same requests and get the same texts. `on_token` is called on rank 0
/// alone, with the number of a text and its token as it comes, and ends this text by breaking off.
///
/// Up to `micro_batch_size` texts go through a stage together; prompts take a forward of their own.
///
/// # Errors
/// Sequence parallelism, or several chunks on a rank; requests that [`generate`](crate::generate::generate)
/// refuses; caches that a rank cannot make; a replica of one rank that fails; logits that are not finite. All ranks have
/// these, of [`ErrorKind::Value`] or [`ErrorKind::Config`], and may go on. Any other error may be of this rank alone: the
/// others wait for it until it ends.
pub fn generate_on_ranks(
    model: &LocalModel<Gpt>,
    requests: &[GenerationRequest],
    micro_batch_size: usize,
    mut on_token: impl FnMut(usize, u32) -> ControlFlow<()>,
) -> Result<Vec<Vec<u32>>> {
    let LocalModel { parts, config, mesh, .. } = *model;
    if mesh.sequence() == SequenceParallel::On {
        let why =
            "a single new position cannot be shared by ranks: switch sequence parallelism off";
        return Err(Error::config("generate", why));
    }
    let [gpt] = parts else {
        return Err(Error::config("generate", "a rank must have one chunk of the model"));
    };
    let replicas = mesh.dp_cp();
    let is_own = |index: usize| index % replicas.size() == replicas.rank();
    let caches = |rooms: &[usize]| {
        let of_text = |(index, &room): (usize, &usize)| match is_own(index) {
            true => gpt.caches(1, room),
            false => Ok(Vec::new()),
        };
        on_all(mesh, rooms.iter().enumerate().map(of_text).collect())
    };
    let next = |texts: Vec<Text>| {
        let (own, others) = texts.into_iter().partition(|text| is_own(text.index));
        next_tokens(model, requests, own, others, micro_batch_size.max(1))
    };
    let goes_on = |added: &[(usize, u32)]| {
        if added.is_empty() {
            return Ok(Vec::new());
        }
        let flags = match mesh.rank() {
            0 => added.iter().map(|&(text, token)| u8::from(on_token(text, token).is_continue())),
            _ => return all_flags(mesh, Vec::new()),
        };
        all_flags(mesh, flags.collect())
    };
    continue_texts(config, requests, caches, next, goes_on)
}

/// The result of a rank, if no rank has an error; else all ranks have the first one, as an error of value.
fn on_all<T>(mesh: &Mesh, own: Result<T>) -> Result<T> {
    let facts = Facts::new();
    match agree(mesh.world(), own.as_ref().map(|_| &facts)) {
        Ok(()) => own,
        Err(error) if error.kind() == ErrorKind::Communication => Err(error),
        Err(error) => Err(Error::value("", error.to_string())),
    }
}

/// The flags of rank 0, on every rank.
fn all_flags(mesh: &Mesh, flags: Vec<u8>) -> Result<Vec<bool>> {
    let flags = broadcast_bytes(mesh.world(), flags)?;
    Ok(flags.into_iter().map(|flag| flag == 1).collect())
}

/// The next token of all texts, in the order of their numbers: of `own` by this replica, of `others` by the other ones.
fn next_tokens(
    model: &LocalModel<Gpt>,
    requests: &[GenerationRequest],
    own: Vec<Text>,
    others: Vec<Text>,
    micro_batch_size: usize,
) -> Result<Vec<(u32, Text)>> {
    let (mesh, count) = (model.mesh, own.len() + others.len());
    let shares_model =
        [Axis::Tensor, Axis::Pipeline].iter().any(|&axis| mesh.axis(axis).size() > 1);
    let found = match own_tokens(model, requests, own, micro_batch_size) {
        // The ranks that share the model wait in the middle of a forward: the end of this rank ends them.
        Err(error) if shares_model => return Err(of_this_rank(error)),
        found => found.map(|mut found| {
            found.extend(others.into_iter().map(|text| (0.0, text)));
            found.sort_by_key(|(_, text)| text.index);
            found
        }),
    };
    let tokens = match &found {
        Ok(found) => found.iter().map(|(token, _)| *token).collect(),
        Err(_) => vec![f64::NAN; count],
    };
    let tokens = Tensor::from_slice(&Device::cpu(1)?, &tokens, &[count])?;
    let tokens =
        mesh.world().blocking().all_reduce(tokens, Reduction::Sum)?.wait()?.to_vec::<f64>()?;
    let found = match tokens.iter().any(|token| token.is_nan()) {
        true => on_all(mesh, found.and_then(|found| finite(model, found)))?,
        false => found?,
    };
    let texts = found.into_iter().map(|(_, text)| text);
    Ok(tokens.into_iter().map(|token| token as u32).zip(texts).collect())
}

/// The error of one rank alone, of a kind with which no caller goes on: others still wait for this rank.
fn of_this_rank(error: Error) -> Error {
    match error.kind() {
        ErrorKind::Value | ErrorKind::Config => Error::shape("", error.to_string()),
        _ => error,
    }
}

/// Returns `found`, or the error for a logit that is not finite.
fn finite(model: &LocalModel<Gpt>, found: Vec<(f64, Text)>) -> Result<Vec<(f64, Text)>> {
    if found.iter().any(|(token, _)| token.is_nan()) {
        let dtype = model.scope.dtype();
        let message = format!("a logit is not finite: weights are damaged, or {dtype} overflows");
        return Err(Error::value("generate", message));
    }
    Ok(found)
}

/// The texts of this replica with their next tokens: 0 where another rank of it knows the token, NaN where a logit is not
/// finite.
fn own_tokens(
    model: &LocalModel<Gpt>,
    requests: &[GenerationRequest],
    mut own: Vec<Text>,
    micro_batch_size: usize,
) -> Result<Vec<(f64, Text)>> {
    own.iter_mut().for_each(|text| text.slide(model.config.max_position_embeddings));
    let (next, prompts): (Vec<Text>, Vec<Text>) =
        own.into_iter().partition(|text| text.num_unread() == 1);
    let mut together: Vec<Vec<Text>> = prompts.into_iter().map(|text| vec![text]).collect();
    for text in next {
        match together.last_mut() {
            Some(last) if last[0].num_unread() == 1 && last.len() < micro_batch_size => {
                last.push(text);
            }
            _ => together.push(vec![text]),
        }
    }
    let batch = |texts| CachedBatch::new(model, texts);
    let batches = together.into_iter().map(batch).collect::<Result<Vec<_>>>()?;
    let mut run = CachedModel { model, batches };
    if !run.batches.is_empty() {
        let stages = model.mesh.axis(Axis::Pipeline).size();
        let schedule = PipelineSchedule::forward_only(stages, run.batches.len(), 1)?;
        no_grad(|| execute(&schedule, &mut run, model.mesh, 1.0))?;
    }
    let mut found = Vec::new();
    for CachedBatch { mut texts, caches, logits, .. } in run.batches {
        let mut logits = logits.chunks(model.config.vocab_size);
        let token = |text: &Text| match logits.next() {
            None => 0.0,
            Some(logits) if logits.iter().all(|logit| logit.is_finite()) => {
                f64::from(text.choose(requests, logits))
            }
            Some(_) => f64::NAN,
        };
        let tokens: Vec<f64> = texts.iter().map(token).collect();
        split(caches, &mut texts);
        found.extend(tokens.into_iter().zip(texts));
    }
    Ok(found)
}

/// Texts with equally many new tokens, which go through the model together.
struct CachedBatch {
    texts: Vec<Text>,
    /// The new tokens (B, T).
    input: Tensor,
    caches: Vec<KvCache>,
    /// The logits (B, V) of the next tokens, on the first tensor-parallel rank of the last stage.
    logits: Vec<f64>,
}

impl CachedBatch {
    fn new(model: &LocalModel<Gpt>, mut texts: Vec<Text>) -> Result<CachedBatch> {
        let (input, caches) = join(model.scope.device(), &mut texts)?;
        Ok(CachedBatch { texts, input, caches, logits: Vec::new() })
    }
}

/// This rank's chunk on the batches of a round.
struct CachedModel<'a> {
    model: &'a LocalModel<'a, Gpt>,
    batches: Vec<CachedBatch>,
}

impl PipelineModel for CachedModel<'_> {
    fn activation(&self, microbatch: usize) -> (Vec<usize>, DType, Device) {
        let dims = self.batches[microbatch].input.dims();
        let LocalModel { config, scope, .. } = self.model;
        (vec![dims[0], dims[1], config.hidden_size], scope.dtype(), scope.device().clone())
    }

    fn forward(&mut self, microbatch: usize, chunk: usize, input: Option<Var>) -> Result<Var> {
        let (gpt, batch) = (&self.model.parts[chunk], &mut self.batches[microbatch]);
        let ctx = Context::eval(batch.texts.len(), gpt.config().max_position_embeddings);
        let x = match input {
            Some(x) => x,
            None => gpt.embed_next(&ctx, &batch.input, &batch.caches)?,
        };
        let x = gpt.run_cached_blocks(&ctx, x, &mut batch.caches)?;
        if !gpt.chunk().last {
            return Ok(x);
        }
        let logits = gpt.last_logits(&x)?;
        if self.model.mesh.axis(Axis::Tensor).rank() == 0 {
            batch.logits = logits.value().to_f64()?;
        }
        // The pipeline takes a loss of the last chunk, which nobody reads.
        Tensor::full(self.model.scope.device(), DType::F64, &[], 0.0).map(Var::constant)
    }

    fn end_backward(&mut self, _: usize, _: usize) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_one_rank_alone_keep_their_text_and_end_it() {
        let text = "blocks.1: embedding: an index is beyond the table";
        for error in [
            Error::value("embedding", "an index is beyond the table"),
            Error::config("embedding", "an index is beyond the table"),
            Error::memory("embedding", "an index is beyond the table"),
        ] {
            let kind = error.kind();
            let ending = of_this_rank(error.at("blocks.1"));
            assert_eq!(ending.to_string(), text);
            assert!(!matches!(ending.kind(), ErrorKind::Value | ErrorKind::Config), "{kind:?}");
            assert!(kind != ErrorKind::Memory || ending.kind() == kind);
        }
    }
}
