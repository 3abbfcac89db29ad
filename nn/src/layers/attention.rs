//! Causal multi-head and grouped-query self-attention.

use ferrotron_autograd::Var;
use ferrotron_tensor::{DType, Device, Error, Result, Tensor};

use crate::{AttentionHeads, Bias, Context, Init, Linear, Module, Scope};

/// Configuration of an [`Attention`].
#[derive(Debug, Clone, Copy)]
pub struct AttentionConfig {
    /// Width of input and output, C.
    pub hidden: usize,
    /// Query heads, H.
    pub heads: usize,
    /// Key and value heads, G: H for multi-head, fewer for grouped-query attention (arXiv 2305.13245).
    pub groups: usize,
    /// Dim of a head, D: usually C / H.
    pub head_dim: usize,
    /// Whether both layers have a bias.
    pub bias: Bias,
    /// Base of the rotary angles, or `None` without rotary positions.
    pub rotary_base: Option<f64>,
    /// Probability that an attention weight is dropped.
    pub dropout: f64,
    /// Initialisation of the first layer.
    pub init: Init,
    /// Initialisation of the second layer, whose output is added to the residual stream.
    pub residual_init: Init,
}

impl AttentionConfig {
    /// Output widths of the first layer for queries, keys and values, (H + 2G) D in total.
    pub fn packed_widths(&self) -> [usize; 3] {
        [self.heads, self.groups, self.groups].map(|heads| heads * self.head_dim)
    }
}

/// Causal self-attention, softmax(q k^T / sqrt(D)) v: Vaswani et al., arXiv 1706.03762.
///
/// It has two linear layers. `qkv` maps C to (H + 2G) D: query heads, then key heads, then value heads. `proj` maps H
/// D back to C.
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
#[derive(Debug, Clone, Module)]
pub struct Attention {
    qkv: Linear,
    heads: AttentionHeads,
    proj: Linear,
}

impl Attention {
    /// Creates the two layers.
    ///
    /// Errors unless the groups divide the heads, no size is 0 and, with rotary positions, the head dim is even.
    pub fn new(scope: &Scope, config: &AttentionConfig) -> Result<Attention> {
        let AttentionConfig { hidden, heads, bias, init, residual_init, .. } = *config;
        let (proj, widths) = (scope.child("proj"), config.packed_widths());
        Ok(Attention {
            heads: AttentionHeads::new(scope, config, 0..heads)?,
            qkv: Linear::new(&scope.child("qkv"), hidden, widths.iter().sum(), bias, init)?
                .packed(&widths)?,
            proj: Linear::new(&proj, widths[0], hidden, bias, residual_init)?,
        })
    }

    /// (B, T, C) -> (B, T, C). With a cache, positions continue after the cached ones, the new keys and values are
    /// appended, and no gradient flows back through attention.
    ///
    /// Errors if `x` has other dims, or the cache has no capacity for T more positions.
    pub fn forward(&self, ctx: &Context, x: &Var, cache: Option<&mut KvCache>) -> Result<Var> {
        let qkv = self.qkv.forward(x)?; // (B, T, (H + 2G) D)
        let y = self.heads.forward(ctx, qkv, cache)?; // (B, T, H D)
        self.proj.forward(&y) // (B, T, C)
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
    /// An empty cache for `capacity` positions of `batch` sequences: 2 x batch x capacity x G x D elements of
    /// `dtype`.
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

    /// Number of cached positions.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the cache is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Removes all positions and keeps the memory.
    pub fn clear(&mut self) {
        self.len = 0;
    }

    /// Appends keys and values (B, T, G, D), and returns all cached ones.
    pub(crate) fn append(&mut self, keys: &Tensor, values: &Tensor) -> Result<(Tensor, Tensor)> {
        let (start, count) = (self.len, keys.dims()[1]);
        if start + count > self.keys.dims()[1] {
            return Err(Error::shape(
                "kv_cache",
                format!("{start} + {count} positions exceed the room for {}", self.keys.dims()[1]),
            ));
        }
        self.keys.narrow_mut(1, start, count, |place| place.copy_from(keys))?;
        self.values.narrow_mut(1, start, count, |place| place.copy_from(values))?;
        self.len += count;
        Ok((self.keys.narrow(1, 0, self.len)?, self.values.narrow(1, 0, self.len)?))
    }
}
