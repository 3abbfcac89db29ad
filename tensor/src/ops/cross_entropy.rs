//! Cross-entropy of logits against target classes, summed over the valid tokens.
//!
//! With p = softmax(x), V classes and label smoothing e (as PyTorch):
//! loss = sum over valid rows of (1 - e) (-ln p_t) + e/V sum_j (-ln p_j)
//!      = sum over valid rows of lse - (1 - e) x_t - e/V sum_j x_j, lse = ln sum_j e^(x_j).
//! Gradient: dx_j = scale (e^(x_j - lse) - e/V - (1 - e) \[j = t\]), 0 in ignored rows. It needs lse and the logits,
//! which it may overwrite.
//!
//! Accumulates in `Element::Acc` in 32 lanes within blocks of 1024 classes, which are combined in f64; rows are
//! summed in f64 in order. The loss is not divided by the number of tokens: the caller's `scale` does that.
//!
//! The classes may be sharded. The shards then reduce max_j x_j in `Element::Acc`, and with it sum_j e^(x_j - max), x_t
//! (0 if t is in another shard) and, with label smoothing, sum_j x_j. These are 3 or 4 numbers per row. The gradient
//! needs no communication, since lse covers all classes.

pub(crate) mod config;
mod rows;
pub(crate) mod shard;
mod targets;

pub use config::CrossEntropyConfig;
pub use shard::{VocabAllReduce, VocabShard};
pub(crate) use targets::{RowLosses, Targets};

use crate::core::tensor::check_device;
use crate::{Error, Index, Result, Tensor, dispatch_index};

/// The loss, and the value that its gradient needs.
#[derive(Debug, Clone)]
pub struct CrossEntropy {
    /// Sum over the valid tokens, without dims, in the accumulator dtype.
    pub loss: Tensor,
    /// ln sum_j e^(x_j) of every row, with the dims of the targets, in the accumulator dtype.
    pub lse: Tensor,
    /// The loss of every row, 0 if it is not valid, with the dims of the targets, in f64.
    pub losses: Tensor,
}

/// Number of valid tokens.
///
/// Reads the targets, so it synchronizes with a GPU.
///
/// ```
/// use ferrotron_tensor::ops::cross_entropy::{CrossEntropyConfig, num_valid_tokens};
/// use ferrotron_tensor::{Device, Tensor};
/// let targets = Tensor::from_slice(&Device::cpu(1)?, &[3_i64, -100, 0], &[3])?;
/// assert_eq!(num_valid_tokens(&targets, &CrossEntropyConfig::default())?, 2);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub fn num_valid_tokens(targets: &Tensor, config: &CrossEntropyConfig) -> Result<usize> {
    let ignored = usize::try_from(config.ignore_index).ok();
    dispatch_index!("cross_entropy", targets.dtype(), I => {
        let counts = |target: &&I| target.index().is_some_and(|class| Some(class) != ignored);
        Ok(targets.to_vec::<I>()?.iter().filter(counts).count())
    })
}

/// Cross-entropy of `logits` (.., V) against `targets` (..), summed over the valid tokens.
///
/// ```
/// use ferrotron_tensor::{Device, Tensor};
/// use ferrotron_tensor::ops::cross_entropy::{CrossEntropyConfig, cross_entropy};
/// let device = Device::cpu(1)?;
/// let logits = Tensor::from_slice(&device, &[0.0_f64; 8], &[2, 4])?;
/// let targets = Tensor::from_slice(&device, &[3_i64, -100], &[2])?;
/// let found = cross_entropy(&logits, &targets, &CrossEntropyConfig::default())?;
/// assert!((found.loss.item()? - 4.0_f64.ln()).abs() < 1e-15);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub fn cross_entropy(
    logits: &Tensor,
    targets: &Tensor,
    config: &CrossEntropyConfig,
) -> Result<CrossEntropy> {
    forward(logits, targets, config, None)
}

/// [`cross_entropy`] of a sharded vocabulary, from this shard's `logits` (.., classes of the shard). Targets are
/// classes of the whole vocabulary. Loss and lse cover all shards and are equal on each.
///
/// ```
/// use ferrotron_tensor::ops::cross_entropy::{
///     CrossEntropyConfig, VocabAllReduce, VocabShard, cross_entropy_shard,
/// };
/// use ferrotron_tensor::{Device, Result, Tensor};
/// /// One process that holds the only shard.
/// struct Alone;
/// impl VocabAllReduce for Alone {
///     fn max(&self, per_token: Tensor) -> Result<Tensor> {
///         Ok(per_token)
///     }
///     fn sum(&self, per_token: Tensor) -> Result<Tensor> {
///         Ok(per_token)
///     }
/// }
/// let device = Device::cpu(1)?;
/// let logits = Tensor::from_slice(&device, &[0.0_f64; 4], &[1, 4])?;
/// let targets = Tensor::from_slice(&device, &[3_i64], &[1])?;
/// let shard = VocabShard { offset: 0, global: 4, shards: 1 };
/// let config = CrossEntropyConfig::default();
/// let found = cross_entropy_shard(&logits, &targets, &config, (shard, &Alone))?;
/// assert!((found.loss.item()? - 4.0_f64.ln()).abs() < 1e-15);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub fn cross_entropy_shard(
    logits: &Tensor,
    targets: &Tensor,
    config: &CrossEntropyConfig,
    shard: (VocabShard, &dyn VocabAllReduce),
) -> Result<CrossEntropy> {
    forward(logits, targets, config, Some(shard))
}

fn forward(
    logits: &Tensor,
    targets: &Tensor,
    config: &CrossEntropyConfig,
    shard: Option<(VocabShard, &dyn VocabAllReduce)>,
) -> Result<CrossEntropy> {
    const OP: &str = "cross_entropy";
    let classes = check(OP, logits, targets)?;
    let (shard, join) = shard.unzip();
    let shard = shard.unwrap_or_else(|| VocabShard::unsharded(classes));
    let rows = Targets::new(OP, targets, classes, shard, config)?;
    let logits = logits.contiguous()?.as_matrix()?;
    let mut found = RowLosses::new(&logits, targets.numel())?;
    rows.forward(&logits, 0, join, &mut found)?;
    let loss = found.total()?;
    let [lse, losses] = [found.lse, found.losses].map(|rows| rows.reshape(targets.dims()));
    Ok(CrossEntropy { loss, lse: lse?, losses: losses? })
}

/// The gradient of `scale` x [`cross_entropy`] with respect to the logits, which are overwritten if they have no
/// other holder. `lse` is the result of the forward pass; `scale` has one element and the dtype of `lse`.
pub fn cross_entropy_backward(
    logits: Tensor,
    targets: &Tensor,
    lse: &Tensor,
    config: &CrossEntropyConfig,
    scale: &Tensor,
) -> Result<Tensor> {
    backward(logits, targets, lse, config, scale, None)
}

/// Like [`cross_entropy_backward`], for [`cross_entropy_shard`]: the gradient of this shard's logits.
pub fn cross_entropy_shard_backward(
    logits: Tensor,
    targets: &Tensor,
    lse: &Tensor,
    config: &CrossEntropyConfig,
    scale: &Tensor,
    shard: VocabShard,
) -> Result<Tensor> {
    backward(logits, targets, lse, config, scale, Some(shard))
}

fn backward(
    logits: Tensor,
    targets: &Tensor,
    lse: &Tensor,
    config: &CrossEntropyConfig,
    scale: &Tensor,
    shard: Option<VocabShard>,
) -> Result<Tensor> {
    const OP: &str = "cross_entropy_backward";
    let classes = check(OP, &logits, targets)?;
    if lse.dims() != targets.dims() {
        let message = format!("lse is {:?}, targets {:?}", lse.dims(), targets.dims());
        return Err(Error::shape(OP, message));
    }
    let shard = shard.unwrap_or_else(|| VocabShard::unsharded(classes));
    let rows = Targets::new(OP, targets, classes, shard, config)?;
    let dims = logits.dims().to_vec();
    let matrix = logits.as_matrix()?;
    drop(logits); // so that it can be overwritten
    rows.backward(matrix, 0, lse, scale)?.reshape(&dims)
}

/// The number of classes. Errors if the shapes do not match.
fn check(op: &'static str, logits: &Tensor, targets: &Tensor) -> Result<usize> {
    check_device(op, logits, targets)?;
    match logits.dims().split_last() {
        Some((&classes, rows)) if rows == targets.dims() => Ok(classes),
        _ => Err(Error::shape(
            op,
            format!("logits are {:?}, targets {:?}", logits.dims(), targets.dims()),
        )),
    }
}

#[cfg(test)]
mod tests;
