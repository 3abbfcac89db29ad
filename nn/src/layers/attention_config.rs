//! The configuration of causal self-attention.

use crate::{Bias, Init};

/// Configuration of an [`Attention`](crate::Attention).
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
