//! The GPT model: GPT-2 style and Llama style from one configuration.
//!
//! Trailing comments give shapes: batch B, positions T, width C, heads H, head dim D, vocabulary V.

use ferrotron_autograd::ops::cross_entropy::Loss;
use ferrotron_autograd::{Offloader, Var};
use ferrotron_nn::{
    AttentionConfig, Axis, Context, Dropout, Embedding, KvCache, Module, Norm, Param, Scope,
    WeightDecay,
};
use ferrotron_parallel::mesh::Mesh;
use ferrotron_parallel::tensor_parallel::{
    HeadParams, SequenceParallel, TensorParallel, VocabParallelEmbedding,
};
use ferrotron_tensor::ops::cross_entropy::CrossEntropyConfig;
use ferrotron_tensor::{At, DType, Device, Error, Result, Tensor};
use std::sync::Arc;

use crate::model::logits_limit::max_logits_bytes;
use crate::model::transformer::Transformer;

pub use crate::model::block::Normalization;
pub use crate::model::config::{ActivationKind, GptConfig, PositionEmbedding};
pub use crate::model::recompute::{
    Recompute, RecomputeMethod, RecomputeModules, RecomputedAttention, RecomputedMlp, RegionInputs,
};
pub use crate::model::saved_activations::SavedActivations;
pub use crate::model::window_pattern::WindowPattern;
pub use crate::training::model::ModelChunk;

/// Token and position embeddings.
#[derive(Debug, Clone, Module)]
struct Embeddings {
    wte: VocabParallelEmbedding,
    wpe: Option<Embedding>,
    /// Factor of the token embeddings.
    #[module(skip)]
    scale: Option<f64>,
    dropout: Dropout,
}

impl Embeddings {
    fn new(
        scope: &Scope,
        wte: VocabParallelEmbedding,
        tp: &TensorParallel,
        config: &GptConfig,
    ) -> Result<Embeddings> {
        let learned = config.position_embedding_type == PositionEmbedding::LearnedAbsolute;
        let [t, c] = [config.max_position_embeddings, config.hidden_size];
        let positions = tp.residual_scope(scope).child("wpe");
        let wpe = learned.then(|| Embedding::new(&positions, t, c, config.init()));
        Ok(Embeddings {
            wte,
            wpe: wpe.transpose()?,
            scale: config
                .scale_embeddings
                .then(|| embedding_scale(c, scope.dtype()))
                .transpose()?,
            dropout: Dropout::new(&scope.child("dropout"), config.hidden_dropout)?,
        })
    }

    /// tokens (B, T) at `positions`, (T) or (B, T) -> (B, T, C), or this rank's `count` positions of the residual stream
    fn forward(
        &self,
        ctx: &Context,
        tokens: &Tensor,
        count: usize,
        positions: impl FnOnce() -> Result<Tensor>,
    ) -> Result<Var> {
        let mut x = self.wte.forward(tokens)?; // (B, T, C)
        if count != x.dims()[1] {
            let message = format!("{:?} tokens for {count} positions", tokens.dims());
            return Err(Error::shape("gpt", message));
        }
        if let Some(scale) = self.scale {
            x = x.mul_scalar(scale)?;
        }
        if let Some(wpe) = &self.wpe {
            x = x.add(&wpe.forward(&positions()?)?)?; // (B, T, C) + (T, C) or (B, T, C)
        }
        self.dropout.forward(ctx, &x)
    }
}

/// The root of the width, rounded to `dtype`, as `transformers` multiplies embeddings.
fn embedding_scale(width: usize, dtype: DType) -> Result<f64> {
    let root = (width as f64).sqrt();
    match dtype {
        DType::F64 => Ok(root),
        dtype => Tensor::full(&Device::cpu(1)?, DType::F32, &[], root)?.cast(dtype)?.item(),
    }
}

/// The final norm and the output projection (V, C), which is the token embedding if they are tied.
#[derive(Debug, Clone, Module)]
struct Head {
    norm_f: Norm,
    weight: Param,
}

/// A decoder-only transformer language model, or one rank's chunk of it.
///
/// ```
/// use ferrotron_models::gpt::{Gpt, GptConfig};
/// use ferrotron_nn::{Context, Mode, Scope};
/// use ferrotron_tensor::{DType, Device, Tensor};
/// let device = Device::cpu(1)?;
/// let gpt = Gpt::new(&Scope::new(&device, DType::F32, 1234), &GptConfig::gpt2(65, 2, 32, 4, 16))?;
/// let tokens = Tensor::from_slice(&device, &[7_u32; 2 * 16], &[2, 16])?;
/// let targets = Tensor::from_slice(&device, &[3_i64; 2 * 16], &[2, 16])?;
/// let loss = gpt.loss(&Context::new(1234, 0, Mode::Train, 2, 16), &tokens, &targets)?;
/// loss.sum.backward_scaled(1.0 / loss.num_valid_tokens()? as f64)?;
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Debug, Clone, Module)]
pub struct Gpt {
    #[module(skip)]
    config: GptConfig,
    #[module(skip)]
    chunk: ModelChunk,
    #[module(skip)]
    scope: Scope,
    #[module(skip)]
    tp: TensorParallel,
    embeddings: Option<Embeddings>,
    transformer: Transformer,
    head: Option<Head>,
}

impl Gpt {
    /// Describes the model. Memory is allocated when it first runs or is placed in optimizer buffers.
    pub fn new(scope: &Scope, config: &GptConfig) -> Result<Gpt> {
        Self::from_chunk(scope, &Mesh::single(), config, &ModelChunk::whole(config.num_layers))
    }

    /// Describes a chunk of the model, sharded over `mesh`.
    pub fn from_chunk(
        scope: &Scope,
        mesh: &Mesh,
        config: &GptConfig,
        part: &ModelChunk,
    ) -> Result<Gpt> {
        config.validate()?;
        let tp = mesh.tensor_parallel();
        let [v, c] = [config.vocab_size, config.hidden_size];
        // Tied embeddings on two stages are one parameter with two holders, whose gradients are partial.
        let shared = config.tie_embeddings && part.first != part.last;
        let ends = match shared {
            true => scope
                .clone()
                .replicated_along(Axis::Pipeline)
                .with_partial_gradients(Axis::Pipeline),
            false => scope.clone(),
        };
        let needs_wte = part.first || (part.last && config.tie_embeddings);
        let wte = needs_wte
            .then(|| VocabParallelEmbedding::new(&ends.child("wte"), &tp, v, c, config.init()))
            .transpose()?;
        let head_weight = || match (&wte, config.tie_embeddings) {
            (Some(wte), true) => Ok(wte.weight().clone()),
            _ => {
                let head = scope.child("lm_head").sharded_along(Axis::Tensor);
                let place = tp.shard(&[v, c], 0, &[v])?;
                let weight = head.param_at("weight", place, config.init(), WeightDecay::On);
                Ok::<_, Error>(weight.as_embedding())
            }
        };
        let head = part.last.then(|| {
            let norm_f = config.norm().build(&tp.residual_scope(scope).child("norm_f"));
            Ok::<_, Error>(Head { norm_f, weight: head_weight()? })
        });
        Ok(Gpt {
            config: config.clone(),
            chunk: part.clone(),
            scope: scope.clone(),
            head: head.transpose()?,
            embeddings: wte
                .filter(|_| part.first)
                .map(|wte| Embeddings::new(scope, wte, &tp, config))
                .transpose()?,
            transformer: Transformer::new(scope, mesh, part.blocks.clone(), |i| config.block(i))?,
            tp,
        })
    }

    /// Sets recomputation.
    #[must_use]
    pub fn with_recompute(mut self, recompute: Recompute) -> Gpt {
        self.transformer.set_recompute(recompute);
        self
    }

    /// Sets the storage of saved activations; `offloader` moves offloaded ones to host memory.
    #[must_use]
    pub fn with_saved_activations(
        mut self,
        saved: SavedActivations,
        offloader: Option<Arc<Offloader>>,
    ) -> Gpt {
        self.transformer.set_saved_activations(saved, offloader);
        self
    }

    /// The regions that backward recomputes, as the parameters that each reads, in order.
    pub(crate) fn recomputed_regions(&self) -> impl Iterator<Item = Vec<Param>> {
        self.transformer.recomputed_regions()
    }

    /// The configuration of the whole model.
    pub fn config(&self) -> &GptConfig {
        &self.config
    }

    /// The chunk of the model.
    pub fn chunk(&self) -> &ModelChunk {
        &self.chunk
    }

    /// The scope in which the model was created.
    pub fn scope(&self) -> &Scope {
        &self.scope
    }

    /// tokens (B, T) -> (B, T, C), the input of the first block. Only for chunks with the embeddings.
    pub fn embed(&self, ctx: &Context, tokens: &Tensor) -> Result<Var> {
        self.embed_at(ctx, tokens, None)
    }

    /// The same at given positions (B, T), which a learned position embedding takes; without them, tokens count through.
    pub fn embed_at(
        &self,
        ctx: &Context,
        tokens: &Tensor,
        positions: Option<&Tensor>,
    ) -> Result<Var> {
        let Some(positions) = positions else {
            return self.embed_run(ctx, tokens, ctx.residual.coordinates());
        };
        if positions.dims() != tokens.dims() || positions.dims().len() != 2 {
            let (tokens, positions) = (tokens.dims(), positions.dims());
            let message =
                format!("needs tokens and positions (B, T), got {tokens:?} and {positions:?}");
            return Err(Error::shape("gpt", message));
        }
        let residual = || match self.tp.sequence() {
            SequenceParallel::Off => Ok(positions.clone()),
            SequenceParallel::On => {
                let own = self.tp.group().local_range(positions.dims()[1]);
                positions.narrow(1, own.start, own.len())?.contiguous()
            }
        };
        self.embeddings()?.forward(ctx, tokens, ctx.residual.len(), residual)
    }

    fn embeddings(&self) -> Result<&Embeddings> {
        let absent = || Error::config("gpt", "this part of the model has no embeddings");
        self.embeddings.as_ref().ok_or_else(absent)
    }

    fn embed_run(
        &self,
        ctx: &Context,
        tokens: &Tensor,
        positions: impl Iterator<Item = usize>,
    ) -> Result<Var> {
        let positions: Vec<u32> = positions.map(|position| position as u32).collect();
        let most = self.config.max_position_embeddings;
        if let Some(&last) = positions.iter().max()
            && last as usize >= most
        {
            let message = format!("{} positions exceed max-position-embeddings {most}", last + 1);
            return Err(Error::shape("gpt", message));
        }
        let count = positions.len();
        let run = || Tensor::constant(tokens.device(), &positions, &[count]);
        self.embeddings()?.forward(ctx, tokens, count, run)
    }

    /// (B, T, C) -> (B, T, C), through the blocks.
    pub fn run_blocks(&self, ctx: &Context, x: Var) -> Result<Var> {
        self.transformer.forward(ctx, x)
    }

    /// The summed cross-entropy of (B, T, C), the output of the last block, against targets (B, T); negative targets
    /// are ignored. Only for chunks with the head.
    pub fn head_loss(&self, x: &Var, targets: &Tensor) -> Result<Loss> {
        let (head, config) = (self.head()?, CrossEntropyConfig::default());
        let x = head.norm_f.forward(x)?;
        let (params, limit) = (self.head_params(head), max_logits_bytes(targets.device()));
        self.tp.linear_cross_entropy(&x, params, targets, &config, limit).at("lm_head")
    }

    /// The logits (B, T, V) of (B, T, C), the output of the last block, on every tensor-parallel rank. Only for chunks
    /// with the head.
    pub fn logits(&self, x: &Var) -> Result<Var> {
        let head = self.head()?;
        self.tp.logits(&head.norm_f.forward(x)?, self.head_params(head)).at("lm_head")
    }

    fn head_params<'a>(&self, head: &'a Head) -> HeadParams<'a> {
        let softcap = self.config.final_logit_softcapping;
        HeadParams { softcap, ..HeadParams::from(&head.weight) }
    }

    fn head(&self) -> Result<&Head> {
        let absent = || Error::config("gpt", "this part of the model has no head");
        self.head.as_ref().ok_or_else(absent)
    }

    /// tokens (B, T) -> logits (B, T, V), for a whole model.
    pub fn forward(&self, ctx: &Context, tokens: &Tensor) -> Result<Var> {
        self.logits(&self.run_blocks(ctx, self.embed(ctx, tokens)?)?)
    }

    /// The summed cross-entropy of tokens (B, T) against targets (B, T), for a whole model; negative targets are
    /// ignored.
    pub fn loss(&self, ctx: &Context, tokens: &Tensor, targets: &Tensor) -> Result<Loss> {
        self.head_loss(&self.run_blocks(ctx, self.embed(ctx, tokens)?)?, targets)
    }

    /// The logits (B, V) for the position after `tokens` (B, T), which continue the cached positions of each sequence.
    pub fn next_token_logits(
        &self,
        ctx: &Context,
        tokens: &Tensor,
        caches: &mut [KvCache],
    ) -> Result<Var> {
        let x = self.embed_next(ctx, tokens, caches)?;
        self.last_logits(&self.run_cached_blocks(ctx, x, caches)?)
    }

    /// tokens (B, T), which continue the cached positions of each sequence -> (B, T, C), the input of the first block.
    pub(crate) fn embed_next(
        &self,
        ctx: &Context,
        tokens: &Tensor,
        caches: &[KvCache],
    ) -> Result<Var> {
        let cached = caches.first().map_or(Vec::new(), KvCache::lens);
        let count = tokens.dim(1)?;
        let first = cached.first().copied().unwrap_or(0);
        if cached.iter().all(|&cached| cached == first) {
            return self.embed_run(ctx, tokens, first..first + count);
        }
        let positions = cached.iter().flat_map(|&cached| cached..cached + count);
        let positions: Vec<u32> = positions.map(|position| position as u32).collect();
        let run = || Tensor::constant(tokens.device(), &positions, tokens.dims());
        self.embeddings()?.forward(ctx, tokens, count, run)
    }

    /// (B, T, C) -> (B, T, C), through the blocks, for positions that continue those of their caches.
    pub(crate) fn run_cached_blocks(
        &self,
        ctx: &Context,
        x: Var,
        caches: &mut [KvCache],
    ) -> Result<Var> {
        self.transformer.forward_cached(ctx, x, caches)
    }

    /// The logits (B, V) behind the last position of (B, T, C), the output of the last block.
    pub(crate) fn last_logits(&self, x: &Var) -> Result<Var> {
        let (batch, length) = (x.dims()[0], x.dims()[1]);
        let last = x.narrow(1, length - 1, 1)?; // (B, 1, C)
        self.logits(&last)?.reshape(&[batch, self.config.vocab_size]) // (B, V)
    }

    /// Empty caches for every block of this rank, of the heads that it has, with room for `positions` positions or the longest
    /// sequence, if that is less.
    pub fn caches(&self, batch: usize, positions: usize) -> Result<Vec<KvCache>> {
        let whole = self.config.attention();
        let config = AttentionConfig { groups: whole.groups / self.tp.group().size(), ..whole };
        let capacity = positions.min(self.config.max_position_embeddings);
        let (device, dtype) = (self.scope.device(), self.scope.dtype());
        let cache = |_| KvCache::new(device, dtype, batch, capacity, &config);
        (0..self.transformer.len()).map(cache).collect()
    }
}
