//! Gradient of the linear layer fused with cross-entropy, over chunks of tokens.
//!
//! It saves x, the head's leaves, the log-sum-exp of each token and the logits, and then the gradient of the head
//! accumulates directly in its buffer. Where logits take too much memory it saves the gradients of the summed loss instead,
//! which the forward pass forms. The vocabulary may be sharded over ranks; the caller provides their communication.

use std::sync::Arc;

use ferrotron_tensor::ops::cross_entropy::{CrossEntropyConfig, VocabAllReduce, VocabShard};
use ferrotron_tensor::ops::linear_cross_entropy::{
    FormedGradients, GradSink, Gradients, HeadWeights, Kept, LinearCrossEntropy, SavedLogits,
    WantedGradients, linear_cross_entropy, linear_cross_entropy_backward,
    linear_cross_entropy_shard,
};
use ferrotron_tensor::{Category, Result, Tensor};

use super::cross_entropy::Loss;
use crate::engine::recording::current;
use crate::{Accum, Backward, Cotangents, InputGrads, Saved, Var, forward_span};

/// Waits for the reduction of an input gradient and returns it.
pub type PendingGradient = Box<dyn FnOnce() -> Result<Tensor>>;

/// The parameters of a head. A weight alone converts into a head without a bias and soft cap.
#[derive(Debug, Clone, Copy)]
pub struct HeadVars<'a> {
    /// W, (V, C).
    pub weight: &'a Var,
    /// b, (V).
    pub bias: Option<&'a Var>,
    /// Soft cap of the logits, c tanh(logit / c).
    pub softcap: Option<f64>,
}

impl HeadVars<'_> {
    fn values(&self) -> HeadWeights<'_> {
        HeadWeights {
            weight: self.weight.value(),
            bias: self.bias.map(Var::value),
            softcap: self.softcap,
        }
    }
}

impl<'a> From<&'a Var> for HeadVars<'a> {
    fn from(weight: &'a Var) -> HeadVars<'a> {
        HeadVars { weight, bias: None, softcap: None }
    }
}

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
    /// Cross-entropy of x W^T + b against `targets` (..), over chunks of tokens. x is (.., C), W of the head (V, C),
    /// and b, if any, (V). If the logits of all tokens fit into `max_logits_bytes` they are saved for backward, else the
    /// gradients are formed chunk by chunk, and saved.
    pub fn linear_cross_entropy<'a>(
        &self,
        head: impl Into<HeadVars<'a>>,
        targets: &Tensor,
        config: &CrossEntropyConfig,
        max_logits_bytes: usize,
    ) -> Result<Loss> {
        let _span = forward_span(OP);
        let head = head.into();
        let (values, wanted) = (head.values(), self.wanted(&head));
        let found =
            linear_cross_entropy(self.value(), values, targets, config, max_logits_bytes, wanted)?;
        self.record_loss(head, targets, config, None, found)
    }

    /// [`Var::linear_cross_entropy`] of a sharded vocabulary. `head` holds the rows of `shard`, `targets` are
    /// classes of the whole vocabulary, and `exchange` communicates with the other shards. The loss covers all shards
    /// and is equal on each, and its cotangent must be too. The limit applies to the logits of one shard.
    pub fn linear_cross_entropy_shard<'a>(
        &self,
        head: impl Into<HeadVars<'a>>,
        targets: &Tensor,
        config: &CrossEntropyConfig,
        max_logits_bytes: usize,
        (shard, exchange): (VocabShard, Arc<dyn VocabParallelComm>),
    ) -> Result<Loss> {
        let _span = forward_span(OP);
        let head = head.into();
        let x = exchange.gather_input(self.value().clone())?;
        let found = linear_cross_entropy_shard(
            &x,
            head.values(),
            targets,
            config,
            max_logits_bytes,
            self.wanted(&head),
            (shard, &*exchange),
        )?;
        self.record_loss(head, targets, config, Some(exchange), found)
    }

    /// The gradients that backward will ask for.
    fn wanted(&self, head: &HeadVars) -> WantedGradients {
        let records = current(|recording| recording.makes_nodes());
        WantedGradients {
            input: records && self.needs_gradient(),
            weight: records && head.weight.needs_gradient(),
            bias: records && head.bias.is_some_and(Var::needs_gradient),
        }
    }

    fn record_loss(
        &self,
        head: HeadVars,
        targets: &Tensor,
        config: &CrossEntropyConfig,
        exchange: Option<Arc<dyn VocabParallelComm>>,
        found: LinearCrossEntropy,
    ) -> Result<Loss> {
        let inputs: Vec<&Var> = [self, head.weight].into_iter().chain(head.bias).collect();
        let LinearCrossEntropy { loss, lse, kept } = found;
        let sum = match kept {
            Kept::Nothing => Var::record(&inputs, loss, || |_: Tensor, _: &mut InputGrads| Ok(()))?,
            Kept::Gradients(formed) => {
                Var::record(&inputs, loss, || FormedBackward { formed, exchange })?
            }
            Kept::Logits(kept) => Var::record(&inputs, loss, || {
                lse.set_category(Category::Saved);
                LinearCrossEntropyBackward {
                    x: self.save(),
                    weight: head.weight.save(),
                    bias: head.bias.map(|bias| bias.save()),
                    softcap: head.softcap,
                    targets: targets.clone(),
                    lse,
                    kept,
                    config: *config,
                    exchange,
                }
            })?,
        };
        Ok(Loss { sum, targets: targets.clone(), config: *config })
    }
}

/// The gradients of the summed loss, which backward multiplies by its cotangent.
struct FormedBackward {
    formed: Box<FormedGradients>,
    exchange: Option<Arc<dyn VocabParallelComm>>,
}

impl Backward for FormedBackward {
    fn name(&self) -> &'static str {
        OP
    }

    fn saved(&self) -> Vec<Tensor> {
        self.formed.tensors().cloned().collect()
    }

    fn backward(self: Box<Self>, dy: Cotangents, dx: &mut InputGrads) -> Result<()> {
        let FormedBackward { formed, exchange } = *self;
        let FormedGradients { input, weight, bias } = formed.scaled(&dy.single()?)?;
        let pending = input.map(|input| reduced(input, exchange.as_deref())).transpose()?;
        if let Some(weight) = weight {
            dx.accumulate(1, weight)?;
        }
        if let Some(bias) = bias {
            dx.accumulate(2, bias)?;
        }
        pending.map_or(Ok(()), |pending| dx.accumulate(0, pending()?))
    }
}

/// Starts the sum of this shard's term over the shards.
fn reduced(dx: Tensor, exchange: Option<&dyn VocabParallelComm>) -> Result<PendingGradient> {
    match exchange {
        None => Ok(Box::new(|| Ok(dx))),
        Some(exchange) => exchange.reduce_input_gradient(dx),
    }
}

const OP: &str = "linear_cross_entropy";

struct LinearCrossEntropyBackward {
    x: Saved,
    weight: Saved,
    bias: Option<Saved>,
    softcap: Option<f64>,
    targets: Tensor,
    lse: Tensor,
    kept: SavedLogits,
    config: CrossEntropyConfig,
    exchange: Option<Arc<dyn VocabParallelComm>>,
}

impl Backward for LinearCrossEntropyBackward {
    fn name(&self) -> &'static str {
        OP
    }

    fn saved(&self) -> Vec<Tensor> {
        let operands = [&self.x, &self.weight].into_iter().chain(&self.bias);
        let held = operands.filter_map(Saved::resident_tensor);
        held.chain([&self.targets, &self.lse, self.kept.logits()].into_iter().cloned()).collect()
    }

    fn backward(self: Box<Self>, dy: Cotangents, dx: &mut InputGrads) -> Result<()> {
        let LinearCrossEntropyBackward {
            x,
            weight,
            bias,
            softcap,
            targets,
            lse,
            kept,
            config,
            exchange,
        } = *self;
        let (scale, mut x, weight) = (dy.single()?, x.value()?, weight.value()?);
        let bias = bias.map(|bias| bias.value()).transpose()?;
        let head = HeadWeights { weight: &weight, bias: bias.as_ref(), softcap };
        if let Some(exchange) = &exchange {
            x = exchange.gather_input(x)?;
        }
        let mut pending: Option<PendingGradient> = None;
        let mut take = |dx: Tensor| {
            pending = Some(reduced(dx, exchange.as_deref())?);
            Ok(())
        };
        let mut dbias = None;
        let mut take_bias = |db: Tensor| {
            dbias = Some(db);
            Ok(())
        };
        let (needs_input, needs_bias) = (dx.needs_input_grad(0), dx.needs_input_grad(2));
        let run = |to_weight: Option<(&mut Tensor, Accum)>| {
            let input: Option<GradSink<'_>> = if needs_input { Some(&mut take) } else { None };
            let bias: Option<GradSink<'_>> = if needs_bias { Some(&mut take_bias) } else { None };
            let wanted = Gradients { scale: &scale, input, weight: to_weight, bias };
            linear_cross_entropy_backward(kept, &x, head, &targets, &lse, &config, wanted)
        };
        if dx.needs_input_grad(1) {
            dx.accumulate_with(1, |to_weight, accum| run(Some((to_weight, accum))))?;
        } else {
            run(None)?;
        }
        if let Some(dbias) = dbias {
            dx.accumulate(2, dbias)?;
        }
        pending.map_or(Ok(()), |pending| dx.accumulate(0, pending()?))
    }
}
