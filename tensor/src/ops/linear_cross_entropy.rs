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

pub use formed::FormedGradients;

use super::cross_entropy::{CrossEntropyConfig, RowLosses, Targets, VocabAllReduce, VocabShard};
use super::matmul::{Accum, linear, linear_bias_gradient, matmul, matmul_into};
use super::pointwise::{softcap_in_place, unary_backward};
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

/// The operands of a loss that need a gradient.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WantedGradients {
    /// x
    pub input: bool,
    /// W
    pub weight: bool,
    /// b
    pub bias: bool,
}

impl WantedGradients {
    fn any(self) -> bool {
        self.input || self.weight || self.bias
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
    /// Consumes dx, if needed. It is called as soon as dx is complete, before the product of dW, so that the reduction over
    /// the shards can overlap.
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

    /// Bytes of the logits of a token on the largest shard. Backward with a soft cap has the logits and their gradient at
    /// once.
    fn token_bytes(&self) -> usize {
        let tensors = 1 + usize::from(self.softcap.is_some());
        (tensors * self.shard.largest() * self.x.dtype().size()).max(1)
    }
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
