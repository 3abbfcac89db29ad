//! Gradients of the head that forward forms chunk by chunk, while logits are there.

use super::problem::Problem;
use crate::ops::linear::linear_bias_gradient;
use crate::ops::matmul::{Accum, matmul_into};
use crate::ops::pointwise::add_assign;
use crate::ops::scale::scale;
use crate::{Category, Result, Tensor};

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
    pub(super) fn any(self) -> bool {
        self.input || self.weight || self.bias
    }
}

/// The gradients of the summed loss by the operands that want one. [`FormedGradients::scaled`] makes those of a multiple.
#[derive(Debug)]
pub struct FormedGradients {
    /// dx, with the dims of x and in its dtype; of a shard this shard's term of the sum over the shards.
    pub input: Option<Tensor>,
    /// dW (V, C), in the accumulator dtype of x.
    pub weight: Option<Tensor>,
    /// db (V), in the accumulator dtype of x.
    pub bias: Option<Tensor>,
}

impl FormedGradients {
    /// Room for gradients, before the first chunk.
    pub(super) fn new(
        problem: &Problem,
        dims: &[usize],
        wanted: WantedGradients,
    ) -> Result<FormedGradients> {
        let (x, dtype) = (&problem.x, problem.x.dtype());
        let zeros = |wanted: bool, dims: &[usize]| {
            wanted.then(|| Tensor::zeros(x.device(), dtype.accumulator(), dims)).transpose()
        };
        let input = wanted.input.then(|| Tensor::empty(x.device(), dtype, dims));
        let formed = FormedGradients {
            input: input.transpose()?,
            weight: zeros(wanted.weight, problem.weight.dims())?,
            bias: zeros(wanted.bias, &[problem.classes])?,
        };
        formed.tensors().for_each(|tensor| tensor.set_category(Category::Logits));
        Ok(formed)
    }

    /// All gradients that there are.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        [&self.input, &self.weight, &self.bias].into_iter().flatten()
    }

    /// Adds the gradients of a chunk, whose `logits` begin at token `first`. `lse` covers all tokens.
    pub(super) fn add(
        &mut self,
        problem: &Problem,
        logits: Tensor,
        first: usize,
        lse: &Tensor,
    ) -> Result<()> {
        let len = logits.dims()[0];
        let one = Tensor::full(logits.device(), lse.dtype(), &[], 1.0)?;
        let dlogits = problem.backward(logits, first, lse, &one)?;
        if let Some(dx) = self.input.take() {
            let dims = dx.dims().to_vec();
            let mut rows = dx.reshape(problem.x.dims())?;
            drop(dx);
            rows.narrow_mut(0, first, len, |dx| {
                matmul_into(dx, Accum::Replace, &dlogits, &problem.weight)
            })?;
            self.input = Some(rows.reshape(&dims)?);
        }
        if let Some(dweight) = &mut self.weight {
            let x = problem.x.narrow(0, first, len)?;
            matmul_into(dweight, Accum::Add, &dlogits.transpose(0, 1)?, &x)?;
        }
        if let Some(dbias) = &mut self.bias {
            add_assign(dbias, &linear_bias_gradient(&dlogits)?.cast(dbias.dtype())?)?;
        }
        Ok(())
    }

    /// The gradients of `factor` times the loss: one element in the dtype of the loss.
    pub fn scaled(self, factor: &Tensor) -> Result<FormedGradients> {
        let FormedGradients { input, weight, bias } = self;
        let times = |tensor: Option<Tensor>| tensor.map(|tensor| scale(tensor, factor)).transpose();
        Ok(FormedGradients { input: times(input)?, weight: times(weight)?, bias: times(bias)? })
    }
}
