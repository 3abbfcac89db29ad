//! Configuration of a GPT: sizes, choices and derived values.

use ferrotron_nn::{
    Activation, AttentionConfig, Bias, Init, LayerNorm, MlpConfig, Norm, RmsNorm, Scope,
};
use ferrotron_tensor::{Error, Result};
use serde::{Deserialize, Serialize};

/// Most layers: a hundred times as many as the deepest models have. Every layer is an object before anything of it is
/// memory of a device.
const MAX_LAYERS: usize = 10_000;

/// Widest head: rotary positions take a table of that width for each position.
const MAX_HEAD_WIDTH: usize = 65_536;

/// Most parameters, a thousand times as many as the largest models have: byte counts of weights, gradients and optimizer
/// states stay below 2^63, and so do numbers of floating-point operations of a token.
const MAX_PARAMETERS: u64 = 1_000_000_000_000_000;

/// Most tokens of a vocabulary, and most positions: their ids are u32.
const MAX_IDS: usize = 1 << 32;

/// The kind of position embedding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PositionEmbedding {
    /// A trained vector per position, added to the token embedding: GPT-2.
    LearnedAbsolute,
    /// Queries and keys rotated by their position: Llama.
    Rope,
}

/// The norm before attention, MLP and head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Normalization {
    /// With mean and, if the model has biases, a bias.
    LayerNorm,
    /// Without mean and bias.
    #[serde(rename = "RMSNorm")]
    RmsNorm,
}

/// The activation function of the MLP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ActivationKind {
    /// GELU, tanh form.
    GeluTanh,
    /// GELU, exact form.
    GeluErf,
    /// max(x, 0)
    Relu,
    /// silu(gate) * up
    Swiglu,
}

/// The architecture of a GPT. Field names are Megatron's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GptConfig {
    /// V: number of token ids.
    pub vocab_size: usize,
    /// Number of blocks.
    pub num_layers: usize,
    /// C: width of the residual stream.
    pub hidden_size: usize,
    /// Hidden width of the MLP: 4 C in GPT-2.
    pub ffn_hidden_size: usize,
    /// H: number of query heads.
    pub num_attention_heads: usize,
    /// G: number of key and value heads.
    pub num_query_groups: usize,
    /// D: dim of a head, usually C / H.
    pub kv_channels: usize,
    /// Maximum sequence length.
    pub max_position_embeddings: usize,
    /// The kind of position embedding.
    pub position_embedding_type: PositionEmbedding,
    /// Base of the rotary angles.
    pub rotary_base: f64,
    /// The kind of norm.
    pub normalization: Normalization,
    /// Added to the variance.
    pub norm_epsilon: f64,
    /// The activation function of the MLP.
    pub activation: ActivationKind,
    /// Whether linear layers and norms have biases.
    pub add_bias: bool,
    /// Whether the head is the transposed token embedding.
    pub tie_embeddings: bool,
    /// Standard deviation of the initial weights.
    pub init_method_std: f64,
    /// Dropout on embeddings and on the inputs of residual additions.
    pub hidden_dropout: f64,
    /// Dropout on attention weights.
    pub attention_dropout: f64,
}

impl GptConfig {
    /// GPT-2 style: learned positions, LayerNorm, GELU, biases, tied embeddings.
    pub fn gpt2(
        vocab_size: usize,
        num_layers: usize,
        hidden_size: usize,
        heads: usize,
        positions: usize,
    ) -> GptConfig {
        GptConfig {
            vocab_size,
            num_layers,
            hidden_size,
            ffn_hidden_size: hidden_size.saturating_mul(4),
            num_attention_heads: heads,
            num_query_groups: heads,
            kv_channels: hidden_size / heads.max(1),
            max_position_embeddings: positions,
            position_embedding_type: PositionEmbedding::LearnedAbsolute,
            rotary_base: 10_000.0,
            normalization: Normalization::LayerNorm,
            norm_epsilon: 1e-5,
            activation: ActivationKind::GeluTanh,
            add_bias: true,
            tie_embeddings: true,
            init_method_std: 0.02,
            hidden_dropout: 0.0,
            attention_dropout: 0.0,
        }
    }

    /// Llama style: rotary positions, RMSNorm, SwiGLU of width 8/3 C, no biases, untied head.
    pub fn llama(
        vocab_size: usize,
        num_layers: usize,
        hidden_size: usize,
        heads: usize,
        groups: usize,
        positions: usize,
    ) -> GptConfig {
        GptConfig {
            // Two thirds of 4 C keep the number of parameters (arXiv 2002.05202), rounded up to a multiple of 64.
            ffn_hidden_size: (hidden_size.saturating_mul(8) / 3).next_multiple_of(64),
            num_query_groups: groups,
            position_embedding_type: PositionEmbedding::Rope,
            normalization: Normalization::RmsNorm,
            activation: ActivationKind::Swiglu,
            add_bias: false,
            tie_embeddings: false,
            ..Self::gpt2(vocab_size, num_layers, hidden_size, heads, positions)
        }
    }

    /// Errors, naming the values, if the sizes are inconsistent.
    pub fn validate(&self) -> Result<()> {
        let refuse = |message: String| Err(Error::config("gpt", message));
        let sizes = [
            ("vocab-size", self.vocab_size),
            ("num-layers", self.num_layers),
            ("hidden-size", self.hidden_size),
            ("ffn-hidden-size", self.ffn_hidden_size),
            ("num-attention-heads", self.num_attention_heads),
            ("num-query-groups", self.num_query_groups),
            ("max-position-embeddings", self.max_position_embeddings),
        ];
        if let Some((name, _)) = sizes.iter().find(|(_, size)| *size == 0) {
            return refuse(format!("{name} must be positive, got 0"));
        }
        if self.num_layers > MAX_LAYERS {
            return refuse(format!("num-layers {} is more than {MAX_LAYERS}", self.num_layers));
        }
        if self.kv_channels == 0
            || (self.kv_channels == self.hidden_size / self.num_attention_heads
                && !self.hidden_size.is_multiple_of(self.num_attention_heads))
        {
            return refuse(format!(
                "num-attention-heads {} does not divide hidden-size {}",
                self.num_attention_heads, self.hidden_size
            ));
        }
        if !self.num_attention_heads.is_multiple_of(self.num_query_groups) {
            return refuse(format!(
                "num-query-groups {} does not divide num-attention-heads {}",
                self.num_query_groups, self.num_attention_heads
            ));
        }
        for (name, ids) in [
            ("vocab-size", self.vocab_size),
            ("max-position-embeddings", self.max_position_embeddings),
        ] {
            if ids > MAX_IDS {
                return refuse(format!(
                    "{name} {ids} is more than {MAX_IDS}, the number of ids of 32 bits"
                ));
            }
        }
        if self.checked_num_parameters().is_none_or(|number| number > MAX_PARAMETERS) {
            let sizes = sizes.map(|(name, size)| format!("{name} {size}")).join(", ");
            return refuse(format!(
                "a model of {sizes}, kv-channels {} would have more than 10^15 parameters: check these sizes",
                self.kv_channels
            ));
        }
        if self.kv_channels > MAX_HEAD_WIDTH {
            return refuse(format!(
                "kv-channels {} is more than {MAX_HEAD_WIDTH}",
                self.kv_channels
            ));
        }
        for (name, value) in [
            ("norm-epsilon", self.norm_epsilon),
            ("init-method-std", self.init_method_std),
            ("rotary-base", self.rotary_base),
        ] {
            if !(value >= 0.0 && value.is_finite()) {
                return refuse(format!("{name} must be at least 0, got {value}"));
            }
        }
        for (name, p) in
            [("hidden-dropout", self.hidden_dropout), ("attention-dropout", self.attention_dropout)]
        {
            if !(0.0..1.0).contains(&p) {
                return refuse(format!("{name} must be in [0, 1), got {p}"));
            }
        }
        Ok(())
    }

    /// Number of parameters, computed without allocating them; 2^64 - 1 if it is not below that, which
    /// [`GptConfig::validate`] refuses.
    pub fn num_parameters(&self) -> u64 {
        self.checked_num_parameters().unwrap_or(u64::MAX)
    }

    /// Number of parameters, unless it is beyond a `u64`.
    fn checked_num_parameters(&self) -> Option<u64> {
        // A product of three sizes of 64 bits does not fit into 128 bits.
        let product = |sizes: &[usize]| {
            sizes.iter().try_fold(1_u128, |product, &size| product.checked_mul(size as u128))
        };
        let sum = |terms: &[Option<u128>]| {
            terms.iter().try_fold(0_u128, |sum, term| sum.checked_add((*term)?))
        };
        let (v, l, c, f) =
            (self.vocab_size, self.num_layers, self.hidden_size, self.ffn_hidden_size);
        let (h, g, d) = (self.num_attention_heads, self.num_query_groups, self.kv_channels);
        let bias = usize::from(self.add_bias);
        let norm_bias = bias * usize::from(self.normalization == Normalization::LayerNorm);
        let gated = 1 + usize::from(self.activation == ActivationKind::Swiglu);
        let learned = self.position_embedding_type == PositionEmbedding::LearnedAbsolute;
        let positions = self.max_position_embeddings;
        let block = [
            product(&[h, d, c]), // queries
            product(&[h, d, bias]),
            product(&[2, g, d, c]), // keys and values
            product(&[2, g, d, bias]),
            product(&[h, d, c]), // projection
            product(&[bias, c]),
            product(&[gated, f, c]), // MLP
            product(&[gated, f, bias]),
            product(&[f, c]),
            product(&[bias, c]),
            product(&[2, 1 + norm_bias, c]),
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

    pub(crate) fn bias(&self) -> Bias {
        if self.add_bias { Bias::Yes } else { Bias::No }
    }

    pub(crate) fn norm(&self, scope: &Scope) -> Norm {
        match self.normalization {
            Normalization::LayerNorm => {
                Norm::Layer(LayerNorm::new(scope, self.hidden_size, self.bias(), self.norm_epsilon))
            }
            Normalization::RmsNorm => {
                Norm::Rms(RmsNorm::new(scope, self.hidden_size, self.norm_epsilon))
            }
        }
    }

    /// The configuration of every block's attention.
    pub fn attention(&self) -> AttentionConfig {
        AttentionConfig {
            groups: self.num_query_groups,
            head_dim: self.kv_channels,
            bias: self.bias(),
            rotary_base: (self.position_embedding_type == PositionEmbedding::Rope)
                .then_some(self.rotary_base),
            dropout: self.attention_dropout,
            init: self.init(),
            residual_init: self.residual_init(),
            ..AttentionConfig::new(self.hidden_size, self.num_attention_heads)
        }
    }

    pub(crate) fn mlp(&self) -> MlpConfig {
        MlpConfig {
            hidden: self.hidden_size,
            ffn_hidden: self.ffn_hidden_size,
            activation: match self.activation {
                ActivationKind::GeluTanh => Activation::GeluTanh,
                ActivationKind::GeluErf => Activation::GeluErf,
                ActivationKind::Relu => Activation::Relu,
                ActivationKind::Swiglu => Activation::SwiGlu,
            },
            bias: self.bias(),
            init: self.init(),
            residual_init: self.residual_init(),
        }
    }

    pub(crate) fn init(&self) -> Init {
        Init::Normal { std: self.init_method_std }
    }

    /// Initialisation of projections whose output is added to the residual stream: smaller by the root of their
    /// number.
    fn residual_init(&self) -> Init {
        Init::Normal { std: self.init_method_std / (2.0 * self.num_layers as f64).sqrt() }
    }
}
