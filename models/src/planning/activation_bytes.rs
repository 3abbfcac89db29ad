//! Formula for the activation bytes that a block saves from forward to backward. `docs/memory.md` derives it, after
//! Korthikanti et al., arXiv 2205.05198, section 4.

use ferrotron_tensor::DType;

use crate::model::block::Normalization;
use crate::model::config::{GptConfig, PositionEmbedding};
use crate::model::gpt::{RecomputeModules, RecomputedAttention, RecomputedMlp};

/// The activations of one micro-batch on one rank.
#[derive(Debug, Clone, Copy)]
pub struct Activations<'a> {
    /// The model.
    pub model: &'a GptConfig,
    /// Dtype of the activations.
    pub dtype: DType,
    /// Sequences.
    pub batch: usize,
    /// Local positions of each sequence: all, or the shard along the context axis.
    pub positions: usize,
    /// Number of tensor-parallel ranks.
    pub tensor: usize,
    /// Number of ranks that shard the positions of the residual stream: `tensor`, or 1 without sequence parallelism.
    pub sequence: usize,
}

impl Activations<'_> {
    /// Bytes that a recomputed region of blocks saves: the input of its first block.
    ///
    /// ```
    /// use ferrotron_models::activation_bytes::Activations;
    /// use ferrotron_models::gpt::{GptConfig, RecomputeModules};
    /// use ferrotron_tensor::DType;
    /// let model = GptConfig::gpt2(50257, 12, 768, 12, 1024);
    /// let activations = Activations {
    ///     model: &model, dtype: DType::BF16, batch: 2, positions: 1024, tensor: 1, sequence: 1,
    /// };
    /// let sbh = 1024 * 2 * 768;
    /// assert_eq!(activations.input(), 2 * sbh);
    /// assert_eq!(activations.block(RecomputeModules::NONE), 20 * sbh + 1024 * 2 * (16 + 4 * 12));
    /// ```
    pub fn input(&self) -> usize {
        self.residual_tokens() * self.model.hidden_size * self.dtype.size()
    }

    /// Bytes that a block saves, including its input, if the modules `again` are recomputed.
    pub fn block(&self, again: RecomputeModules) -> usize {
        let attention = match again.attention {
            RecomputedAttention::None => {
                self.norm() + self.projected() + self.attended() + self.post_norm()
            }
            RecomputedAttention::Core => self.norm() + self.projected() + self.post_norm(),
            RecomputedAttention::Layer => 0,
        };
        let mlp = match again.mlp {
            RecomputedMlp::None => self.norm() + self.mlp() + self.post_norm(),
            RecomputedMlp::Layer => 0,
        };
        // With a parallel residual, attention and MLP read the same tensor.
        let inputs = if self.model.use_parallel_residual { 1 } else { 2 };
        inputs * self.input() + attention + mlp
    }

    /// Bytes of the table of cosines and sines that all blocks of a rank share for the run: 0 without rotary positions.
    pub fn rotary_table(&self) -> usize {
        match self.model.position_embedding_type {
            PositionEmbedding::Rope => self.positions * self.model.rotary_dim() * self.statistic(),
            PositionEmbedding::LearnedAbsolute => 0,
        }
    }

    fn tokens(&self) -> usize {
        self.batch * self.positions
    }

    fn residual_tokens(&self) -> usize {
        self.tokens() / self.sequence
    }

    /// Bytes of a value that needs more than 16 bits.
    fn statistic(&self) -> usize {
        self.dtype.size().max(4)
    }

    /// Statistics of each row, from which the norm's output is recomputed.
    fn norm(&self) -> usize {
        let numbers = match self.model.normalization {
            Normalization::LayerNorm => 2,
            Normalization::RmsNorm => 1,
        };
        numbers * self.residual_tokens() * self.statistic()
    }

    /// The norm behind attention or MLP: its input and its statistics.
    fn post_norm(&self) -> usize {
        if self.model.sandwich_norm { self.input() + self.norm() } else { 0 }
    }

    /// Queries, keys and values.
    fn projected(&self) -> usize {
        let width: usize = self.model.attention().packed_widths().iter().sum();
        self.tokens() * width / self.tensor * self.dtype.size()
    }

    /// The result of attention and the log-sum-exp of each row. With norms of queries and keys also the projection before them, and their statistics.
    fn attended(&self) -> usize {
        let GptConfig { num_attention_heads: heads, kv_channels, .. } = *self.model;
        let result = heads * kv_channels * self.dtype.size();
        let normed = match self.model.qk_layernorm {
            true => {
                let rows = heads + self.model.num_query_groups;
                self.projected() + self.tokens() * rows * self.statistic() / self.tensor
            }
            false => 0,
        };
        self.tokens() * (result + heads * self.statistic()) / self.tensor + normed
    }

    /// The input of the activation function: gate and up for SwiGLU and GeGLU.
    fn mlp(&self) -> usize {
        let widths = if self.model.activation.is_gated() { 2 } else { 1 };
        self.tokens() * widths * self.model.ffn_hidden_size / self.tensor * self.dtype.size()
    }
}
