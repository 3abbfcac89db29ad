//! The embeddings of BERT: tokens, positions and segments.
//!
//! Trailing comments give shapes: batch B, positions T, width C.

use ferrotron_autograd::Var;
use ferrotron_nn::{Context, Dropout, Embedding, Module, Norm, Scope};
use ferrotron_parallel::tensor_parallel::{
    SequenceParallel, TensorParallel, VocabParallelEmbedding,
};
use ferrotron_tensor::{Error, Result, Tensor};

use super::config::BertConfig;
use crate::model::block::NormPlacement;

/// The sum of a token's, a segment's and a position's vector, with a norm in a post-norm model.
#[derive(Debug, Clone, Module)]
pub(super) struct Embeddings {
    #[module(skip)]
    tp: TensorParallel,
    wte: VocabParallelEmbedding,
    segments: Embedding,
    wpe: Embedding,
    norm: Option<Norm>,
    dropout: Dropout,
    positions: usize,
}

impl Embeddings {
    pub fn new(
        scope: &Scope,
        wte: VocabParallelEmbedding,
        tp: &TensorParallel,
        config: &BertConfig,
    ) -> Result<Embeddings> {
        let residual = tp.residual_scope(scope);
        let table = |name: &str, count: usize| {
            Embedding::new(&residual.child(name), count, config.hidden_size, config.init())
        };
        let norm = || config.norm().build(&residual.child("embedding_norm"));
        Ok(Embeddings {
            tp: tp.clone(),
            wte,
            segments: table("wse", config.num_token_types)?,
            wpe: table("wpe", config.max_position_embeddings)?,
            norm: (config.norm_placement == NormPlacement::Post).then(norm),
            dropout: Dropout::new(&scope.child("dropout"), config.hidden_dropout)?,
            positions: config.max_position_embeddings,
        })
    }

    /// Token and segment ids (B, T) -> (B, T, C), or this rank's positions of the residual stream.
    pub fn forward(&self, ctx: &Context, tokens: &Tensor, segments: &Tensor) -> Result<Var> {
        let positions: Vec<u32> = ctx.residual.coordinates().map(|at| at as u32).collect();
        let last = positions.iter().max().map_or(0, |&last| last as usize);
        if last >= self.positions {
            let (length, most) = (last + 1, self.positions);
            let message = format!("{length} positions exceed max-position-embeddings {most}");
            return Err(Error::shape("bert", message));
        }
        if tokens.dims() != segments.dims() || tokens.dims().len() != 2 {
            let (tokens, segments) = (tokens.dims(), segments.dims());
            let message =
                format!("needs tokens and segments (B, T), got {tokens:?} and {segments:?}");
            return Err(Error::shape("bert", message));
        }
        let segments = match self.tp.sequence() {
            SequenceParallel::Off => segments.clone(),
            SequenceParallel::On => {
                let own = self.tp.group().local_range(segments.dims()[1]);
                segments.narrow(1, own.start, own.len())?.contiguous()?
            }
        };
        let positions = Tensor::constant(tokens.device(), &positions, &[positions.len()])?;
        let x = self.wte.forward(tokens)?; // (B, T, C)
        let x = x.add(&self.segments.forward(&segments)?)?; // (B, T, C)
        let mut x = x.add(&self.wpe.forward(&positions)?)?; // (B, T, C) + (T, C)
        if let Some(norm) = &self.norm {
            x = norm.forward(&x)?;
        }
        self.dropout.forward(ctx, &x)
    }
}
