//! The heads of BERT: masked tokens, and the order of the two segments.
//!
//! Trailing comments give shapes: batch B, positions T, width C, vocabulary V.

use ferrotron_autograd::Var;
use ferrotron_autograd::ops::cross_entropy::Loss;
use ferrotron_nn::{
    Activation, Axis, Bias, Context, Init, LayerNorm, Linear, Module, Param, Scope, WeightDecay,
};
use ferrotron_parallel::tensor_parallel::mappings::reduce_from_tp;
use ferrotron_parallel::tensor_parallel::{HeadParams, SequenceParallel, TensorParallel};
use ferrotron_tensor::ops::cross_entropy::CrossEntropyConfig;
use ferrotron_tensor::{At, Result, Tensor};

use super::config::BertConfig;

/// Maximum bytes of logits that are saved from forward to backward; larger ones are recomputed.
const MAX_LOGITS_BYTES: usize = 256 << 20;

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
        let loss =
            self.tp.linear_cross_entropy(&x, self.params(), targets, &config, MAX_LOGITS_BYTES);
        loss.at("mlm_head")
    }

    /// (B, T, C) -> logits (B, T, V).
    pub fn logits(&self, x: &Var) -> Result<Var> {
        self.tp.logits(&self.features(x)?, self.params()).at("mlm_head")
    }
}

/// The head for the order of the two segments: a dense layer of the first position, the pooler, and two classes.
///
/// Ranks along the tensor axis compute it alike.
#[derive(Debug, Clone, Module)]
pub(super) struct BinaryHead {
    #[module(skip)]
    tp: TensorParallel,
    pooler: Linear,
    classifier: Linear,
}

impl BinaryHead {
    pub fn new(scope: &Scope, tp: &TensorParallel, config: &BertConfig) -> Result<BinaryHead> {
        let (c, init) = (config.hidden_size, config.init());
        let whole = scope.clone().with_whole_gradients(Axis::Tensor);
        Ok(BinaryHead {
            tp: tp.clone(),
            pooler: Linear::new(&whole.child("pooler"), c, c, Bias::Yes, init)?,
            classifier: Linear::new(&whole.child("binary_head"), c, 2, Bias::Yes, init)?,
        })
    }

    /// (B, T, C), or this rank's positions -> logits (B, 2).
    ///
    /// They mean something only where `ctx.sequence` has the first position.
    pub fn logits(&self, ctx: &Context, x: &Var) -> Result<Var> {
        let first = x.narrow(1, 0, 1)?.reshape(&[x.dims()[0], x.dims()[2]])?; // (B, C)
        let first = match self.tp.sequence() {
            SequenceParallel::Off => first,
            // Zeros from ranks with other positions.
            SequenceParallel::On => {
                let own = f64::from(u8::from(ctx.residual.coordinates().next() == Some(0)));
                reduce_from_tp(&first.mul_scalar(own)?, self.tp.group())?
            }
        };
        self.classifier.forward(&self.pooler.forward(&first)?.tanh()?) // (B, 2)
    }

    /// The summed cross-entropy against labels (B), except negative ones; zero unless `ctx.sequence` has the first
    /// position.
    pub fn loss(&self, ctx: &Context, x: &Var, labels: &Tensor) -> Result<Var> {
        let logits = self.logits(ctx, x)?;
        let sum = logits.cross_entropy(labels, &CrossEntropyConfig::default())?.sum;
        match ctx.sequence.coordinates().next() {
            Some(0) => Ok(sum),
            _ => sum.mul_scalar(0.0),
        }
    }
}
