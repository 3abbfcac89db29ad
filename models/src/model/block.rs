//! A transformer block, with recomputation of its modules.

use ferrotron_autograd::{Var, checkpoint};
use ferrotron_nn::{Context, Dropout, KvCache, Mode, Module, Norm, Scope};
use ferrotron_parallel::mesh::Mesh;
use ferrotron_parallel::tensor_parallel::{ParallelAttention, ParallelMlp};
use ferrotron_tensor::Result;
use tracing::trace_span;

use crate::model::config::GptConfig;
use crate::model::recompute::{RecomputeModules, RecomputedAttention, RecomputedMlp};

/// Attention or MLP with the norm before it, without the residual connection.
#[derive(Debug, Clone, Module)]
pub(crate) struct Normed<M> {
    norm: Norm,
    inner: M,
}

/// A pre-norm transformer block.
#[derive(Debug, Clone, Module)]
pub(crate) struct Block {
    path: String,
    attn: Normed<ParallelAttention>,
    mlp: Normed<ParallelMlp>,
    dropout_1: Dropout,
    dropout_2: Dropout,
}

impl Block {
    /// Block `layer` of the whole model.
    pub fn new(scope: &Scope, mesh: &Mesh, config: &GptConfig, layer: usize) -> Result<Block> {
        let (tp, cp) = (mesh.tensor_parallel(), mesh.context_parallel());
        let residual = tp.residual_scope(scope);
        Ok(Block {
            path: scope.path().to_string(),
            attn: Normed {
                norm: config.norm(&residual.child("norm_1")),
                inner: ParallelAttention::new(
                    &scope.child("attn"),
                    &tp,
                    &cp,
                    &config.block_attention(layer),
                )?,
            },
            mlp: Normed {
                norm: config.norm(&residual.child("norm_2")),
                inner: ParallelMlp::new(&scope.child("mlp"), &tp, &config.mlp())?,
            },
            dropout_1: Dropout::new(&scope.child("dropout_1"), config.hidden_dropout)?,
            dropout_2: Dropout::new(&scope.child("dropout_2"), config.hidden_dropout)?,
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
        let x = x.add(&self.dropout_1.forward(ctx, &y)?)?; // (B, T, C)
        let y = match again.mlp {
            RecomputedMlp::None => self.mlp.inner.forward(&self.mlp.norm.forward(&x)?)?,
            RecomputedMlp::Layer => {
                let Normed { norm, inner } = self.mlp.clone();
                let run = move |x: &[Var]| Ok(vec![inner.forward(&norm.forward(&x[0])?)?]);
                checkpoint(&[&x], run)?.remove(0)
            }
        };
        x.add(&self.dropout_2.forward(ctx, &y)?) // (B, T, C)
    }

    /// (B, T, C) -> (B, T, C)
    fn attend(
        &self,
        ctx: &Context,
        x: &Var,
        cache: Option<&mut KvCache>,
        again: RecomputedAttention,
    ) -> Result<Var> {
        let Normed { norm, inner } = &self.attn;
        match again {
            RecomputedAttention::None => inner.forward(ctx, &norm.forward(x)?, cache),
            RecomputedAttention::Core => inner.forward_checkpointed(ctx, &norm.forward(x)?),
            RecomputedAttention::Layer => {
                let (Normed { norm, inner }, ctx) = (self.attn.clone(), ctx.clone());
                let run =
                    move |x: &[Var]| Ok(vec![inner.forward(&ctx, &norm.forward(&x[0])?, None)?]);
                Ok(checkpoint(&[x], run)?.remove(0))
            }
        }
    }

    /// The modules of the block that are recomputed.
    pub fn recomputed(&self, again: RecomputeModules) -> impl Iterator<Item = &dyn Module> {
        let attention = again.attention == RecomputedAttention::Layer;
        let mlp = again.mlp == RecomputedMlp::Layer;
        let attention = attention.then_some(&self.attn as &dyn Module);
        attention.into_iter().chain(mlp.then_some(&self.mlp as &dyn Module))
    }
}
