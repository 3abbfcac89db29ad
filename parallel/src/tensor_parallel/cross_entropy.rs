//! The head with vocabulary sharding: logits, and cross-entropy without gathering them.
//!
//! Per token the ranks reduce the largest logit, the sum of exponentials and the target's logit (Shoeybi et al.,
//! section 3). Label smoothing adds the sum of logits: 3 or 4 numbers instead of V.

use ferrotron_autograd::Var;
use ferrotron_autograd::ops::cross_entropy::Loss;
use ferrotron_autograd::ops::linear_cross_entropy::{HeadVars, PendingGradient, VocabParallelComm};
use ferrotron_nn::Param;
use ferrotron_tensor::ops::cross_entropy::{CrossEntropyConfig, VocabAllReduce, VocabShard};
use ferrotron_tensor::{Result, Tensor};
use std::sync::Arc;

use super::TensorParallel;
use super::linear::TpStyle;
use super::mappings::gather_from_tp;
use crate::collective::Reduction;

/// The parameters of a head with sharded rows. A weight alone converts into a head without a bias and soft cap.
#[derive(Debug, Clone, Copy)]
pub struct HeadParams<'a> {
    /// W, (V/tp, C).
    pub weight: &'a Param,
    /// b, (V/tp).
    pub bias: Option<&'a Param>,
    /// Soft cap of the logits, c tanh(logit / c).
    pub softcap: Option<f64>,
}

impl HeadParams<'_> {
    /// Weight and bias for activations like `x`.
    fn vars(&self, x: &Var) -> Result<(Var, Option<Var>)> {
        let bias = self.bias.map(|bias| bias.var_as(x.dtype())).transpose()?;
        Ok((self.weight.var_as(x.dtype())?, bias))
    }
}

impl<'a> From<&'a Param> for HeadParams<'a> {
    fn from(weight: &'a Param) -> HeadParams<'a> {
        HeadParams { weight, bias: None, softcap: None }
    }
}

impl TensorParallel {
    /// The vocabulary shard of a parameter that is sharded by rows of a table (V, ..).
    pub(super) fn vocab_shard(&self, weight: &Param) -> VocabShard {
        let place = weight.shard_spec();
        let offset = place.pieces(0).first().map_or(0, |&(offset, _)| offset);
        VocabShard { offset, global: place.global_dims()[0], shards: self.group().size() }
    }

    /// [`Var::linear_cross_entropy`] of a head with sharded rows, such as the weight of a
    /// [`VocabParallelEmbedding`](super::VocabParallelEmbedding). x is (B, T, C), or (B, T/tp, C) with sequence
    /// parallelism; targets (B, T) cover all positions. The loss covers all positions and is equal on every rank.
    ///
    /// If a rank's logits of all tokens fit into `max_logits_bytes` they are saved for backward, else the gradients are
    /// formed chunk by chunk, and saved.
    ///
    /// ```
    /// use ferrotron_autograd::Var;
    /// use ferrotron_nn::{Init, Scope};
    /// use ferrotron_parallel::tensor_parallel::{TensorParallel, VocabParallelEmbedding};
    /// use ferrotron_tensor::{DType, Device, Tensor, ops::cross_entropy::CrossEntropyConfig};
    /// let device = Device::cpu(1)?;
    /// let scope = Scope::new(&device, DType::F64, 0).child("wte");
    /// let tp = TensorParallel::single();
    /// let wte = VocabParallelEmbedding::new(&scope, &tp, 13, 8, Init::Zeros)?;
    /// let x = Var::constant(Tensor::zeros(&device, DType::F64, &[2, 3, 8])?);
    /// let targets = Tensor::from_slice(&device, &[0_i64, 12, 7, 7, 1, 5], &[2, 3])?;
    /// let config = CrossEntropyConfig::default();
    /// let loss = tp.linear_cross_entropy(&x, wte.weight(), &targets, &config, 1 << 20)?;
    /// assert!((loss.sum.value().item()? - 6.0 * 13.0_f64.ln()).abs() < 1e-12);
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn linear_cross_entropy<'a>(
        &self,
        x: &Var,
        head: impl Into<HeadParams<'a>>,
        targets: &Tensor,
        config: &CrossEntropyConfig,
        max_logits_bytes: usize,
    ) -> Result<Loss> {
        let head = head.into();
        let shard = self.vocab_shard(head.weight);
        let (weight, bias) = head.vars(x)?;
        let head = HeadVars { weight: &weight, bias: bias.as_ref(), softcap: head.softcap };
        if self.group().size() == 1 {
            return x.linear_cross_entropy(head, targets, config, max_logits_bytes);
        }
        let exchange: Arc<dyn VocabParallelComm> = Arc::new(Exchange(self.clone()));
        let shard = (shard, exchange);
        x.linear_cross_entropy_shard(head, targets, config, max_logits_bytes, shard)
    }

    /// The logits (B, T, V) of the head, on every rank, for x as in [`TensorParallel::linear_cross_entropy`].
    pub fn logits<'a>(&self, x: &Var, head: impl Into<HeadParams<'a>>) -> Result<Var> {
        let head = head.into();
        let classes = head.weight.shard_spec().global_dims()[0];
        let (weight, bias) = head.vars(x)?;
        let mut part = self.linear(x, &weight, bias.as_ref(), TpStyle::Colwise)?; // (B, T, V/tp)
        if let Some(cap) = head.softcap {
            part = part.softcap(cap)?;
        }
        gather_from_tp(&part, part.dims().len() - 1, classes, self.group())
    }
}

/// The communication of the head between ranks.
struct Exchange(TensorParallel);

impl VocabAllReduce for Exchange {
    fn max(&self, per_token: Tensor) -> Result<Tensor> {
        self.0.group().blocking().all_reduce(per_token, Reduction::Max)?.wait()
    }

    fn sum(&self, per_token: Tensor) -> Result<Tensor> {
        self.0.group().blocking().all_reduce(per_token, Reduction::Sum)?.wait()
    }
}

impl VocabParallelComm for Exchange {
    fn gather_input(&self, x: Tensor) -> Result<Tensor> {
        self.0.blocking().gathered(&x)?.wait()
    }

    fn reduce_input_gradient(&self, dx: Tensor) -> Result<PendingGradient> {
        let work = self.0.reduced(dx)?;
        Ok(Box::new(move || work.wait()))
    }
}
