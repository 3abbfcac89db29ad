//! Configuration of a GPT: sizes, choices and derived values.

use ferrotron_nn::{Activation, AttentionConfig, Bias, Init, MlpConfig, NormGain, RopeScaling};
use serde::{Deserialize, Serialize};

use crate::model::block::{BlockConfig, NormConfig, NormPlacement, Normalization};
use crate::model::window_pattern::WindowPattern;

/// The kind of position embedding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PositionEmbedding {
    /// A trained vector per position, added to the token embedding: GPT-2.
    LearnedAbsolute,
    /// Queries and keys rotated by their position: Llama.
    Rope,
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
    /// gelu(gate) * up, tanh form
    Geglu,
}

impl ActivationKind {
    pub(crate) fn function(self) -> Activation {
        match self {
            ActivationKind::GeluTanh => Activation::GeluTanh,
            ActivationKind::GeluErf => Activation::GeluErf,
            ActivationKind::Relu => Activation::Relu,
            ActivationKind::Swiglu => Activation::SwiGlu,
            ActivationKind::Geglu => Activation::GeGlu,
        }
    }

    /// Whether the MLP has a gate.
    pub(crate) fn is_gated(self) -> bool {
        matches!(self, ActivationKind::Swiglu | ActivationKind::Geglu)
    }
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
    /// Whether linear layers have biases, and LayerNorms unless [`add_norm_bias`](GptConfig::add_norm_bias) says otherwise.
    pub add_bias: bool,
    /// Whether the head is the transposed token embedding.
    pub tie_embeddings: bool,
    /// Standard deviation of the initial weights.
    pub init_method_std: f64,
    /// Dropout on embeddings and on the inputs of residual additions.
    pub hidden_dropout: f64,
    /// Dropout on attention weights.
    pub attention_dropout: f64,
    /// Fraction of a head, from its first element on, that is rotated: 1, or less as in GPT-NeoX.
    #[serde(default = "whole")]
    pub rotary_percent: f64,
    /// RMSNorm of the queries and keys of each head, as in Qwen 3, with the gain of the other norms.
    #[serde(default)]
    pub qk_layernorm: bool,
    /// Whether the projection to queries, keys and values has a bias although linear layers have none, as in Qwen 2.
    #[serde(default)]
    pub add_qkv_bias: bool,
    /// Keys that a query sees, its own among them, as in Mistral; all earlier ones without it.
    #[serde(default)]
    pub window_size: Option<usize>,
    /// The blocks that have the window; all without it. The blocks of Gemma 2 alternate.
    #[serde(default)]
    pub window_attn_skip_freq: Option<WindowPattern>,
    /// Soft cap of attention scores, as in Gemma 2.
    #[serde(default)]
    pub attn_logit_softcapping: Option<f64>,
    /// Scaling of the rotary frequencies, as in Llama 3.1.
    #[serde(default, with = "rope_scaling")]
    pub rope_scaling: Option<RopeScaling>,
    /// Whether a block's MLP reads the input of its attention and both are added to the residual stream at once, as in
    /// GPT-NeoX and GPT-J.
    #[serde(default)]
    pub use_parallel_residual: bool,
    /// Whether both projections of attention have a bias although linear layers have none, as Llama's `attention_bias`.
    #[serde(default)]
    pub add_attention_bias: bool,
    /// Whether both layers of the MLP have a bias although linear layers have none, as Llama's `mlp_bias`.
    #[serde(default)]
    pub add_mlp_bias: bool,
    /// Whether the gain of every norm is 1 + weight, as in Gemma.
    #[serde(default)]
    pub apply_layernorm_1p: bool,
    /// Whether the outputs of attention and MLP are normalized too, before they are added to the residual stream, as in
    /// Gemma 2.
    #[serde(default)]
    pub sandwich_norm: bool,
    /// Whether token embeddings are multiplied by the root of the width, as in Gemma.
    #[serde(default)]
    pub scale_embeddings: bool,
    /// Attention scores are divided by the root of this number, as in Gemma 2; of [`kv_channels`](GptConfig::kv_channels)
    /// without it.
    #[serde(default)]
    pub query_pre_attn_scalar: Option<f64>,
    /// Soft cap of the logits, as in Gemma 2.
    #[serde(default)]
    pub final_logit_softcapping: Option<f64>,
    /// Whether LayerNorms have biases, if not as linear layers do.
    #[serde(default)]
    pub add_norm_bias: Option<bool>,
}

/// [`RopeScaling`] as an object with its fields, or null.
mod rope_scaling {
    use ferrotron_nn::RopeScaling;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Serialize, Deserialize)]
    #[serde(remote = "RopeScaling", deny_unknown_fields)]
    struct Fields {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_max_position_embeddings: usize,
    }

    #[derive(Serialize, Deserialize)]
    struct Object(#[serde(with = "Fields")] RopeScaling);

    pub fn serialize<S: Serializer>(
        scaling: &Option<RopeScaling>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        scaling.map(Object).serialize(serializer)
    }

    pub fn deserialize<'a, D: Deserializer<'a>>(
        deserializer: D,
    ) -> Result<Option<RopeScaling>, D::Error> {
        Ok(Option::<Object>::deserialize(deserializer)?.map(|object| object.0))
    }
}

fn bias_if(wanted: bool) -> Bias {
    if wanted { Bias::Yes } else { Bias::No }
}

/// A fraction that leaves nothing out.
fn whole() -> f64 {
    1.0
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
            rotary_percent: whole(),
            qk_layernorm: false,
            add_qkv_bias: false,
            window_size: None,
            window_attn_skip_freq: None,
            attn_logit_softcapping: None,
            rope_scaling: None,
            use_parallel_residual: false,
            add_attention_bias: false,
            add_mlp_bias: false,
            apply_layernorm_1p: false,
            sandwich_norm: false,
            scale_embeddings: false,
            query_pre_attn_scalar: None,
            final_logit_softcapping: None,
            add_norm_bias: None,
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

    /// Gemma 2 style: as [`GptConfig::llama`] with GeGLU of width 4 C, tied and scaled embeddings, norms with weights
    /// around 0 before and behind attention and MLP, soft caps of scores and logits, and a window in every other block
    /// (arXiv 2408.00118).
    pub fn gemma2(
        vocab_size: usize,
        num_layers: usize,
        hidden_size: usize,
        heads: usize,
        groups: usize,
        positions: usize,
    ) -> GptConfig {
        GptConfig {
            ffn_hidden_size: hidden_size.saturating_mul(4),
            norm_epsilon: 1e-6,
            activation: ActivationKind::Geglu,
            tie_embeddings: true,
            window_size: Some(4096),
            window_attn_skip_freq: Some(WindowPattern::SkipEvery(2)),
            attn_logit_softcapping: Some(50.0),
            apply_layernorm_1p: true,
            sandwich_norm: true,
            scale_embeddings: true,
            final_logit_softcapping: Some(30.0),
            ..Self::llama(vocab_size, num_layers, hidden_size, heads, groups, positions)
        }
    }

    /// Elements of a head that are rotated.
    pub(crate) fn rotary_dim(&self) -> usize {
        (self.rotary_percent * self.kv_channels as f64) as usize
    }

    /// Whether norms have biases.
    pub fn norm_bias(&self) -> bool {
        self.normalization == Normalization::LayerNorm
            && self.add_norm_bias.unwrap_or(self.add_bias)
    }

    pub(crate) fn norm(&self) -> NormConfig {
        NormConfig {
            kind: self.normalization,
            width: self.hidden_size,
            bias: bias_if(self.norm_bias()),
            epsilon: self.norm_epsilon,
            gain: self.norm_gain(),
        }
    }

    fn norm_gain(&self) -> NormGain {
        match self.apply_layernorm_1p {
            true => NormGain::OnePlusWeight,
            false => NormGain::Weight,
        }
    }

    /// The configuration of block `layer`.
    pub(crate) fn block(&self, layer: usize) -> BlockConfig {
        BlockConfig {
            attention: self.block_attention(layer),
            mlp: self.mlp(),
            norm: self.norm(),
            norm_placement: NormPlacement::Pre,
            sandwich_norm: self.sandwich_norm,
            parallel_residual: self.use_parallel_residual,
            hidden_dropout: self.hidden_dropout,
        }
    }

    /// The configuration of attention in block `layer`: [`GptConfig::attention`], without its window in some blocks.
    pub(crate) fn block_attention(&self, layer: usize) -> AttentionConfig {
        let pattern = self.window_attn_skip_freq.as_ref();
        let has_window = pattern.is_none_or(|pattern| pattern.has_window(layer));
        let attention = self.attention();
        AttentionConfig { window: attention.window.filter(|_| has_window), ..attention }
    }

    /// The configuration of every block's attention; some blocks leave the window out.
    pub fn attention(&self) -> AttentionConfig {
        let rotates = self.position_embedding_type == PositionEmbedding::Rope;
        AttentionConfig {
            groups: self.num_query_groups,
            head_dim: self.kv_channels,
            window: self.window_size,
            softmax_scale: self.query_pre_attn_scalar.map(|scalar| 1.0 / scalar.sqrt()),
            softcap: self.attn_logit_softcapping,
            bias: bias_if(self.add_bias || self.add_attention_bias),
            qkv_bias: self.add_qkv_bias.then_some(Bias::Yes),
            rotary_base: rotates.then_some(self.rotary_base),
            rope_scaling: self.rope_scaling,
            rotary_dim: (rotates && self.rotary_percent < 1.0).then(|| self.rotary_dim()),
            qk_norm: self.qk_layernorm.then_some(self.norm_epsilon),
            qk_norm_gain: self.norm_gain(),
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
            activation: self.activation.function(),
            bias: bias_if(self.add_bias || self.add_mlp_bias),
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
