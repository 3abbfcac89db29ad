//! Multi-head cross-attention: queries from one sequence, keys and values from another.

use ferrotron_autograd::Var;
use ferrotron_autograd::ops::attention::attention;
use ferrotron_tensor::ops::attention::{AttentionConfig as Scores, AttentionMask, KeyRanges};
use ferrotron_tensor::{At, Error, Result};

use crate::{AttentionConfig, AttentionHeads, Context, DimShard, Linear, Module, Scope};

/// Cross-attention, softmax(q k^T / sqrt(D)) v with q from x, and k and v from a memory. It is the decoder's second
/// attention of Vaswani et al., arXiv 1706.03762. Every query sees all positions of the memory, or those within the
/// lengths of a padded memory ([`Context::with_memory_lengths`]).
///
/// It has three linear layers. `q` maps C to H D, `kv` maps the width of the memory to 2 G D (key heads, then value
/// heads), and `proj` maps H D back to C.
///
/// ```
/// use ferrotron_autograd::Var;
/// use ferrotron_nn::{AttentionConfig, Bias, Context, CrossAttention, Init, Scope};
/// use ferrotron_tensor::{DType, Device, Tensor};
/// let device = Device::cpu(1)?;
/// let init = Init::Normal { std: 0.02 };
/// let config = AttentionConfig {
///     groups: 2, bias: Bias::No, init, residual_init: init, ..AttentionConfig::new(32, 4)
/// };
/// // The memory has width 48: the output of an encoder, or of a vision model.
/// let cross = CrossAttention::new(&Scope::new(&device, DType::F32, 1234).child("cross"), &config, 48)?;
/// let var = |dims: &[usize]| Tensor::zeros(&device, DType::F32, dims).map(Var::constant);
/// let y = cross.forward(&Context::eval(2, 10), &var(&[2, 10, 32])?, &var(&[2, 7, 48])?)?;
/// assert_eq!(y.dims(), [2, 10, 32]);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Debug, Clone, Module)]
pub struct CrossAttention {
    q: Linear,
    kv: Linear,
    heads: AttentionHeads,
    proj: Linear,
}

impl CrossAttention {
    /// Creates the three layers, for a memory of `memory_width` features.
    ///
    /// Errors as [`Attention::new`](crate::Attention::new), and with rotary positions or a window, since positions of two
    /// sequences have no distance, or with norms of queries and keys.
    pub fn new(
        scope: &Scope,
        config: &AttentionConfig,
        memory_width: usize,
    ) -> Result<CrossAttention> {
        let AttentionConfig { hidden, heads, bias, init, residual_init, .. } = *config;
        for (given, what, field) in [
            (config.rotary_base.is_some(), "rotary positions", "rotary_base"),
            (config.window.is_some(), "window", "window"),
            (config.position_bias.is_some(), "bias by position", "position_bias"),
            (config.qk_norm.is_some(), "norms of queries and keys", "qk_norm"),
        ] {
            if given {
                let message = format!("cross-attention has no {what}: set `{field}: None`");
                return Err(Error::config("cross_attention", message).at(scope.path()));
            }
        }
        let ([q, k, v], first) = (config.packed_widths(), config.qkv_bias());
        // Every query sees all positions of the memory.
        let config = AttentionConfig { mask: AttentionMask::None, ..*config };
        Ok(CrossAttention {
            heads: AttentionHeads::new(scope, &config, 0..heads)?,
            q: Linear::new(&scope.child("q"), hidden, q, first, init)?,
            kv: Linear::new(&scope.child("kv"), memory_width, k + v, first, init)?
                .packed(&[k, v])?,
            proj: Linear::new(&scope.child("proj"), q, hidden, bias, residual_init)?,
        })
    }

    /// x (B, T, C) and memory (B, S, memory width) -> (B, T, C).
    ///
    /// Errors if the two have other dims, or a length of the memory exceeds S.
    pub fn forward(&self, ctx: &Context, x: &Var, memory: &Var) -> Result<Var> {
        let (q, kv) = (self.q.forward(x)?, self.kv.forward(memory)?); // (B, T, H D), (B, S, 2 G D)
        let y = self.attend(ctx, &q, &kv, memory.dims()).at(self.heads.path())?; // (B, T, H D)
        self.proj.forward(&y)
    }

    fn attend(&self, ctx: &Context, q: &Var, kv: &Var, memory_dims: &[usize]) -> Result<Var> {
        let (&[batch, queries, width], &[memories, keys, both]) = (q.dims(), kv.dims()) else {
            let message =
                format!("needs (B, T, C) and (B, S, ..), got {:?}, {:?}", q.dims(), kv.dims());
            return Err(Error::shape("cross_attention", message));
        };
        if batch != memories {
            let message = format!("{batch} samples attend to the memory of {memories}");
            return Err(Error::shape("cross_attention", message));
        }
        let (heads, groups) = (self.heads.heads(), self.heads.groups());
        let kv = kv.split(&[both / 2, both / 2], 2)?;
        let by_head = |x: &Var, len: usize, heads: usize| {
            x.reshape(&[batch, len, heads, width / self.heads.heads()])
        };
        let (q, k) = (by_head(q, queries, heads)?, by_head(&kv[0], keys, groups)?);
        let v = by_head(&kv[1], keys, groups)?;
        let dropout = self.heads.dropout_key(ctx);
        let memory = DimShard::unsharded(keys);
        // Key lengths and documents of the context are those of x.
        let whole = Context { key_ranges: None, ..ctx.clone() };
        let scores = self.heads.attention_config(&whole, dropout, &ctx.sequence, &memory)?;
        let length = ctx.memory_ranges.as_ref().map_or(0, KeyRanges::end);
        if length > keys {
            let message = format!(
                "a memory length of {length} exceeds the {keys} positions of the memory {memory_dims:?}"
            );
            return Err(Error::shape("cross_attention", message));
        }
        let scores = Scores { ranges: ctx.memory_ranges.clone(), ..scores };
        attention(&q, &k, &v, &scores)?.reshape(&[batch, queries, width])
    }
}
