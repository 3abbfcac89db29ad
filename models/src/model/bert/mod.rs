//! BERT, an encoder that predicts masked tokens and the order of two segments. Devlin et al., arXiv 1810.04805, have
//! the norms after the residual additions; Shoeybi et al., arXiv 1909.08053, section 5.3, before attention and MLP.
//!
//! Trailing comments give shapes: batch B, positions T, width C, vocabulary V.

mod config;
mod embeddings;
mod heads;
mod training;

use ferrotron_autograd::{Offloader, Var};
use ferrotron_nn::{Context, Module, Norm, Param, Scope};
use ferrotron_parallel::mesh::Mesh;
use ferrotron_parallel::tensor_parallel::{TensorParallel, VocabParallelEmbedding};
use ferrotron_tensor::{Error, Result, Tensor};
use std::sync::Arc;

use crate::model::recompute::Recompute;
use crate::model::saved_activations::SavedActivations;
use crate::model::transformer::Transformer;
use crate::training::model::ModelChunk;

pub use crate::model::block::NormPlacement;
pub use config::BertConfig;
use embeddings::Embeddings;
use heads::{MaskedLmHead, PooledHead};

/// A bidirectional encoder with its pre-training heads or a head for choices, or one rank's chunk of it.
///
/// ```
/// use ferrotron_models::bert::{Bert, BertConfig, NormPlacement};
/// use ferrotron_nn::{Context, Scope};
/// use ferrotron_tensor::{DType, Device, Tensor};
/// let device = Device::cpu(1)?;
/// let config = BertConfig::new(NormPlacement::Post, 65, 2, 32, 4, 16);
/// let bert = Bert::new(&Scope::new(&device, DType::F32, 1234), &config)?;
/// let tokens = Tensor::from_slice(&device, &[7_u32; 2 * 16], &[2, 16])?;
/// let segments = Tensor::from_slice(&device, &[0_u32; 2 * 16], &[2, 16])?;
/// let output = bert.forward(&Context::eval(2, 16), &tokens, &segments)?;
/// assert_eq!(output.token_logits.dims(), [2, 16, 65]);
/// assert_eq!(output.order_logits.expect("there is a binary head").dims(), [2, 2]);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Debug, Clone, Module)]
pub struct Bert {
    #[module(skip)]
    config: BertConfig,
    #[module(skip)]
    chunk: ModelChunk,
    embeddings: Option<Embeddings>,
    transformer: Transformer,
    norm_f: Option<Norm>,
    masked_lm: Option<MaskedLmHead>,
    pooled: Option<PooledHead>,
}

/// The results of a whole model with the heads of pre-training.
#[derive(Debug)]
pub struct BertOutput {
    /// Logits of the token at each position, (B, T, V).
    pub token_logits: Var,
    /// Logits of the order of the two segments, (B, 2): first as in the text, then swapped. `None` without a binary
    /// head.
    pub order_logits: Option<Var>,
}

impl Bert {
    /// Describes the model. Memory is allocated when it first runs or is placed in optimizer buffers.
    ///
    /// # Errors
    /// Errors as [`BertConfig::validate`].
    pub fn new(scope: &Scope, config: &BertConfig) -> Result<Bert> {
        Self::from_chunk(scope, &Mesh::single(), config, &ModelChunk::whole(config.num_layers))
    }

    /// Describes a chunk of the model, sharded over `mesh`.
    ///
    /// # Errors
    /// Errors as [`BertConfig::validate`]; heads that the ranks along the tensor axis cannot share.
    pub fn from_chunk(
        scope: &Scope,
        mesh: &Mesh,
        config: &BertConfig,
        part: &ModelChunk,
    ) -> Result<Bert> {
        config.validate()?;
        let tp = mesh.tensor_parallel();
        let (v, c) = (config.vocab_size, config.hidden_size);
        // Without a head for tokens, the embedding is on the first stage alone.
        let tied = config.num_choices.is_none();
        let ends = if tied { mesh.tied_scope(scope) } else { scope.clone() };
        let wte = (part.first || (part.last && tied))
            .then(|| VocabParallelEmbedding::new(&ends.child("wte"), &tp, v, c, config.init()))
            .transpose()?;
        let weight = wte.as_ref().map(|wte| wte.weight().clone()).filter(|_| part.last && tied);
        let pooled = config.pooled_head().filter(|_| part.last);
        Ok(Bert {
            config: config.clone(),
            chunk: part.clone(),
            embeddings: wte
                .filter(|_| part.first)
                .map(|wte| Embeddings::new(scope, wte, &tp, config))
                .transpose()?,
            transformer: Transformer::new(scope, mesh, part.blocks.clone(), |_| config.block())?,
            norm_f: final_norm(scope, &tp, config, part),
            masked_lm: weight
                .map(|weight| MaskedLmHead::new(&scope.child("mlm_head"), &tp, config, weight))
                .transpose()?,
            pooled: pooled.map(|kind| PooledHead::new(scope, &tp, config, kind)).transpose()?,
        })
    }

    /// Sets recomputation.
    #[must_use]
    pub fn with_recompute(mut self, recompute: Recompute) -> Bert {
        self.transformer.set_recompute(recompute);
        self
    }

    /// Sets the storage of saved activations; `offloader` moves offloaded ones to host memory.
    #[must_use]
    pub fn with_saved_activations(
        mut self,
        saved: SavedActivations,
        offloader: Option<Arc<Offloader>>,
    ) -> Bert {
        self.transformer.set_saved_activations(saved, offloader);
        self
    }

    /// The configuration of the whole model.
    pub fn config(&self) -> &BertConfig {
        &self.config
    }

    /// The regions that backward recomputes, as the parameters that each reads, in order.
    fn recomputed_regions(&self) -> Vec<Vec<Param>> {
        self.transformer.recomputed_regions().collect()
    }

    /// Token and segment ids (B, T) -> (B, T, C), the input of the first block.
    fn embed(&self, ctx: &Context, tokens: &Tensor, segments: &Tensor) -> Result<Var> {
        let absent = || Error::config("bert", "this part of the model has no embeddings");
        self.embeddings.as_ref().ok_or_else(absent)?.forward(ctx, tokens, segments)
    }

    /// (B, T, C) -> (B, T, C), through the blocks and, behind the last one, the final norm.
    fn run_blocks(&self, ctx: &Context, x: Var) -> Result<Var> {
        let x = self.transformer.forward(ctx, x)?;
        match &self.norm_f {
            Some(norm) => norm.forward(&x),
            None => Ok(x),
        }
    }

    fn masked_lm(&self) -> Result<&MaskedLmHead> {
        let absent = || Error::config("bert", "this part of the model has no head for tokens");
        self.masked_lm.as_ref().ok_or_else(absent)
    }

    /// The head on the first position of a model that chooses among answers.
    fn multiple_choice(&self) -> Result<&PooledHead> {
        let absent = || Error::config("bert", "this part of the model has no head for choices");
        let head = self.pooled.as_ref().filter(|_| self.config.num_choices.is_some());
        head.ok_or_else(absent)
    }

    /// Token and segment ids (B, T) -> the logits of both heads, for a whole model.
    ///
    /// # Errors
    /// Ids beyond the configuration; more positions than `max_position_embeddings`; a chunk of a model; one that chooses
    /// among answers.
    pub fn forward(&self, ctx: &Context, tokens: &Tensor, segments: &Tensor) -> Result<BertOutput> {
        let x = self.run_blocks(ctx, self.embed(ctx, tokens, segments)?)?; // (B, T, C)
        let order = self.pooled.as_ref().map(|head| head.logits(ctx, &x));
        Ok(BertOutput {
            token_logits: self.masked_lm()?.logits(&x)?,
            order_logits: order.transpose()?,
        })
    }

    /// Token and segment ids (B x choices, T), the rows of a question one after another -> logits (B, choices), for a
    /// whole model with [`BertConfig::num_choices`].
    ///
    /// # Errors
    /// Errors of [`Bert::forward`]; a model with the heads of pre-training.
    pub fn choice_logits(&self, ctx: &Context, tokens: &Tensor, segments: &Tensor) -> Result<Var> {
        let x = self.run_blocks(ctx, self.embed(ctx, tokens, segments)?)?; // (B x choices, T, C)
        self.multiple_choice()?.logits(ctx, &x)
    }
}

/// The norm behind the last block of a pre-norm model.
fn final_norm(
    scope: &Scope,
    tp: &TensorParallel,
    config: &BertConfig,
    part: &ModelChunk,
) -> Option<Norm> {
    let wanted = part.last && config.norm_placement == NormPlacement::Pre;
    wanted.then(|| config.norm().build(&tp.residual_scope(scope).child("norm_f")))
}
