//! The linear head fused with its cross-entropy, over chunks of tokens, so that logits stay within a memory limit.
//!
//! logits = x W^T, plus b if the head has a bias, soft-capped if it has a cap, then
//! [`cross_entropy`](super::cross_entropy). Gradient, chunk by chunk with d that of x W^T + b: dx = d W, dW += d^T x, and
//! db is the sum of d over the tokens. It needs x, W, b, the targets and lse. If all logits fit the limit they are saved,
//! and d overwrites them unless they are capped; otherwise each chunk's logits are recomputed.
//!
//! W and b may hold one shard of the vocabulary. Then lse is reduced over the shards chunk by chunk. dx is this shard's
//! term of the sum over the shards, and dW and db are the gradients of its own rows.
//!
//! Products and exponentials accumulate in `Element::Acc`, the loss in f64 in the order of the tokens. Loss, lse and
//! dx do not depend on the limit, bitwise; dW is summed in the order of the chunks.

use super::cross_entropy::{CrossEntropyConfig, RowLosses, Targets, VocabAllReduce, VocabShard};
use super::linear::{linear, linear_bias_gradient};
use super::matmul::{Accum, matmul_into};
use super::pointwise::{add_assign, softcap_in_place, unary_backward};
use super::table::Unary;
use crate::core::tensor::{check_device, check_pair};
use crate::{Category, Error, Result, Tensor};

/// The loss, and the values that its gradient needs.
#[derive(Debug)]
pub struct LinearCrossEntropy {
    /// Sum over the valid tokens of all shards, without dims, in the accumulator dtype.
    pub loss: Tensor,
    /// ln sum_j e^(logit_j) of every token over all shards, with the dims of the targets, in the accumulator dtype.
    pub lse: Tensor,
    /// Saved state for [`linear_cross_entropy_backward`].
    pub kept: SavedLogits,
}

/// State saved for backward: the logits of all tokens, if they fit the limit, the chunk size and the vocabulary
/// shard.
#[derive(Debug)]
pub struct SavedLogits {
    logits: Option<Tensor>,
    chunk: usize,
    shard: VocabShard,
}

impl SavedLogits {
    /// The logits (N, V), if they were saved.
    pub fn logits(&self) -> Option<&Tensor> {
        self.logits.as_ref()
    }

    /// Number of tokens per chunk if the logits were not saved.
    pub fn tokens_per_chunk(&self) -> usize {
        self.chunk
    }
}

/// The parameters of a head. A weight alone converts into a head without a bias and soft cap.
#[derive(Debug, Clone, Copy)]
pub struct HeadWeights<'a> {
    /// W, (V, C).
    pub weight: &'a Tensor,
    /// b, (V).
    pub bias: Option<&'a Tensor>,
    /// Soft cap of the logits, c tanh(logit / c): Gemma 2, arXiv 2408.00118.
    pub softcap: Option<f64>,
}

impl<'a> From<&'a Tensor> for HeadWeights<'a> {
    fn from(weight: &'a Tensor) -> HeadWeights<'a> {
        HeadWeights { weight, bias: None, softcap: None }
    }
}

/// A callback that consumes the gradient of an operand.
pub type GradSink<'a> = &'a mut dyn FnMut(Tensor) -> Result<()>;

/// The gradients that [`linear_cross_entropy_backward`] computes.
pub struct Gradients<'a> {
    /// Factor of the summed loss: loss scale / number of valid tokens of the global batch. One element, in the dtype
    /// of the loss.
    pub scale: &'a Tensor,
    /// Consumes dx, if needed. It is called as soon as dx is complete, before the last product of dW, so that the
    /// reduction over the shards can overlap.
    pub input: Option<GradSink<'a>>,
    /// Destination of dW: a unique (V, C) in the dtype of the weight or, for 16-bit weights, in f32.
    pub weight: Option<(&'a mut Tensor, Accum)>,
    /// Consumes db (V), if needed, in the dtype of x.
    pub bias: Option<GradSink<'a>>,
}

/// Checked operands, with x as a matrix (N, C).
struct Problem {
    x: Tensor,
    weight: Tensor,
    bias: Option<Tensor>,
    softcap: Option<f64>,
    targets: Targets,
    tokens: usize,
    classes: usize,
    shard: VocabShard,
}

impl Problem {
    fn new(
        op: &'static str,
        x: &Tensor,
        HeadWeights { weight, bias, softcap }: HeadWeights,
        targets: &Tensor,
        shard: Option<VocabShard>,
        config: &CrossEntropyConfig,
    ) -> Result<Problem> {
        check_pair(op, x, weight)?;
        check_device(op, x, targets)?;
        if let Some(bias) = bias {
            check_pair(op, x, bias)?;
            if bias.dims() != &weight.dims()[..1] {
                let message =
                    format!("needs a bias (V), got {:?} for W {:?}", bias.dims(), weight.dims());
                return Err(Error::shape(op, message));
            }
        }
        if let Some(cap) = softcap.filter(|&cap| !(cap > 0.0 && cap.is_finite())) {
            return Err(Error::value(op, format!("softcap must be positive, got {cap}")));
        }
        let fits = match (x.dims(), weight.dims()) {
            ([rows @ .., width], [_, c]) => rows == targets.dims() && width == c,
            _ => false,
        };
        if !fits {
            return Err(Error::shape(
                op,
                format!(
                    "needs x (.., C), W (V, C) and targets (..), got {:?}, {:?} and {:?}",
                    x.dims(),
                    weight.dims(),
                    targets.dims()
                ),
            ));
        }
        let classes = weight.dims()[0];
        let shard = shard.unwrap_or_else(|| VocabShard::unsharded(classes));
        Ok(Problem {
            x: x.as_matrix()?,
            weight: weight.clone(),
            bias: bias.cloned(),
            softcap,
            targets: Targets::new(op, targets, classes, shard, config)?,
            tokens: targets.numel(),
            classes,
            shard,
        })
    }

    /// First token and number of tokens of each chunk.
    fn chunks(&self, chunk: usize) -> impl Iterator<Item = (usize, usize)> + use<> {
        let tokens = self.tokens;
        (0..tokens).step_by(chunk).map(move |first| (first, chunk.min(tokens - first)))
    }

    fn logits(&self, first: usize, len: usize) -> Result<Tensor> {
        let x = self.x.narrow(0, first, len)?;
        let logits = linear(&x, &self.weight, self.bias.as_ref())?;
        logits.set_category(Category::Logits);
        match self.softcap {
            Some(cap) => softcap_in_place(cap, logits),
            None => Ok(logits),
        }
    }

    /// The gradient of the product x W^T + b from its `logits`, which it may overwrite.
    fn backward(
        &self,
        logits: Tensor,
        first: usize,
        lse: &Tensor,
        scale: &Tensor,
    ) -> Result<Tensor> {
        let Some(cap) = self.softcap else {
            return self.targets.backward(logits, first, lse, scale);
        };
        let dlogits = self.targets.backward(logits.clone(), first, lse, scale)?;
        dlogits.set_category(Category::Logits);
        unary_backward(Unary::Softcap, cap, dlogits, Some(&logits))
    }

    /// Tokens whose logits take at most so many bytes. Backward with a soft cap has the logits and their gradient at
    /// once.
    fn tokens_within(&self, bytes: usize) -> usize {
        let tensors = 1 + usize::from(self.softcap.is_some());
        bytes / (tensors * self.shard.largest() * self.x.dtype().size()).max(1)
    }
}

/// Cross-entropy of the logits x W^T + b, summed over the valid tokens. x is (.., C), W of the head (V, C), b, if any,
/// (V), and targets (..). Logits take at most `max_logits_bytes`, or the bytes of one token if that is more.
///
/// ```
/// use ferrotron_tensor::{Device, Tensor};
/// use ferrotron_tensor::ops::cross_entropy::CrossEntropyConfig;
/// use ferrotron_tensor::ops::linear_cross_entropy::linear_cross_entropy;
/// let device = Device::cpu(1)?;
/// let x = Tensor::from_slice(&device, &[1.0_f32, 0.0, 0.0, 1.0], &[2, 2])?;
/// let weight = Tensor::from_slice(&device, &[0.0_f32; 6], &[3, 2])?;
/// let targets = Tensor::from_slice(&device, &[2_i64, 0], &[2])?;
/// let config = CrossEntropyConfig::default();
/// let found = linear_cross_entropy(&x, &weight, &targets, &config, 12)?;
/// assert!((found.loss.item()? - 2.0 * 3.0_f64.ln()).abs() < 1e-6);
/// assert!(found.kept.logits().is_none()); // 24 bytes do not fit
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub fn linear_cross_entropy<'a>(
    x: &Tensor,
    head: impl Into<HeadWeights<'a>>,
    targets: &Tensor,
    config: &CrossEntropyConfig,
    max_logits_bytes: usize,
) -> Result<LinearCrossEntropy> {
    forward(x, head.into(), targets, config, max_logits_bytes, None)
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
    shard: (VocabShard, &dyn VocabAllReduce),
) -> Result<LinearCrossEntropy> {
    forward(x, head.into(), targets, config, max_logits_bytes, Some(shard))
}

fn forward(
    x: &Tensor,
    head: HeadWeights,
    targets: &Tensor,
    config: &CrossEntropyConfig,
    max_logits_bytes: usize,
    shard: Option<(VocabShard, &dyn VocabAllReduce)>,
) -> Result<LinearCrossEntropy> {
    const OP: &str = "linear_cross_entropy";
    let (shard, join) = shard.unzip();
    let problem = Problem::new(OP, x, head, targets, shard, config)?;
    // Chunks of about equal size.
    let fit = problem.tokens_within(max_logits_bytes);
    let chunks = problem.tokens.div_ceil(fit.max(1)).max(1);
    let chunk = problem.tokens.div_ceil(chunks).max(1);
    let mut kept = None;
    let mut found = RowLosses::new(x, problem.tokens)?;
    for (first, len) in problem.chunks(chunk) {
        let logits = problem.logits(first, len)?;
        problem.targets.forward(&logits, first, join, &mut found)?;
        kept = (fit >= problem.tokens).then_some(logits);
    }
    let kept = SavedLogits { logits: kept, chunk, shard: problem.shard };
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
    let SavedLogits { mut logits, chunk, shard } = kept;
    let problem = Problem::new(OP, x, head.into(), targets, Some(shard), config)?;
    let stale =
        logits.as_ref().is_some_and(|logits| logits.dims() != [problem.tokens, problem.classes]);
    if lse.dims() != targets.dims() || stale {
        let message = format!("lse {:?} or the kept logits are of another call", lse.dims());
        return Err(Error::shape(OP, message));
    }
    let Gradients { scale, mut input, weight: mut dweight, bias } = wanted;
    let mut dbias: Option<Tensor> = None;
    let mut dx = match input {
        None => None,
        Some(_) => Some(Tensor::empty(x.device(), x.dtype(), problem.x.dims())?),
    };
    let mut hand_over = |dx: &mut Option<Tensor>| match (dx.take(), &mut input) {
        (Some(dx), Some(take)) => take(dx.reshape(x.dims())?),
        _ => Ok(()),
    };
    if problem.tokens == 0 {
        hand_over(&mut dx)?;
        if let Some((dweight, Accum::Replace)) = &mut dweight {
            dweight.zero_fill()?;
        }
    }
    let lse = lse.contiguous()?;
    for (first, len) in problem.chunks(chunk) {
        let logits = match logits.take() {
            Some(logits) => logits,
            None => problem.logits(first, len)?,
        };
        let dlogits = problem.backward(logits, first, &lse, scale)?;
        if let Some(dx) = &mut dx {
            dx.narrow_mut(0, first, len, |dx| {
                matmul_into(dx, Accum::Replace, &dlogits, &problem.weight)
            })?;
        }
        if first + len == problem.tokens {
            hand_over(&mut dx)?;
        }
        if let Some((dweight, accum)) = &mut dweight {
            let x = problem.x.narrow(0, first, len)?;
            matmul_into(dweight, *accum, &dlogits.transpose(0, 1)?, &x)?;
            *accum = Accum::Add;
        }
        if bias.is_some() {
            let part = linear_bias_gradient(&dlogits)?.cast(x.dtype().accumulator())?;
            match &mut dbias {
                Some(sum) => add_assign(sum, &part)?,
                None => dbias = Some(part),
            }
        }
    }
    match (bias, dbias) {
        (Some(take), Some(sum)) => take(sum.cast(x.dtype())?),
        (Some(take), None) => take(Tensor::zeros(x.device(), x.dtype(), &[problem.classes])?),
        (None, _) => Ok(()),
    }
}

#[cfg(test)]
mod tests;
