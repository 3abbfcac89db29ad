//! A transformer block with its norms before or behind attention and MLP, and recomputation of its modules.

use ferrotron_autograd::{Var, checkpoint};
use ferrotron_nn::{
    AttentionConfig, Bias, Context, Dropout, KvCache, LayerNorm, MlpConfig, Mode, Module, Norm,
    NormGain, RmsNorm, Scope,
};
use ferrotron_parallel::mesh::Mesh;
use ferrotron_parallel::tensor_parallel::{Branch, ParallelAttention, ParallelMlp};
use ferrotron_tensor::Result;
use serde::{Deserialize, Serialize};
use tracing::trace_span;

use crate::model::recompute::{RecomputeModules, RecomputedAttention, RecomputedMlp};

/// The kind of norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Normalization {
    /// LayerNorm: subtracts the mean, and has a bias if the model has biases.
    LayerNorm,
    /// RMSNorm: subtracts no mean and has no bias.
    #[serde(rename = "RMSNorm")]
    RmsNorm,
}

/// The place of a block's norms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NormPlacement {
    /// x + f(norm(x)): the residual stream passes no norm (Megatron-LM).
    Pre,
    /// norm(x + f(x)): the original transformer and BERT.
    Post,
}

/// Configuration of a norm.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NormConfig {
    pub kind: Normalization,
    pub width: usize,
    pub bias: Bias,
    pub epsilon: f64,
    pub gain: NormGain,
}

impl NormConfig {
    pub fn build(&self, scope: &Scope) -> Norm {
        let NormConfig { kind, width, bias, epsilon, gain } = *self;
        match kind {
            Normalization::LayerNorm => {
                Norm::Layer(LayerNorm::with_gain(scope, width, bias, epsilon, gain))
            }
            Normalization::RmsNorm => Norm::Rms(RmsNorm::with_gain(scope, width, epsilon, gain)),
        }
    }
}

/// Configuration of a block.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BlockConfig {
    pub attention: AttentionConfig,
    pub mlp: MlpConfig,
    pub norm: NormConfig,
    pub norm_placement: NormPlacement,
    /// Whether norms of placement [`NormPlacement::Pre`] have others behind attention and MLP, before the addition.
    pub sandwich_norm: bool,
    /// Whether attention and MLP read the same input.
    pub parallel_residual: bool,
    pub hidden_dropout: f64,
}

/// Attention or MLP with its norm, without the residual connection.
#[derive(Debug, Clone, Module)]
#[expect(
    clippy::large_enum_variant,
    reason = "a model has few blocks, and its tensors are elsewhere"
)]
enum Normed<M> {
    Pre { norm: Norm, inner: M, post_norm: Option<Norm> },
    Post { inner: M, norm: Norm },
}

impl<M: Module> Normed<M> {
    fn new(placement: NormPlacement, norm: Norm, inner: M, post_norm: Option<Norm>) -> Normed<M> {
        match placement {
            NormPlacement::Pre => Normed::Pre { norm, inner, post_norm },
            NormPlacement::Post => Normed::Post { inner, norm },
        }
    }

    fn inner(&self) -> &M {
        match self {
            Normed::Pre { inner, .. } | Normed::Post { inner, .. } => inner,
        }
    }

    /// The input of the inner module.
    fn input(&self, x: &Var) -> Result<Var> {
        match self {
            Normed::Pre { norm, .. } => norm.forward(x),
            Normed::Post { .. } => Ok(x.clone()),
        }
    }

    /// The term of the residual addition, from the output of the inner module.
    fn branch_output(&self, y: Var) -> Result<Var> {
        match self {
            Normed::Pre { post_norm: Some(norm), .. } => norm.forward(&y),
            Normed::Pre { .. } | Normed::Post { .. } => Ok(y),
        }
    }

    /// The residual `x` where the inner module may add it in its last product: no norm or dropout lies between.
    fn residual<'a>(&self, x: &'a Var, dropout: &Dropout, ctx: &Context) -> Option<&'a Var> {
        let has_norm = matches!(self, Normed::Pre { post_norm: Some(_), .. });
        (!has_norm && dropout.is_identity(ctx)).then_some(x)
    }

    /// The residual stream behind the residual addition `sum`.
    fn output(&self, sum: Var) -> Result<Var> {
        match self {
            Normed::Pre { .. } => Ok(sum),
            Normed::Post { norm, .. } => norm.forward(&sum),
        }
    }

    /// The modules before the residual addition.
    fn branch(&self) -> &dyn Module {
        match self {
            Normed::Pre { .. } => self,
            Normed::Post { inner, .. } => inner,
        }
    }
}

/// A transformer block.
#[derive(Debug, Clone, Module)]
pub(crate) struct Block {
    path: String,
    attn: Normed<ParallelAttention>,
    mlp: Normed<ParallelMlp>,
    parallel_residual: bool,
    dropout_1: Dropout,
    dropout_2: Dropout,
}

impl Block {
    pub fn new(scope: &Scope, mesh: &Mesh, config: &BlockConfig) -> Result<Block> {
        let BlockConfig { attention, mlp, norm, norm_placement, hidden_dropout, .. } = config;
        let post_norm = |name: &str, residual: &Scope| {
            config.sandwich_norm.then(|| norm.build(&residual.child(name)))
        };
        let (tp, cp) = (mesh.tensor_parallel(), mesh.context_parallel());
        let residual = tp.residual_scope(scope);
        let attention = ParallelAttention::new(&scope.child("attn"), &tp, &cp, attention)?;
        let mlp = ParallelMlp::new(&scope.child("mlp"), &tp, mlp)?;
        let [norm_1, norm_2] = ["norm_1", "norm_2"].map(|name| norm.build(&residual.child(name)));
        Ok(Block {
            path: scope.path().to_string(),
            attn: Normed::new(
                *norm_placement,
                norm_1,
                attention,
                post_norm("post_norm_1", &residual),
            ),
            mlp: Normed::new(*norm_placement, norm_2, mlp, post_norm("post_norm_2", &residual)),
            parallel_residual: config.parallel_residual,
            dropout_1: Dropout::new(&scope.child("dropout_1"), *hidden_dropout)?,
            dropout_2: Dropout::new(&scope.child("dropout_2"), *hidden_dropout)?,
        })
    }

    /// (B, T, C) -> (B, T, C). In training without a cache, backward recomputes the modules `again`.
    pub fn forward(
        &self,
        ctx: &Context,
        x: &Var,
        cache: Option<&mut KvCache>,
        again: RecomputeModules,
    ) -> Result<Var> {
        let _span = trace_span!("module", name = self.path).entered();
        let again = match (ctx.mode, &cache) {
            (Mode::Train, None) => again,
            _ => RecomputeModules::NONE,
        };
        let y = self.attend(ctx, x, cache, again.attention)?;
        let sum = self.attn.output(y.onto(x, |y| self.dropout_1.forward(ctx, y))?)?; // (B, T, C)
        let input = if self.parallel_residual { x } else { &sum };
        let residual = self.mlp.residual(&sum, &self.dropout_2, ctx);
        let y = self.feed_forward(residual, input, again.mlp)?;
        self.mlp.output(y.onto(&sum, |y| self.dropout_2.forward(ctx, y))?) // (B, T, C)
    }

    /// The branch of attention: (B, T, C) -> (B, T, C)
    fn attend(
        &self,
        ctx: &Context,
        x: &Var,
        cache: Option<&mut KvCache>,
        again: RecomputedAttention,
    ) -> Result<Branch> {
        let attn = &self.attn;
        let residual = attn.residual(x, &self.dropout_1, ctx);
        let y = match again {
            RecomputedAttention::None => {
                attn.inner().forward_onto(residual, ctx, &attn.input(x)?, cache)?
            }
            RecomputedAttention::Core => {
                attn.inner().forward_checkpointed(residual, ctx, &attn.input(x)?)?
            }
            RecomputedAttention::Layer => {
                let (attn, ctx) = (attn.clone(), ctx.clone());
                let run = move |x: &[Var]| {
                    let y = attn.inner().forward(&ctx, &attn.input(&x[0])?, None)?;
                    Ok(vec![attn.branch_output(y)?])
                };
                return Ok(Branch::Term(checkpoint(&[x], run)?.remove(0)));
            }
        };
        y.map(|y| attn.branch_output(y))
    }

    /// The branch of the MLP, of the input `x`: (B, T, C) -> (B, T, C)
    fn feed_forward(
        &self,
        residual: Option<&Var>,
        x: &Var,
        again: RecomputedMlp,
    ) -> Result<Branch> {
        let mlp = &self.mlp;
        match again {
            RecomputedMlp::None => {
                let y = mlp.inner().forward_onto(residual, &mlp.input(x)?)?;
                y.map(|y| mlp.branch_output(y))
            }
            RecomputedMlp::Layer => {
                let mlp = mlp.clone();
                let run = move |x: &[Var]| {
                    let y = mlp.inner().forward(&mlp.input(&x[0])?)?;
                    Ok(vec![mlp.branch_output(y)?])
                };
                Ok(Branch::Term(checkpoint(&[x], run)?.remove(0)))
            }
        }
    }

    /// The modules of the block that are recomputed.
    pub fn recomputed(&self, again: RecomputeModules) -> impl Iterator<Item = &dyn Module> {
        let attention = again.attention == RecomputedAttention::Layer;
        let mlp = again.mlp == RecomputedMlp::Layer;
        let attention = attention.then(|| self.attn.branch());
        attention.into_iter().chain(mlp.then(|| self.mlp.branch()))
    }
}
