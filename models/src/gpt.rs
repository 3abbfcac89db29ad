//! The GPT: GPT-2 style and Llama style from one configuration.
//!
//! Shapes are trailing comments in one alphabet: batch B, positions T, width C, heads H, head width D,
//! vocabulary V.

use ferrotron_autograd::Var;
use ferrotron_autograd::ops::cross_entropy::Loss;
use ferrotron_nn::{
    Attention, Bias, Context, Dropout, Embedding, KvCache, Linear, Mlp, Module, Norm, Param, Scope,
};
use ferrotron_tensor::ops::cross_entropy::CrossEntropyConfig;
use ferrotron_tensor::{At, Error, Result, Tensor};

pub use crate::config::{ActivationKind, GptConfig, Normalization, PositionEmbedding};

/// One transformer block, norms first.
#[derive(Debug, Clone)]
pub struct Block {
    norm_1: Norm,
    attn: Attention,
    norm_2: Norm,
    mlp: Mlp,
    dropout_1: Dropout,
    dropout_2: Dropout,
}

impl Block {
    fn new(scope: &Scope, config: &GptConfig) -> Result<Block> {
        Ok(Block {
            norm_1: config.norm(&scope.child("norm_1")),
            attn: Attention::new(&scope.child("attn"), &config.attention())?,
            norm_2: config.norm(&scope.child("norm_2")),
            mlp: Mlp::new(&scope.child("mlp"), &config.mlp())?,
            dropout_1: Dropout::new(&scope.child("dropout_1"), config.hidden_dropout)?,
            dropout_2: Dropout::new(&scope.child("dropout_2"), config.hidden_dropout)?,
        })
    }

    fn forward(&self, ctx: &Context, x: &Var, cache: Option<&mut KvCache>) -> Result<Var> {
        let y = self.attn.forward(ctx, &self.norm_1.forward(x)?, cache)?;
        let x = x.add(&self.dropout_1.forward(ctx, &y)?)?; // (B, T, C)
        let y = self.mlp.forward(&self.norm_2.forward(&x)?)?;
        x.add(&self.dropout_2.forward(ctx, &y)?) // (B, T, C)
    }
}

impl Module for Block {
    fn visit(&self, f: &mut dyn FnMut(&Param)) {
        self.norm_1.visit(f);
        self.attn.visit(f);
        self.norm_2.visit(f);
        self.mlp.visit(f);
    }
}

/// A decoder-only transformer language model.
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
/// loss.sum.backward_scaled(1.0 / loss.counted as f64)?;
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Gpt {
    config: GptConfig,
    wte: Embedding,
    wpe: Option<Embedding>,
    dropout: Dropout,
    blocks: Vec<Block>,
    norm_f: Norm,
    lm_head: Option<Linear>,
}

impl Gpt {
    /// Describes the model; its memory is taken when it first runs or is given to an optimizer.
    pub fn new(scope: &Scope, config: &GptConfig) -> Result<Gpt> {
        config.validate()?;
        let learned = config.position_embedding_type == PositionEmbedding::LearnedAbsolute;
        let [v, c, t] = [config.vocab_size, config.hidden_size, config.max_position_embeddings];
        Ok(Gpt {
            config: config.clone(),
            wte: Embedding::new(&scope.child("wte"), v, c, config.init())?,
            wpe: learned
                .then(|| Embedding::new(&scope.child("wpe"), t, c, config.init()))
                .transpose()?,
            dropout: Dropout::new(&scope.child("dropout"), config.hidden_dropout)?,
            blocks: (0..config.num_layers)
                .map(|i| Block::new(&scope.child(&format!("blocks.{i}")), config))
                .collect::<Result<_>>()?,
            norm_f: config.norm(&scope.child("norm_f")),
            lm_head: (!config.tie_embeddings)
                .then(|| Linear::new(&scope.child("lm_head"), c, v, Bias::No, config.init()))
                .transpose()?,
        })
    }

    /// What the model is made of.
    pub fn config(&self) -> &GptConfig {
        &self.config
    }

    /// tokens (B, T) -> the last norm's output (B, T, C)
    fn hidden(
        &self,
        ctx: &Context,
        tokens: &Tensor,
        mut caches: Option<&mut [KvCache]>,
    ) -> Result<Var> {
        let &[_, length] = tokens.dims() else {
            return Err(Error::shape(
                "gpt",
                format!("needs tokens (B, T), got {:?}", tokens.dims()),
            ));
        };
        let start = caches.as_deref().and_then(|caches| caches.first()).map_or(0, KvCache::len);
        if start + length > self.config.max_position_embeddings {
            return Err(Error::shape(
                "gpt",
                format!(
                    "{} positions exceed max-position-embeddings {}",
                    start + length,
                    self.config.max_position_embeddings
                ),
            ));
        }
        let mut x = self.wte.forward(tokens)?; // (B, T, C)
        if let Some(wpe) = &self.wpe {
            let positions: Vec<u32> =
                (start..start + length).map(|position| position as u32).collect();
            let positions = Tensor::from_slice(tokens.device(), &positions, &[length])?;
            x = x.add(&wpe.forward(&positions)?)?; // (B, T, C) + (T, C)
        }
        x = self.dropout.forward(ctx, &x)?;
        for (i, block) in self.blocks.iter().enumerate() {
            let cache = caches.as_deref_mut().map(|caches| &mut caches[i]);
            x = block.forward(ctx, &x, cache)?; // (B, T, C)
        }
        self.norm_f.forward(&x)
    }

    /// tokens (B, T) -> logits (B, T, V)
    pub fn forward(&self, ctx: &Context, tokens: &Tensor) -> Result<Var> {
        self.hidden(ctx, tokens, None)?.linear(&self.head()?, None).at("lm_head")
    }

    /// The summed cross-entropy of tokens (B, T) against targets (B, T), negative ones ignored.
    pub fn loss(&self, ctx: &Context, tokens: &Tensor, targets: &Tensor) -> Result<Loss> {
        let x = self.hidden(ctx, tokens, None)?; // (B, T, C)
        let (head, config) = (self.head()?, CrossEntropyConfig::default());
        x.linear_cross_entropy(&head, targets, &config, MAX_LOGITS_BYTES).at("lm_head")
    }

    /// The logits (B, V) of the position after `tokens` (B, T), which follow those in the caches.
    pub fn next_token_logits(
        &self,
        ctx: &Context,
        tokens: &Tensor,
        caches: &mut [KvCache],
    ) -> Result<Var> {
        let x = self.hidden(ctx, tokens, Some(caches))?; // (B, T, C)
        let (batch, length) = (x.dims()[0], x.dims()[1]);
        let last = x.narrow(1, length - 1, 1)?.reshape(&[batch, self.config.hidden_size])?; // (B, C)
        last.linear(&self.head()?, None).at("lm_head") // (B, V)
    }

    /// Empty caches for every block.
    pub fn caches(&self, scope: &Scope, batch: usize) -> Result<Vec<KvCache>> {
        let (wte, capacity) = (self.wte.weight().leaf(), self.config.max_position_embeddings);
        let cache = |_: &Block| {
            KvCache::new(scope.device(), wte.dtype(), batch, capacity, &self.config.attention())
        };
        self.blocks.iter().map(cache).collect()
    }

    /// The head's weight (V, C): the token embedding itself if they are tied.
    fn head(&self) -> Result<Var> {
        self.lm_head.as_ref().map_or(self.wte.weight(), Linear::weight).var()
    }
}

/// Logits of up to this many bytes are kept from forward to backward; beyond, they are computed twice.
const MAX_LOGITS_BYTES: usize = 256 << 20;

impl Module for Gpt {
    fn visit(&self, f: &mut dyn FnMut(&Param)) {
        self.wte.visit(f);
        self.wpe.iter().for_each(|wpe| wpe.visit(f));
        self.blocks.iter().for_each(|block| block.visit(f));
        self.norm_f.visit(f);
        match &self.lm_head {
            Some(head) => head.visit(f),
            None => self.wte.visit(f),
        }
    }
}
