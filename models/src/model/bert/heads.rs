//! The heads of BERT: masked tokens; and on the first position, the order of the two segments or the choice of an answer.
//!
//! Trailing comments give shapes: batch B, positions T, width C, vocabulary V.

use ferrotron_autograd::Var;
use ferrotron_autograd::ops::cross_entropy::Loss;
use ferrotron_nn::{
    Activation, Axis, Bias, Context, DimShard, Dropout, Init, LayerNorm, Linear, Module, Param,
    Scope, WeightDecay,
};
use ferrotron_parallel::tensor_parallel::mappings::reduce_from_tp;
use ferrotron_parallel::tensor_parallel::{HeadParams, SequenceParallel, TensorParallel};
use ferrotron_tensor::ops::cross_entropy::CrossEntropyConfig;
use ferrotron_tensor::ops::reduce::KeepDims;
use ferrotron_tensor::{At, Result, Tensor};

use super::config::{BertConfig, PooledHeadKind};
use crate::model::logits_limit::max_logits_bytes;

/// The head for masked tokens: a dense layer, an activation and a norm, then the token embedding with a bias.
#[derive(Debug, Clone, Module)]
pub(super) struct MaskedLmHead {
    #[module(skip)]
    tp: TensorParallel,
    transform: Linear,
    activation: Activation,
    norm: LayerNorm,
    weight: Param,
    bias: Param,
}

impl MaskedLmHead {
    /// The head whose output projection is `weight`, the rows of the token embedding on this rank.
    pub fn new(
        scope: &Scope,
        tp: &TensorParallel,
        config: &BertConfig,
        weight: Param,
    ) -> Result<MaskedLmHead> {
        let (c, v) = (config.hidden_size, config.vocab_size);
        let residual = tp.residual_scope(scope);
        let place = tp.shard(&[v], 0, &[v])?;
        let cut = scope.clone().sharded_along(Axis::Tensor);
        Ok(MaskedLmHead {
            tp: tp.clone(),
            transform: Linear::new(&residual.child("transform"), c, c, Bias::Yes, config.init())?,
            activation: config.activation.function(),
            norm: LayerNorm::new(&residual.child("norm"), c, Bias::Yes, config.norm_epsilon),
            weight,
            bias: cut.param_at("bias", place, Init::Zeros, WeightDecay::Off),
        })
    }

    /// (B, T, C), or this rank's positions -> the same dims.
    fn features(&self, x: &Var) -> Result<Var> {
        self.norm.forward(&self.activation.apply(&self.transform.forward(x)?)?)
    }

    fn params(&self) -> HeadParams<'_> {
        HeadParams { weight: &self.weight, bias: Some(&self.bias), softcap: None }
    }

    /// The summed cross-entropy of (B, T, C) against targets (B, T); negative targets are ignored.
    pub fn loss(&self, x: &Var, targets: &Tensor) -> Result<Loss> {
        let (x, config) = (self.features(x)?, CrossEntropyConfig::default());
        let (params, limit) = (self.params(), max_logits_bytes(targets.device()));
        self.tp.linear_cross_entropy(&x, params, targets, &config, limit).at("mlm_head")
    }

    /// (B, T, C) -> logits (B, T, V).
    pub fn logits(&self, x: &Var) -> Result<Var> {
        self.tp.logits(&self.features(x)?, self.params()).at("mlm_head")
    }
}

/// A head on the first position: a dense layer, the pooler, dropout, and a linear layer.
///
/// Ranks along the tensor axis compute it alike.
#[derive(Debug, Clone, Module)]
pub(super) struct PooledHead {
    #[module(skip)]
    tp: TensorParallel,
    pooler: Linear,
    dropout: Dropout,
    classifier: Linear,
    classes: usize,
}

impl PooledHead {
    pub fn new(
        scope: &Scope,
        tp: &TensorParallel,
        config: &BertConfig,
        kind: PooledHeadKind,
    ) -> Result<PooledHead> {
        let (c, init) = (config.hidden_size, config.init());
        let whole = scope.clone().with_whole_gradients(Axis::Tensor);
        // Pre-training has no dropout here, as in Megatron-LM.
        let (name, classes, dropout) = match kind {
            PooledHeadKind::SentenceOrder => ("binary_head", 2, 0.0),
            PooledHeadKind::MultipleChoice(n) => ("multichoice_head", n, config.hidden_dropout),
        };
        let logits = kind.logits_of_a_row();
        Ok(PooledHead {
            tp: tp.clone(),
            pooler: Linear::new(&whole.child("pooler"), c, c, Bias::Yes, init)?,
            dropout: Dropout::new(&scope.child("pooler_dropout"), dropout)?,
            classifier: Linear::new(&whole.child(name), c, logits, Bias::Yes, init)?,
            classes,
        })
    }

    /// (B, T, C), or this rank's positions -> logits (B, classes), or (B / classes, classes) with one logit a row.
    ///
    /// They mean something only where `ctx.sequence` has the first position.
    pub fn logits(&self, ctx: &Context, x: &Var) -> Result<Var> {
        let first = x.narrow(1, 0, 1)?; // (B, 1, C)
        let first = match self.tp.sequence() {
            SequenceParallel::Off => first,
            // Zeros from ranks with other positions.
            SequenceParallel::On => {
                let own = f64::from(u8::from(ctx.residual.coordinates().next() == Some(0)));
                reduce_from_tp(&first.mul_scalar(own)?, self.tp.group())?
            }
        };
        let pooled = self.pooler.forward(&first)?.tanh()?; // (B, 1, C)
        let place = DimShard::part(ctx.sequence.global, 0, 1);
        let ctx = Context { residual: place, ..ctx.clone() };
        let logits = self.classifier.forward(&self.dropout.forward(&ctx, &pooled)?)?; // (B, 1, logits)
        let rows = logits.dims()[0] * logits.dims()[2] / self.classes;
        logits.reshape(&[rows, self.classes])
    }

    /// The summed cross-entropy of logits against labels, except negative ones; zero unless `ctx.sequence` has the first
    /// position.
    pub fn loss(&self, ctx: &Context, logits: &Var, labels: &Tensor) -> Result<Var> {
        let sum = logits.cross_entropy(labels, &CrossEntropyConfig::default())?.sum;
        where_first(ctx, sum)
    }

    /// The number of labels whose logit is the largest, in the dtype of a loss, and as that is.
    pub fn num_correct(&self, ctx: &Context, logits: &Var, labels: &Tensor) -> Result<Var> {
        let right = logits.value().argmax(-1, KeepDims::Drop)?.eq(labels)?;
        let sum = right.cast(logits.dtype().accumulator())?.sum_all()?;
        where_first(ctx, Var::constant(sum))
    }
}

/// The sum on ranks that have the first position, and zero on others.
fn where_first(ctx: &Context, sum: Var) -> Result<Var> {
    match ctx.sequence.coordinates().next() {
        Some(0) => Ok(sum),
        _ => sum.mul_scalar(0.0),
    }
}
