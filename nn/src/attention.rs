//! Causal multi-head and grouped-query self-attention.

use ferrotron_autograd::Var;
use ferrotron_autograd::ops::attention::packed_attention;
use ferrotron_tensor::ops::attention::{
    AttentionConfig as Scores, AttentionDropout, attention, split_packed,
};
use ferrotron_tensor::ops::rotary::RotaryTable;
use ferrotron_tensor::{At, DType, Device, Error, Place, Result, Tensor};

use crate::{Bias, Context, Init, Linear, Mode, Module, Param, Scope};

/// What an [`Attention`] is made of.
#[derive(Debug, Clone, Copy)]
pub struct AttentionConfig {
    /// Width of input and output, C.
    pub hidden: usize,
    /// Query heads, H.
    pub heads: usize,
    /// Key and value heads, G: H for multi-head, fewer for grouped-query (arXiv 2305.13245).
    pub groups: usize,
    /// Width of a head, D: usually C / H.
    pub head_dim: usize,
    /// Whether both layers have a bias.
    pub bias: Bias,
    /// Base of the rotary angles, or `None` without rotary positions.
    pub rotary_base: Option<f64>,
    /// Probability that an attention weight is dropped.
    pub dropout: f64,
    /// Start of the first layer.
    pub init: Init,
    /// Start of the second layer, which ends on the residual stream.
    pub residual_init: Init,
}

/// softmax(q k^T / sqrt(D)) v, causal: Vaswani et al., arXiv 1706.03762.
///
/// Two linear layers: `qkv` from C to (H + 2G) D, whose outputs are the query heads, then the key heads, then
/// the value heads; and `proj` from H D back to C.
///
/// ```
/// use ferrotron_autograd::Var;
/// use ferrotron_nn::{Attention, AttentionConfig, Bias, Context, Init, Mode, Scope};
/// use ferrotron_tensor::{DType, Device, Tensor};
/// let device = Device::cpu(1)?;
/// let init = Init::Normal { std: 0.02 };
/// // Four query heads of width 8 share two key and value heads.
/// let config = AttentionConfig {
///     hidden: 32, heads: 4, groups: 2, head_dim: 8, bias: Bias::No, rotary_base: Some(10_000.0),
///     dropout: 0.0, init, residual_init: init,
/// };
/// let attention = Attention::new(&Scope::new(&device, DType::F32, 1234).child("attn"), &config)?;
/// let x = Var::constant(Tensor::zeros(&device, DType::F32, &[2, 10, 32])?);
/// let y = attention.forward(&Context::new(1234, 0, Mode::Train, 2, 10), &x, None)?;
/// assert_eq!(y.dims(), [2, 10, 32]);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Attention {
    path: String,
    qkv: Linear,
    proj: Linear,
    config: AttentionConfig,
}

impl Attention {
    /// Makes the two layers.
    ///
    /// Errors unless the groups divide the heads, no size is 0 and, with rotary positions, the width of a head
    /// is even.
    pub fn new(scope: &Scope, config: &AttentionConfig) -> Result<Attention> {
        let AttentionConfig { hidden, heads, groups, head_dim, .. } = *config;
        if heads == 0 || groups == 0 || head_dim == 0 || heads % groups != 0 {
            return Err(Error::config(
                "attention",
                format!(
                    "{groups} key/value groups must divide {heads} heads (of width {head_dim})"
                ),
            )
            .at(scope.path()));
        }
        if config.rotary_base.is_some() && head_dim % 2 != 0 {
            return Err(Error::config(
                "attention",
                format!("rotary positions need an even head width, got {head_dim}"),
            )
            .at(scope.path()));
        }
        let width = (heads + 2 * groups) * head_dim;
        Ok(Attention {
            path: scope.path().to_string(),
            qkv: Linear::new(&scope.child("qkv"), hidden, width, config.bias, config.init)?,
            proj: Linear::new(
                &scope.child("proj"),
                heads * head_dim,
                hidden,
                config.bias,
                config.residual_init,
            )?,
            config: *config,
        })
    }

    /// (B, T, C) -> (B, T, C). With a cache, the positions follow those that it holds, and it takes up
    /// the new ones; no gradient then flows back through attention.
    ///
    /// Errors if `x` has other dims, or the cache has no room for T more positions.
    pub fn forward(&self, ctx: &Context, x: &Var, cache: Option<&mut KvCache>) -> Result<Var> {
        let AttentionConfig { heads, groups, head_dim, .. } = self.config;
        let &[batch, positions, _] = x.dims() else {
            return Err(Error::shape("attention", format!("needs (B, T, C), got {:?}", x.dims()))
                .at(&self.path));
        };
        let qkv = self.qkv.forward(x)?; // (B, T, (H + 2G) D)
        let qkv =
            self.turn(ctx, qkv, cache.as_deref().map_or(0, |cache| cache.len)).at(&self.path)?;
        let scores = self.scores(ctx, positions).at(&self.path)?;
        let y = match cache {
            None => packed_attention(&qkv, heads, groups, &scores).at(&self.path)?, // (B, T, H D)
            Some(cache) => {
                // (B, T, H, D), (B, T, G, D) twice
                let (q, k, v) = split_packed(qkv.value(), heads, groups).at(&self.path)?;
                let (k, v) = cache.append(&k, &v).at(&self.path)?; // (B, S, G, D)
                let (y, _) = attention(&q, &k, &v, &scores).at(&self.path)?; // (B, T, H, D)
                let joined = y.reshape(&[batch, positions, heads * head_dim]);
                Var::constant(joined.at(&self.path)?)
            }
        };
        self.proj.forward(&y) // (B, T, C)
    }

    /// Turns queries and keys by their positions.
    fn turn(&self, ctx: &Context, qkv: Var, cached: usize) -> Result<Var> {
        let AttentionConfig { heads, groups, head_dim, rotary_base, .. } = self.config;
        let Some(base) = rotary_base else { return Ok(qkv) };
        let packed = qkv.dims().to_vec();
        let start = ctx.sequence.pieces.first().map_or(0, |&(offset, _)| offset) + cached;
        let table =
            RotaryTable::new(qkv.device(), qkv.dtype(), start..start + packed[1], head_dim, base)?;
        let by_head = qkv.reshape(&[packed[0], packed[1], heads + 2 * groups, head_dim])?; // (B, T, H + 2G, D)
        by_head.rotary(&table, heads + groups)?.reshape(&packed)
    }

    fn scores(&self, ctx: &Context, positions: usize) -> Result<Scores> {
        let mut scores = Scores::causal(self.config.head_dim);
        if ctx.mode == Mode::Train && self.config.dropout > 0.0 {
            // The global tensor of weights is (samples, heads, positions, positions).
            let heads = self.config.heads;
            let place = Place::new(
                &[ctx.batch.global, heads, positions, positions],
                &[&ctx.batch.pieces, &[(0, heads)], &[(0, positions)], &[(0, positions)]],
            )?;
            let key = ctx.key(&format!("{}.dropout", self.path));
            scores.dropout = Some(AttentionDropout::new(self.config.dropout, key, place)?);
        }
        Ok(scores)
    }
}

impl Module for Attention {
    fn visit(&self, f: &mut dyn FnMut(&Param)) {
        self.qkv.visit(f);
        self.proj.visit(f);
    }
}

/// Keys and values of the positions seen so far, for generation.
#[derive(Debug, Clone)]
pub struct KvCache {
    keys: Tensor,   // (B, capacity, G, D)
    values: Tensor, // (B, capacity, G, D)
    len: usize,
}

impl KvCache {
    /// Room for `capacity` positions of `batch` sequences: 2 x batch x capacity x G x D elements of `dtype`.
    pub fn new(
        device: &Device,
        dtype: DType,
        batch: usize,
        capacity: usize,
        config: &AttentionConfig,
    ) -> Result<KvCache> {
        let dims = [batch, capacity, config.groups, config.head_dim];
        Ok(KvCache {
            keys: Tensor::zeros(device, dtype, &dims)?,
            values: Tensor::zeros(device, dtype, &dims)?,
            len: 0,
        })
    }

    /// How many positions are held.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Takes up keys and values (B, T, G, D); returns all of them so far.
    fn append(&mut self, keys: &Tensor, values: &Tensor) -> Result<(Tensor, Tensor)> {
        let (start, count) = (self.len, keys.dims()[1]);
        if start + count > self.keys.dims()[1] {
            return Err(Error::shape(
                "kv_cache",
                format!("{start} + {count} positions exceed the room for {}", self.keys.dims()[1]),
            ));
        }
        self.keys.narrow_mut(1, start, count, |place| place.write(keys))?;
        self.values.narrow_mut(1, start, count, |place| place.write(values))?;
        self.len += count;
        Ok((self.keys.narrow(1, 0, self.len)?, self.values.narrow(1, 0, self.len)?))
    }
}
