//! Counts of a GPT's parameters and of the floating-point operations of a step.

use crate::model::config::{GptConfig, PositionEmbedding};
use crate::model::sizes::{product, sum};

impl GptConfig {
    /// Number of parameters, computed without allocating them; 2^64 - 1 if it is not below that, which
    /// [`GptConfig::validate`] refuses.
    pub fn num_parameters(&self) -> u64 {
        self.checked_num_parameters().unwrap_or(u64::MAX)
    }

    /// Number of parameters, unless it is beyond a `u64`.
    pub(super) fn checked_num_parameters(&self) -> Option<u64> {
        let (v, l, c, f) =
            (self.vocab_size, self.num_layers, self.hidden_size, self.ffn_hidden_size);
        let (h, g, d) = (self.num_attention_heads, self.num_query_groups, self.kv_channels);
        let attention_bias = usize::from(self.add_bias || self.add_attention_bias);
        let qkv_bias = usize::from(self.add_qkv_bias).max(attention_bias);
        let mlp_bias = usize::from(self.add_bias || self.add_mlp_bias);
        let norm_bias = usize::from(self.norm_bias());
        let gated = 1 + usize::from(self.activation.is_gated());
        let norms = if self.sandwich_norm { 4 } else { 2 };
        let learned = self.position_embedding_type == PositionEmbedding::LearnedAbsolute;
        let positions = self.max_position_embeddings;
        let block = [
            product(&[h, d, c]), // queries
            product(&[h, d, qkv_bias]),
            product(&[2, g, d, c]), // keys and values
            product(&[2, g, d, qkv_bias]),
            product(&[2, d, usize::from(self.qk_layernorm)]),
            product(&[h, d, c]), // projection
            product(&[attention_bias, c]),
            product(&[gated, f, c]), // MLP
            product(&[gated, f, mlp_bias]),
            product(&[f, c]),
            product(&[mlp_bias, c]),
            product(&[norms, 1 + norm_bias, c]),
        ];
        let embeddings = [
            product(&[v, c]),
            product(&[usize::from(learned), positions, c]),
            product(&[1 + norm_bias, c]),
            product(&[usize::from(!self.tie_embeddings), v, c]),
        ];
        let blocks = sum(&block)?.checked_mul(l as u128);
        u64::try_from(sum(&[blocks, sum(&embeddings)])?).ok()
    }

    /// Floating-point operations of one training step over `tokens` tokens in sequences of `seq_length`. Per token, 6
    /// N for the matrices plus 12 L (H D) T for attention, not halved (PaLM, arXiv 2204.02311, appendix B).
    pub fn flops(&self, tokens: u64, seq_length: usize) -> f64 {
        let [v, l, c, h, d, positions] = [
            self.vocab_size,
            self.num_layers,
            self.hidden_size,
            self.num_attention_heads,
            self.kv_channels,
            self.max_position_embeddings,
        ]
        .map(|size| size as f64);
        let positions = match self.position_embedding_type {
            PositionEmbedding::LearnedAbsolute => positions * c,
            PositionEmbedding::Rope => 0.0,
        };
        let untied = if self.tie_embeddings { 0.0 } else { v * c };
        let matrices = self.num_parameters() as f64 - positions - untied;
        (6.0 * matrices + 12.0 * l * h * d * seq_length as f64) * tokens as f64
    }
}
