//! Multi-head and grouped-query self-attention, causal or not.

use ferrotron_autograd::Var;
use ferrotron_tensor::Result;

use crate::{AttentionConfig, AttentionHeads, Context, KvCache, Linear, Module, Scope};

/// Self-attention, softmax(q k^T / sqrt(D)) v: Vaswani et al., arXiv 1706.03762. [`AttentionConfig`] says which keys a
/// query sees; lengths of padded sequences and packed documents come with the [`Context`].
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
///     groups: 2, bias: Bias::No, rotary_base: Some(10_000.0), init, residual_init: init,
///     ..AttentionConfig::new(32, 4)
/// };
/// let attention = Attention::new(&Scope::new(&device, DType::F32, 1234).child("attn"), &config)?;
/// let x = Var::constant(Tensor::zeros(&device, DType::F32, &[2, 10, 32])?);
/// let y = attention.forward(&Context::new(1234, 0, Mode::Train, 2, 10), &x, None)?;
/// assert_eq!(y.dims(), [2, 10, 32]);
///
/// // An encoder on padded sequences: the second one ends after 7 of 10 positions.
/// use ferrotron_nn::AttentionMask;
/// let config = AttentionConfig { mask: AttentionMask::None, ..AttentionConfig::new(32, 4) };
/// let attention = Attention::new(&Scope::new(&device, DType::F32, 1234).child("attn"), &config)?;
/// let ctx = Context::new(1234, 0, Mode::Train, 2, 10).with_key_lengths(&[10, 7])?;
/// let x = Var::constant(Tensor::zeros(&device, DType::F32, &[2, 10, 32])?);
/// assert_eq!(attention.forward(&ctx, &x, None)?.dims(), [2, 10, 32]);
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
            qkv: Linear::new(
                &scope.child("qkv"),
                hidden,
                widths.iter().sum(),
                config.qkv_bias(),
                init,
            )?
            .packed(&widths)?,
            proj: Linear::new(&proj, widths[0], hidden, bias, residual_init)?,
        })
    }

    /// (B, T, C) -> (B, T, C). With a cache, positions continue after the cached ones, the new keys and values are
    /// appended, and no gradient flows back through attention.
    ///
    /// Errors if `x` has other dims, or the cache has no capacity for T more positions.
    pub fn forward(&self, ctx: &Context, x: &Var, cache: Option<&mut KvCache>) -> Result<Var> {
        self.with_optional_bias(ctx, x, None, cache)
    }

    /// Like [`forward`](Attention::forward), with `bias` added to the scores: dims that broadcast to (B, H, T, S), with S
    /// = T, or all positions so far with a cache. It gets a gradient. Several layers may share one; an
    /// [`AttentionBias`](crate::AttentionBias) is that of T5 or ALiBi.
    ///
    /// Errors as `forward`, or if the bias has other dims.
    ///
    /// ```
    /// use ferrotron_autograd::{Var, WeightGrads, backward};
    /// use ferrotron_nn::{Attention, AttentionConfig, Context, Init, Scope, WeightDecay};
    /// use ferrotron_tensor::{DType, Device, Tensor};
    /// let device = Device::cpu(1)?;
    /// let scope = Scope::new(&device, DType::F32, 1234);
    /// let attention = Attention::new(&scope.child("attn"), &AttentionConfig::new(32, 4))?;
    /// // A trained number for each head and key, the same for every sample and query.
    /// let weight = scope.param("key_bias", &[4, 1, 10], Init::Zeros, WeightDecay::Off);
    /// let x = Var::constant(Tensor::full(&device, DType::F32, &[2, 10, 32], 0.5)?);
    /// let y = attention.forward_with_bias(&Context::eval(2, 10), &x, &weight.var()?, None)?;
    /// backward(&[(&y, y.value().clone())], WeightGrads::Now)?.run()?;
    /// assert!(weight.leaf().gradient()?.is_some());
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn forward_with_bias(
        &self,
        ctx: &Context,
        x: &Var,
        bias: &Var,
        cache: Option<&mut KvCache>,
    ) -> Result<Var> {
        self.with_optional_bias(ctx, x, Some(bias), cache)
    }

    fn with_optional_bias(
        &self,
        ctx: &Context,
        x: &Var,
        bias: Option<&Var>,
        cache: Option<&mut KvCache>,
    ) -> Result<Var> {
        let qkv = self.qkv.forward(x)?; // (B, T, (H + 2G) D)
        let y = self.heads.forward(ctx, qkv, bias, cache)?; // (B, T, H D)
        self.proj.forward(&y) // (B, T, C)
    }
}
