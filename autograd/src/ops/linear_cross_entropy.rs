//! Gradient of the linear layer fused with cross-entropy, over chunks of tokens.
//!
//! It saves x, the head's leaf, the log-sum-exp of each token, and the logits if they fit the limit. The gradient of
//! the head accumulates directly in its buffer. The vocabulary may be sharded over ranks; the caller provides their
//! communication.

use std::sync::Arc;

use ferrotron_tensor::ops::cross_entropy::{CrossEntropyConfig, VocabAllReduce, VocabShard};
use ferrotron_tensor::ops::linear_cross_entropy::{
    GradSink, Gradients, LinearCrossEntropy, SavedLogits, linear_cross_entropy,
    linear_cross_entropy_backward, linear_cross_entropy_shard,
};
use ferrotron_tensor::{Category, Result, Tensor};

use super::cross_entropy::Loss;
use crate::{Accum, Backward, Cotangents, InputGrads, Saved, Var, forward_span};

/// Waits for the reduction of an input gradient and returns it.
pub type PendingGradient = Box<dyn FnOnce() -> Result<Tensor>>;

/// The communication between vocabulary shards around [`Var::linear_cross_entropy_shard`]. Every shard makes the same
/// calls in the same order.
pub trait VocabParallelComm: VocabAllReduce {
    /// The tokens that all shards process, from this rank's x: x itself, or an all-gather if each shard holds some of
    /// the tokens (sequence parallelism). Called in forward and again in backward.
    fn gather_input(&self, x: Tensor) -> Result<Tensor>;

    /// Starts summing dx over the shards; `dx` is this shard's term. The result has the dims of the variable x. The
    /// gradient of the head is computed before the result is waited for.
    fn reduce_input_gradient(&self, dx: Tensor) -> Result<PendingGradient>;
}

impl Var {
    /// Cross-entropy of x W^T against `targets` (..), for x (.., C) and W (V, C), over chunks of tokens. If the
    /// logits of all tokens fit into `max_logits_bytes` they are saved for backward, else each chunk's are
    /// recomputed.
    pub fn linear_cross_entropy(
        &self,
        weight: &Var,
        targets: &Tensor,
        config: &CrossEntropyConfig,
        max_logits_bytes: usize,
    ) -> Result<Loss> {
        let _span = forward_span("linear_cross_entropy");
        let found =
            linear_cross_entropy(self.value(), weight.value(), targets, config, max_logits_bytes)?;
        self.record_loss(weight, targets, config, None, found)
    }

    /// [`Var::linear_cross_entropy`] of a sharded vocabulary. `weight` holds the rows of `shard`, `targets` are
    /// classes of the whole vocabulary, and `exchange` communicates with the other shards. The loss covers all shards
    /// and is equal on each, and its cotangent must be too. The limit applies to the logits of one shard.
    pub fn linear_cross_entropy_shard(
        &self,
        weight: &Var,
        targets: &Tensor,
        config: &CrossEntropyConfig,
        max_logits_bytes: usize,
        (shard, exchange): (VocabShard, Arc<dyn VocabParallelComm>),
    ) -> Result<Loss> {
        let _span = forward_span("linear_cross_entropy");
        let x = exchange.gather_input(self.value().clone())?;
        let found = linear_cross_entropy_shard(
            &x,
            weight.value(),
            targets,
            config,
            max_logits_bytes,
            (shard, &*exchange),
        )?;
        self.record_loss(weight, targets, config, Some(exchange), found)
    }

    fn record_loss(
        &self,
        weight: &Var,
        targets: &Tensor,
        config: &CrossEntropyConfig,
        exchange: Option<Arc<dyn VocabParallelComm>>,
        found: LinearCrossEntropy,
    ) -> Result<Loss> {
        let sum = Var::record(&[self, weight], found.loss, || {
            found.lse.set_category(Category::Saved);
            LinearCrossEntropyBackward {
                x: self.save(),
                weight: weight.save(),
                targets: targets.clone(),
                lse: found.lse,
                kept: found.kept,
                config: *config,
                exchange,
            }
        })?;
        Ok(Loss { sum, targets: targets.clone(), config: *config })
    }
}

struct LinearCrossEntropyBackward {
    x: Saved,
    weight: Saved,
    targets: Tensor,
    lse: Tensor,
    kept: SavedLogits,
    config: CrossEntropyConfig,
    exchange: Option<Arc<dyn VocabParallelComm>>,
}

impl Backward for LinearCrossEntropyBackward {
    fn name(&self) -> &'static str {
        "linear_cross_entropy"
    }

    fn saved(&self) -> Vec<Tensor> {
        let held = self.x.resident_tensor().into_iter().chain(self.weight.resident_tensor());
        held.chain([&self.targets, &self.lse].into_iter().chain(self.kept.logits()).cloned())
            .collect()
    }

    fn backward(self: Box<Self>, dy: Cotangents, dx: &mut InputGrads) -> Result<()> {
        let LinearCrossEntropyBackward { x, weight, targets, lse, kept, config, exchange } = *self;
        let (scale, mut x, weight) = (dy.single()?, x.value()?, weight.value()?);
        if let Some(exchange) = &exchange {
            x = exchange.gather_input(x)?;
        }
        let mut pending: Option<PendingGradient> = None;
        let mut take = |dx: Tensor| {
            pending = Some(match &exchange {
                None => Box::new(|| Ok(dx)),
                Some(exchange) => exchange.reduce_input_gradient(dx)?,
            });
            Ok(())
        };
        let needs_input = dx.needs_input_grad(0);
        let run = |to_weight: Option<(&mut Tensor, Accum)>| {
            let input: Option<GradSink<'_>> = if needs_input { Some(&mut take) } else { None };
            let wanted = Gradients { scale: &scale, input, weight: to_weight };
            linear_cross_entropy_backward(kept, &x, &weight, &targets, &lse, &config, wanted)
        };
        if dx.needs_input_grad(1) {
            dx.accumulate_with(1, |to_weight, accum| run(Some((to_weight, accum))))?;
        } else {
            run(None)?;
        }
        pending.map_or(Ok(()), |pending| dx.accumulate(0, pending()?))
    }
}
