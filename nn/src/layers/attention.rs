//! Causal multi-head and grouped-query self-attention.

use ferrotron_autograd::Var;
use ferrotron_tensor::Result;

use crate::{AttentionConfig, AttentionHeads, Context, KvCache, Linear, Module, Scope};

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
