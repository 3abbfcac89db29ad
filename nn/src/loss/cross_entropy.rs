//! Cross-entropy with a loss and a weight for each token, and z-loss.
//!
//! With classes V, lse = ln sum_j e^(x_j) and label smoothing e, a valid token has the loss
//! lse - (1 - e) x_t - e/V sum_j x_j + z lse^2, and another has 0. The z-loss, z lse^2, keeps the logits from drifting:
//! Chowdhery et al., "PaLM", arXiv 2204.02311, section 5, with z = 1e-4.
//!
//! With cotangents g of the losses and h of the lse, the gradient of logit j is g times that of the cross-entropy plus h
//! e^(x_j - lse). A vocabulary that is sharded over ranks exchanges three or four numbers per token, as
//! `VocabAllReduce` describes, and nothing in backward.

use ferrotron_autograd::{Backward, Cotangents, InputGrads, Saved, Var};
use ferrotron_tensor::ops::cross_entropy::{
    CrossEntropy, CrossEntropyConfig, VocabAllReduce, VocabShard, cross_entropy,
    cross_entropy_shard, cross_entropy_shard_backward,
};
use ferrotron_tensor::ops::pointwise::{Comparison, compare};
use ferrotron_tensor::{DType, Error, Result, Tensor};

use super::Reduction;

/// Cross-entropy of logits against target classes: `torch.nn.CrossEntropyLoss`, with weights per token and z-loss.
///
/// ```
/// use ferrotron_autograd::Var;
/// use ferrotron_nn::loss::{CrossEntropyLoss, Reduction};
/// use ferrotron_tensor::{DType, Device, Tensor};
/// let device = Device::cpu(1)?;
/// let logits = Var::constant(Tensor::zeros(&device, DType::F64, &[3, 4])?);
/// let targets = Tensor::from_slice(&device, &[3_i64, -100, 0], &[3])?;
/// let loss = CrossEntropyLoss { reduction: Reduction::None, ..CrossEntropyLoss::default() };
/// let nat = 4.0_f64.ln();
/// assert_eq!(loss.forward(&logits, &targets, None)?.value().to_f64()?, [nat, 0.0, nat]);
///
/// let weights = Tensor::from_slice(&device, &[1.0, 1.0, 0.5], &[3])?;
/// let loss = CrossEntropyLoss { reduction: Reduction::Sum, z_loss: 1e-4, ..loss };
/// let sum = loss.forward(&logits, &targets, Some(&weights))?.value().item()?;
/// assert!((sum - 1.5 * (nat + 1e-4 * nat * nat)).abs() < 1e-15);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CrossEntropyLoss {
    /// Tokens with this target have no loss; neither have tokens with negative targets.
    pub ignore_index: i64,
    /// Probability in \[0, 1\] that is distributed over all classes.
    pub label_smoothing: f64,
    /// Factor of lse^2, at least 0.
    pub z_loss: f64,
    /// The reduction over tokens. [`Reduction::Mean`] divides by the sum of the weights of the valid tokens, as PyTorch;
    /// without any it is NaN.
    pub reduction: Reduction,
}

impl Default for CrossEntropyLoss {
    /// PyTorch's defaults: -100, no smoothing, the mean; and no z-loss.
    fn default() -> CrossEntropyLoss {
        CrossEntropyLoss {
            ignore_index: -100,
            label_smoothing: 0.0,
            z_loss: 0.0,
            reduction: Reduction::Mean,
        }
    }
}

impl CrossEntropyLoss {
    /// The loss of `logits` (.., V) for `targets` (..), with `weights` (..) of the tokens. The result is (..) or a
    /// scalar, in the accumulator dtype of the logits.
    ///
    /// Errors if shapes differ, a target is not below V, or an option is out of range.
    pub fn forward(&self, logits: &Var, targets: &Tensor, weights: Option<&Tensor>) -> Result<Var> {
        let found = cross_entropy(logits.value(), targets, &self.config()?)?;
        let shard = VocabShard::unsharded(logits.value().dim(-1)?);
        self.finish(logits, targets, weights, found, shard)
    }

    /// [`CrossEntropyLoss::forward`] of a vocabulary that is sharded over ranks, from the `logits` (.., classes of the
    /// shard). `exchange` reduces over the shards. Targets are classes of the whole vocabulary. The result is equal on each
    /// shard, and its cotangent must be too.
    pub fn forward_shard(
        &self,
        logits: &Var,
        targets: &Tensor,
        weights: Option<&Tensor>,
        (shard, exchange): (VocabShard, &dyn VocabAllReduce),
    ) -> Result<Var> {
        let config = self.config()?;
        let found = cross_entropy_shard(logits.value(), targets, &config, (shard, exchange))?;
        self.finish(logits, targets, weights, found, shard)
    }

    fn config(&self) -> Result<CrossEntropyConfig> {
        if !(self.z_loss >= 0.0 && self.z_loss.is_finite()) {
            let message = format!("the factor of the z-loss is at least 0, got {}", self.z_loss);
            return Err(Error::value("cross_entropy", message));
        }
        let CrossEntropyLoss { ignore_index, label_smoothing, .. } = *self;
        Ok(CrossEntropyConfig { ignore_index, label_smoothing })
    }

    fn finish(
        &self,
        logits: &Var,
        targets: &Tensor,
        weights: Option<&Tensor>,
        found: CrossEntropy,
        shard: VocabShard,
    ) -> Result<Var> {
        let dtype = found.lse.dtype();
        let CrossEntropy { lse, losses, .. } = found;
        let backward = || TokenLossesBackward {
            logits: logits.save(),
            targets: targets.clone(),
            lse: Saved::statistic(&lse),
            config: CrossEntropyConfig {
                ignore_index: self.ignore_index,
                label_smoothing: self.label_smoothing,
            },
            shard,
        };
        let found = Var::record_many(&[logits], vec![losses.cast(dtype)?, lse.clone()], backward)?;
        let [mut losses, lse] = <[Var; 2]>::try_from(found).expect("two values make two variables");
        let mut valid = self.valid(targets, dtype)?;
        if self.z_loss > 0.0 {
            let z = lse.square()?.mul_scalar(self.z_loss)?;
            losses = losses.add(&z.mul(&Var::constant(valid.clone()))?)?;
        }
        if let Some(weights) = weights {
            if weights.dims() != targets.dims() {
                let (weights, targets) = (weights.dims(), targets.dims());
                let message = format!("weights are {weights:?}, targets {targets:?}");
                return Err(Error::shape("cross_entropy", message));
            }
            let weights = weights.cast(dtype)?;
            losses = losses.mul(&Var::constant(weights.clone()))?;
            valid = valid.mul(&weights)?;
        }
        match self.reduction {
            Reduction::Mean => losses.sum_all()?.div(&Var::constant(valid).sum_all()?),
            reduction => reduction.apply(losses),
        }
    }

    /// 1 for the valid tokens, else 0.
    fn valid(&self, targets: &Tensor, dtype: DType) -> Result<Tensor> {
        let targets = targets.cast(DType::I64)?;
        let number = |value: i64| Tensor::constant(targets.device(), &[value], &[]);
        let not_ignored = compare(Comparison::Ne, &targets, &number(self.ignore_index)?)?;
        let not_negative = compare(Comparison::Ge, &targets, &number(0)?)?;
        not_ignored.cast(dtype)?.mul(&not_negative.cast(dtype)?)
    }
}

struct TokenLossesBackward {
    logits: Saved,
    targets: Tensor,
    lse: Saved,
    config: CrossEntropyConfig,
    shard: VocabShard,
}

impl Backward for TokenLossesBackward {
    fn name(&self) -> &'static str {
        "cross_entropy"
    }

    fn saved(&self) -> Vec<Tensor> {
        let held = [self.logits.resident_tensor(), self.lse.resident_tensor()];
        held.into_iter().flatten().chain([self.targets.clone()]).collect()
    }

    fn backward(self: Box<Self>, dy: Cotangents, dx: &mut InputGrads) -> Result<()> {
        let TokenLossesBackward { logits, targets, lse, config, shard } = *self;
        let lse = lse.value()?;
        // In the accumulator dtype, so that a gradient is rounded once.
        let logits = logits.value()?.cast(lse.dtype())?; // (.., V)
        let by_token: Vec<usize> = lse.dims().iter().copied().chain([1]).collect();
        let mut cotangents = dy.into_vec().into_iter();
        let [of_losses, of_lse] = [cotangents.next().flatten(), cotangents.next().flatten()];
        let of_lse = match of_lse {
            None => None,
            Some(h) => {
                let probabilities = logits.sub(&lse.reshape(&by_token)?)?.exp()?;
                Some(probabilities.mul(&h.reshape(&by_token)?)?)
            }
        };
        let of_losses = match of_losses {
            None => None,
            Some(g) => {
                let one = Tensor::full(lse.device(), lse.dtype(), &[], 1.0)?;
                let slope =
                    cross_entropy_shard_backward(logits, &targets, &lse, &config, &one, shard)?;
                Some(slope.mul(&g.reshape(&by_token)?)?)
            }
        };
        match (of_losses, of_lse) {
            (Some(a), Some(b)) => dx.accumulate(0, a.add(&b)?),
            (Some(one), None) | (None, Some(one)) => dx.accumulate(0, one),
            (None, None) => Ok(()),
        }
    }
}
