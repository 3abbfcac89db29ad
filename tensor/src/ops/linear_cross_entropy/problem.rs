//! The checked operands of the head's loss: the logits of some tokens, and their gradient.

use crate::core::tensor::{check_device, check_pair};
use crate::ops::cross_entropy::{CrossEntropyConfig, Targets, VocabShard};
use crate::ops::linear::linear;
use crate::ops::pointwise::{softcap_in_place, unary_backward};
use crate::ops::table::Unary;
use crate::{Category, Error, Result, Tensor};

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

/// Checked operands, with x as a matrix (N, C).
pub(super) struct Problem {
    pub x: Tensor,
    pub weight: Tensor,
    pub bias: Option<Tensor>,
    pub softcap: Option<f64>,
    pub targets: Targets,
    pub tokens: usize,
    pub classes: usize,
    pub shard: VocabShard,
}

impl Problem {
    pub fn new(
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

    pub fn logits(&self, first: usize, len: usize) -> Result<Tensor> {
        let x = self.x.narrow(0, first, len)?;
        let logits = linear(&x, &self.weight, self.bias.as_ref())?;
        logits.set_category(Category::Logits);
        match self.softcap {
            Some(cap) => softcap_in_place(cap, logits),
            None => Ok(logits),
        }
    }

    /// The gradient of the product x W^T + b from its `logits`, which it may overwrite.
    pub fn backward(
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
    pub fn token_bytes(&self) -> usize {
        let tensors = 1 + usize::from(self.softcap.is_some());
        (tensors * self.shard.largest() * self.x.dtype().size()).max(1)
    }
}
