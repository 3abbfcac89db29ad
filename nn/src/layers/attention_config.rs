//! The configuration of self-attention.

use ferrotron_tensor::ops::attention::AttentionMask;

use crate::{Bias, Init, NormGain, PositionBias, RopeScaling};

/// Configuration of an [`Attention`](crate::Attention).
///
/// ```
/// use ferrotron_nn::{AttentionConfig, AttentionMask};
/// // An encoder's layer; padding is in the context: `Context::with_key_lengths`.
/// let bert = AttentionConfig { mask: AttentionMask::None, dropout: 0.1, ..AttentionConfig::new(768, 12) };
/// assert_eq!((bert.groups, bert.head_dim), (12, 64));
/// ```
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
    /// Whether queries see only keys up to their own position (a decoder) or all keys (an encoder). Lengths of padded
    /// sequences and packed documents are facts of a batch: see [`Context::key_ranges`](crate::Context::key_ranges).
    pub mask: AttentionMask,
    /// Sliding window: a query sees keys at a distance below this. With a causal mask these are its own position and
    /// the window - 1 before it (Mistral).
    pub window: Option<usize>,
    /// Factor of the scores: 1 / sqrt(D) without it.
    pub softmax_scale: Option<f64>,
    /// Soft cap of the scores, c tanh(s / c) (Gemma 2).
    pub softcap: Option<f64>,
    /// Whether the layers have a bias.
    pub bias: Bias,
    /// Whether the first layer has a bias, if not as [`bias`](AttentionConfig::bias) says: Qwen 2 has one there alone.
    pub qkv_bias: Option<Bias>,
    /// Base of the rotary angles, or `None` without rotary positions.
    pub rotary_base: Option<f64>,
    /// Scaling of the rotary frequencies for sequences longer than those of the first training (Llama 3.1).
    pub rope_scaling: Option<RopeScaling>,
    /// Elements of a head, from the first on, that are rotated: all, or fewer (GPT-NeoX).
    pub rotary_dim: Option<usize>,
    /// Bias of the scores by the distance of query and key: ALiBi, or T5's relative positions.
    pub position_bias: Option<PositionBias>,
    /// RMSNorm of each head's queries and of its keys, before the rotation, with a weight of D for all heads. The
    /// number is added to the mean of the squares (Qwen 3).
    pub qk_norm: Option<f64>,
    /// The gain of those norms: their weight, or 1 + weight (Gemma 3).
    pub qk_norm_gain: NormGain,
    /// Probability that an attention weight is dropped.
    pub dropout: f64,
    /// Initialisation of the first layer.
    pub init: Init,
    /// Initialisation of the second layer, whose output is added to the residual stream.
    pub residual_init: Init,
}

impl AttentionConfig {
    /// Causal multi-head attention of `heads` heads of width `hidden / heads`, with biases, without rotary positions and
    /// dropout; initial weights have deviation 0.02. If `heads` do not divide `hidden`, give `head_dim`.
    pub const fn new(hidden: usize, heads: usize) -> AttentionConfig {
        let init = Init::Normal { std: 0.02 };
        AttentionConfig {
            hidden,
            heads,
            groups: heads,
            head_dim: match hidden.checked_rem(heads) {
                Some(0) => hidden / heads,
                _ => 0, // refused, unless it is replaced
            },
            mask: AttentionMask::Causal,
            window: None,
            softmax_scale: None,
            softcap: None,
            bias: Bias::Yes,
            qkv_bias: None,
            rotary_base: None,
            rope_scaling: None,
            rotary_dim: None,
            position_bias: None,
            qk_norm: None,
            qk_norm_gain: NormGain::Weight,
            dropout: 0.0,
            init,
            residual_init: init,
        }
    }

    /// Whether the first layer has a bias.
    pub fn qkv_bias(&self) -> Bias {
        self.qkv_bias.unwrap_or(self.bias)
    }

    /// Elements of a head that are rotated.
    pub fn rotary_dim(&self) -> usize {
        self.rotary_dim.unwrap_or(self.head_dim)
    }

    /// Output widths of the first layer for queries, keys and values, (H + 2G) D in total.
    pub fn packed_widths(&self) -> [usize; 3] {
        [self.heads, self.groups, self.groups].map(|heads| heads * self.head_dim)
    }
}
