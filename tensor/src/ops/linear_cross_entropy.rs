//! The linear head fused with its cross-entropy, over chunks of tokens, so that logits stay within a memory limit.
//!
//! logits = x W^T, plus b if the head has a bias, soft-capped if it has a cap, then
//! [`cross_entropy`](super::cross_entropy). Gradient with d that of x W^T + b: dx = d W, dW = d^T x, and db is the sum of d
//! over the tokens.
//!
//! Logits that fit the limit are kept for backward, where d overwrites them unless they are capped; it needs x, W, b, the
//! targets and lse. Otherwise the gradients of the sum of the losses are kept: each chunk adds to them while its logits are
//! there, and backward multiplies them by its scale (Hsu et al., "Liger Kernel", arXiv 2410.10989, section 3.2). No logits
//! are computed twice.
//!
//! W and b may hold one shard of the vocabulary. Then lse is reduced over the shards chunk by chunk. dx is this shard's
//! term of the sum over the shards, and dW and db are the gradients of its own rows.
//!
//! Products and exponentials accumulate in `Element::Acc`, the loss in f64 in the order of the tokens. Loss and lse do not
//! depend on the limit, bitwise; dW is summed in the order of the chunks, in `Element::Acc`.

mod formed;
mod problem;

pub use formed::{FormedGradients, WantedGradients};
pub use problem::HeadWeights;

use super::cross_entropy::{CrossEntropyConfig, RowLosses, VocabAllReduce, VocabShard};
use super::linear::linear_bias_gradient;
use super::matmul::{Accum, matmul, matmul_into};
use crate::{Error, Result, Tensor};
use problem::Problem;

/// The loss, and the values that its gradient needs.
#[derive(Debug)]
pub struct LinearCrossEntropy {
    /// Sum over the valid tokens of all shards, without dims, in the accumulator dtype.
    pub loss: Tensor,
    /// ln sum_j e^(logit_j) of every token over all shards, with the dims of the targets, in the accumulator dtype.
    pub lse: Tensor,
    /// State for backward.
    pub kept: Kept,
}

/// State of [`linear_cross_entropy`] for backward.
#[derive(Debug)]
pub enum Kept {
    /// No gradient is wanted.
    Nothing,
    /// For [`linear_cross_entropy_backward`].
    Logits(SavedLogits),
    /// The gradients, but for their scale.
    Gradients(Box<FormedGradients>),
}

/// The logits of all tokens, and the vocabulary shard.
#[derive(Debug)]
pub struct SavedLogits {
    logits: Tensor,
    shard: VocabShard,
}

impl SavedLogits {
    /// The logits (N, V).
    pub fn logits(&self) -> &Tensor {
        &self.logits
    }
}

/// A callback that consumes the gradient of an operand.
pub type GradSink<'a> = &'a mut dyn FnMut(Tensor) -> Result<()>;

/// The gradients that [`linear_cross_entropy_backward`] computes.
pub struct Gradients<'a> {
    /// Factor of the summed loss: loss scale / number of valid tokens of the global batch. One element, in the dtype
    /// of the loss.
    pub scale: &'a Tensor,
    /// Consumes dx, if needed. It is called as soon as dx is complete, before the product of dW, so that the reduction over
    /// the shards can overlap.
    pub input: Option<GradSink<'a>>,
    /// Destination of dW: a unique (V, C) in the dtype of the weight or, for 16-bit weights, in f32.
    pub weight: Option<(&'a mut Tensor, Accum)>,
    /// Consumes db (V), if needed, in the dtype of x.
    pub bias: Option<GradSink<'a>>,
}

/// Cross-entropy of the logits x W^T + b, summed over the valid tokens. x is (.., C), W of the head (V, C), b, if any,
/// (V), and targets (..). The logits of a chunk take at most `max_logits_bytes`, or the bytes of one token if that is more.
/// `wanted` says which gradients backward will ask for.
///
/// ```
/// use ferrotron_tensor::{Device, Tensor};
/// use ferrotron_tensor::ops::cross_entropy::CrossEntropyConfig;
/// use ferrotron_tensor::ops::linear_cross_entropy::{Kept, WantedGradients, linear_cross_entropy};
/// let device = Device::cpu(1)?;
/// let x = Tensor::from_slice(&device, &[1.0_f32, 0.0, 0.0, 1.0], &[2, 2])?;
/// let weight = Tensor::from_slice(&device, &[0.0_f32; 6], &[3, 2])?;
/// let targets = Tensor::from_slice(&device, &[2_i64, 0], &[2])?;
/// let config = CrossEntropyConfig::default();
/// let wanted = WantedGradients::default();
/// let found = linear_cross_entropy(&x, &weight, &targets, &config, 12, wanted)?;
/// assert!((found.loss.item()? - 2.0 * 3.0_f64.ln()).abs() < 1e-6);
/// assert!(matches!(found.kept, Kept::Nothing));
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub fn linear_cross_entropy<'a>(
    x: &Tensor,
    head: impl Into<HeadWeights<'a>>,
    targets: &Tensor,
    config: &CrossEntropyConfig,
    max_logits_bytes: usize,
    wanted: WantedGradients,
) -> Result<LinearCrossEntropy> {
    forward(x, head.into(), targets, config, (max_logits_bytes, wanted), None)
}

/// [`linear_cross_entropy`] of a sharded vocabulary, where W (V, C) and b (V) hold the shard's rows. Targets are classes of
/// the whole vocabulary.
///
/// Each shard must have the same x, targets, configuration and limit. It makes the same reductions: per chunk a
/// maximum of one number per token and a sum of two, or three with label smoothing. The limit applies to the logits
/// of the largest shard.
pub fn linear_cross_entropy_shard<'a>(
    x: &Tensor,
    head: impl Into<HeadWeights<'a>>,
    targets: &Tensor,
    config: &CrossEntropyConfig,
    max_logits_bytes: usize,
    wanted: WantedGradients,
    shard: (VocabShard, &dyn VocabAllReduce),
) -> Result<LinearCrossEntropy> {
    forward(x, head.into(), targets, config, (max_logits_bytes, wanted), Some(shard))
}

fn forward(
    x: &Tensor,
    head: HeadWeights,
    targets: &Tensor,
    config: &CrossEntropyConfig,
    (max_logits_bytes, wanted): (usize, WantedGradients),
    shard: Option<(VocabShard, &dyn VocabAllReduce)>,
) -> Result<LinearCrossEntropy> {
    const OP: &str = "linear_cross_entropy";
    let (shard, join) = shard.unzip();
    let problem = Problem::new(OP, x, head, targets, shard, config)?;
    let (tokens, fit) = (problem.tokens, max_logits_bytes / problem.token_bytes());
    let keeps = wanted.any() && fit >= tokens;
    // Chunks of about equal size.
    let chunks = tokens.div_ceil(fit.max(1)).max(1);
    let chunk = tokens.div_ceil(chunks).max(1);
    let mut kept = match wanted.any() && !keeps {
        true => Kept::Gradients(Box::new(FormedGradients::new(&problem, x.dims(), wanted)?)),
        false => Kept::Nothing,
    };
    let mut found = RowLosses::new(x, tokens)?;
    for first in (0..tokens).step_by(chunk) {
        let logits = problem.logits(first, chunk.min(tokens - first))?;
        problem.targets.forward(&logits, first, join, &mut found)?;
        match &mut kept {
            Kept::Gradients(sums) => sums.add(&problem, logits, first, &found.lse)?,
            kept if keeps => *kept = Kept::Logits(SavedLogits { logits, shard: problem.shard }),
            _ => {}
        }
    }
    if keeps && tokens == 0 {
        let logits = problem.logits(0, 0)?;
        kept = Kept::Logits(SavedLogits { logits, shard: problem.shard });
    }
    let (loss, lse) = (found.total()?, found.lse.reshape(targets.dims())?);
    Ok(LinearCrossEntropy { loss, lse, kept })
}

/// Computes dx and db of `wanted.scale` x [`linear_cross_entropy`], if needed, and writes or adds dW to its destination.
/// The saved logits are overwritten; `lse` is the result of the forward pass.
///
/// For [`linear_cross_entropy_shard`], dx is this shard's term of the sum over the shards.
pub fn linear_cross_entropy_backward<'a>(
    kept: SavedLogits,
    x: &Tensor,
    head: impl Into<HeadWeights<'a>>,
    targets: &Tensor,
    lse: &Tensor,
    config: &CrossEntropyConfig,
    wanted: Gradients<'_>,
) -> Result<()> {
    const OP: &str = "linear_cross_entropy_backward";
    let SavedLogits { logits, shard } = kept;
    let problem = Problem::new(OP, x, head.into(), targets, Some(shard), config)?;
    if lse.dims() != targets.dims() || logits.dims() != [problem.tokens, problem.classes] {
        let message = format!("lse {:?} or the kept logits are of another call", lse.dims());
        return Err(Error::shape(OP, message));
    }
    let Gradients { scale, input, weight, bias } = wanted;
    let dlogits = problem.backward(logits, 0, &lse.contiguous()?, scale)?;
    if let Some(take) = input {
        take(matmul(&dlogits, &problem.weight)?.reshape(x.dims())?)?;
    }
    if let Some((dweight, accum)) = weight {
        matmul_into(dweight, accum, &dlogits.transpose(0, 1)?, &problem.x)?;
    }
    match bias {
        Some(take) => take(linear_bias_gradient(&dlogits)?.cast(x.dtype())?),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
