//! Published model sizes by name.
//!
//! GPT-2: Radford et al. (2019). Megatron 2019: arXiv 1909.08053, table 1. PTD-P: arXiv 2104.04473, table 1. Their
//! vocabulary is the tokenizer's 50257; padding depends on the layout, not on the model. Gemma 2: arXiv 2408.00118,
//! tables 1 and 2, whose feed-forward width counts gate and up.
//!
//! | models | source, beside `config.json` of each on Hugging Face |
//! |---|---|
//! | Llama 2 | arXiv 2307.09288, table 1 |
//! | Llama 3 and 3.1, with scaled positions from 3.1 on | arXiv 2407.21783, table 3 |
//! | Llama 3.2, whose training length is not published: that of Llama 3 | Meta's model cards |
//! | TinyLlama | arXiv 2401.02385, table 1 |
//! | Mistral 7B | arXiv 2310.06825, table 1; 0.3 has more tokens and no window |
//! | Qwen 2, 2.5 | arXiv 2407.10671, table 1, and 2412.15115, section 2 |
//! | Qwen 3 | arXiv 2505.09388, table 1 |
//! | SmolLM, SmolLM 2 | Hugging Face's model cards, and arXiv 2502.02737 |
//! | Pythia | arXiv 2304.01373, table 1 |
//! | GPT-NeoX-20B | arXiv 2204.06745, section 2 |
//!
//! Sequences have the length of the first stage of training, and the longest sequence is that of `config.json`. Fields are
//! those of the base models, but for the longest sequence of Qwen 3, which is that of the chat models, and of Pythia 14M and
//! 31M, which is that of training. docs/hugging-face.md says against which copies of `config.json` they were checked.

use crate::model::block::Normalization;
use crate::model::config::{ActivationKind, GptConfig};
use ferrotron_nn::RopeScaling;
use ferrotron_tensor::{Error, Result};

/// The family of a preset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PresetFamily {
    /// [`GptConfig::gpt2`].
    Gpt2,
    /// [`GptConfig::llama`].
    Llama,
    /// [`GptConfig::gemma2`].
    Gemma2,
    /// GPT-NeoX: [`GptConfig::llama`] with LayerNorm, GELU and biases, rotations of a quarter of each head, and attention
    /// and MLP that read the same input.
    GptNeox,
}

/// A named model size.
#[derive(Debug, Clone, Copy)]
pub struct Preset {
    /// Its family.
    pub family: PresetFamily,
    /// Name on the command line.
    pub name: &'static str,
    /// Number of blocks.
    pub num_layers: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Number of heads.
    pub num_attention_heads: usize,
    /// Length of the training sequences.
    pub seq_length: usize,
    /// Longest sequence that the model takes, if it is not that of training.
    pub max_position_embeddings: Option<usize>,
    /// Number of token ids.
    pub vocab_size: usize,
    /// Number of key and value heads, if it is not that of heads.
    pub num_query_groups: Option<usize>,
    /// Width of a head, if it is not hidden / heads.
    pub kv_channels: Option<usize>,
    /// Width inside the MLP, if it is not the family's.
    pub ffn_hidden_size: Option<usize>,
    /// Attention scores are divided by the root of this number, if it is not the width of a head.
    pub query_pre_attn_scalar: Option<f64>,
    /// Base of the rotary angles, if it is not 10,000.
    pub rotary_base: Option<f64>,
    /// Scaling of the rotary frequencies.
    pub rope_scaling: Option<RopeScaling>,
    /// Sliding window, if it is not the family's.
    pub window_size: Option<usize>,
    /// Added to the variance in norms, if it is not the family's.
    pub norm_epsilon: Option<f64>,
    /// Nonlinearity of the MLP, if it is not the family's.
    pub activation: Option<ActivationKind>,
    /// Whether the head is the token embedding although the family has a head of its own.
    pub tie_embeddings: bool,
    /// Whether queries, keys and values have biases although the family has none.
    pub add_qkv_bias: bool,
    /// Whether queries and keys are normalized.
    pub qk_layernorm: bool,
}

/// Size of the GPT-2 vocabulary.
const GPT2_VOCAB: usize = 50_257;

/// Every preset.
pub const PRESETS: &[Preset] = &[
    preset("gpt2-124m", 12, 768, 12, 1024),
    preset("gpt2-350m", 24, 1024, 16, 1024),
    preset("gpt2-774m", 36, 1280, 20, 1024),
    preset("gpt2-1.5b", 48, 1600, 25, 1024),
    preset("megatron-1.2b", 40, 1536, 16, 1024),
    preset("megatron-2.5b", 54, 1920, 20, 1024),
    preset("megatron-4.2b", 64, 2304, 24, 1024),
    preset("megatron-8.3b", 72, 3072, 32, 1024),
    preset("ptd-1.7b", 24, 2304, 24, 2048),
    preset("ptd-3.6b", 30, 3072, 32, 2048),
    preset("ptd-7.5b", 36, 4096, 32, 2048),
    preset("ptd-18.4b", 40, 6144, 48, 2048),
    preset("ptd-39.1b", 48, 8192, 64, 2048),
    preset("ptd-76.1b", 60, 10_240, 80, 2048),
    preset("ptd-145.6b", 80, 12_288, 96, 2048),
    preset("ptd-310.1b", 96, 16_384, 128, 2048),
    preset("ptd-529.6b", 105, 20_480, 128, 2048),
    preset("ptd-1t", 128, 25_600, 160, 2048),
    gemma2(preset("gemma2-2b", 26, 2304, 8, 8192), 4, 256, 256.0),
    gemma2(preset("gemma2-9b", 42, 3584, 16, 8192), 8, 256, 256.0),
    Preset {
        ffn_hidden_size: Some(36_864),
        ..gemma2(preset("gemma2-27b", 46, 4608, 32, 8192), 16, 128, 144.0)
    },
    llama(preset("llama2-7b", 32, 4096, 32, 4096), 32_000, 32, 11_008),
    llama(preset("llama2-13b", 40, 5120, 40, 4096), 32_000, 40, 13_824),
    llama(preset("llama2-70b", 80, 8192, 64, 4096), 32_000, 8, 28_672),
    llama3(preset("llama3-8b", 32, 4096, 32, 8192), 14_336, None),
    llama3(preset("llama3-70b", 80, 8192, 64, 8192), 28_672, None),
    llama3(preset("llama3.1-8b", 32, 4096, 32, 8192), 14_336, Some(8.0)),
    llama3(preset("llama3.1-70b", 80, 8192, 64, 8192), 28_672, Some(8.0)),
    llama3(preset("llama3.1-405b", 126, 16_384, 128, 8192), 53_248, Some(8.0)),
    tied(llama3(preset("llama3.2-1b", 16, 2048, 32, 8192), 8192, Some(32.0))),
    tied(llama3(preset("llama3.2-3b", 28, 3072, 24, 8192), 8192, Some(32.0))),
    llama(preset("tinyllama-1.1b", 22, 2048, 32, 2048), 32_000, 4, 5632),
    Preset { window_size: Some(4096), ..mistral("mistral-7b", 32_000, 1e4) },
    mistral("mistral-7b-v0.3", 32_768, 1e6),
    tied(qwen2(preset("qwen2-0.5b", 24, 896, 14, 4096), 2, 4864, 131_072)),
    tied(qwen2(preset("qwen2-1.5b", 28, 1536, 12, 4096), 2, 8960, 131_072)),
    qwen2(preset("qwen2-7b", 28, 3584, 28, 4096), 4, 18_944, 131_072),
    qwen2(preset("qwen2-72b", 80, 8192, 64, 4096), 8, 29_568, 131_072),
    tied(qwen2(preset("qwen2.5-0.5b", 24, 896, 14, 4096), 2, 4864, 32_768)),
    tied(qwen2(preset("qwen2.5-1.5b", 28, 1536, 12, 4096), 2, 8960, 131_072)),
    tied(qwen2(preset("qwen2.5-3b", 36, 2048, 16, 4096), 2, 11_008, 32_768)),
    qwen2(preset("qwen2.5-7b", 28, 3584, 28, 4096), 4, 18_944, 131_072),
    qwen2(preset("qwen2.5-14b", 48, 5120, 40, 4096), 8, 13_824, 131_072),
    qwen2(preset("qwen2.5-32b", 64, 5120, 40, 4096), 8, 27_648, 131_072),
    qwen2(preset("qwen2.5-72b", 80, 8192, 64, 4096), 8, 29_568, 131_072),
    tied(qwen3(preset("qwen3-0.6b", 28, 1024, 16, 4096), 3072)),
    tied(qwen3(preset("qwen3-1.7b", 28, 2048, 16, 4096), 6144)),
    tied(qwen3(preset("qwen3-4b", 36, 2560, 32, 4096), 9728)),
    qwen3(preset("qwen3-8b", 36, 4096, 32, 4096), 12_288),
    qwen3(preset("qwen3-14b", 40, 5120, 40, 4096), 17_408),
    qwen3(preset("qwen3-32b", 64, 5120, 64, 4096), 25_600),
    tied(llama(preset("smollm-135m", 30, 576, 9, 2048), 49_152, 3, 1536)),
    tied(llama(preset("smollm-360m", 32, 960, 15, 2048), 49_152, 5, 2560)),
    tied(llama(preset("smollm-1.7b", 24, 2048, 32, 2048), 49_152, 32, 8192)),
    tied(smollm2(preset("smollm2-135m", 30, 576, 9, 2048), 3, 1536, 1e5)),
    tied(smollm2(preset("smollm2-360m", 32, 960, 15, 2048), 5, 2560, 1e5)),
    tied(smollm2(preset("smollm2-1.7b", 24, 2048, 32, 2048), 32, 8192, 1.3e5)),
    neox(preset("pythia-14m", 6, 128, 4, 2048), 50_304),
    neox(preset("pythia-31m", 6, 256, 8, 2048), 50_304),
    neox(preset("pythia-70m", 6, 512, 8, 2048), 50_304),
    neox(preset("pythia-160m", 12, 768, 12, 2048), 50_304),
    neox(preset("pythia-410m", 24, 1024, 16, 2048), 50_304),
    neox(preset("pythia-1b", 16, 2048, 8, 2048), 50_304),
    neox(preset("pythia-1.4b", 24, 2048, 16, 2048), 50_304),
    neox(preset("pythia-2.8b", 32, 2560, 32, 2048), 50_304),
    neox(preset("pythia-6.9b", 32, 4096, 32, 2048), 50_432),
    neox(preset("pythia-12b", 36, 5120, 40, 2048), 50_688),
    Preset {
        activation: Some(ActivationKind::GeluTanh),
        ..neox(preset("gpt-neox-20b", 44, 6144, 64, 2048), 50_432)
    },
];

/// Size of the vocabulary of Gemma 2.
const GEMMA2_VOCAB: usize = 256_000;

const fn gemma2(preset: Preset, groups: usize, head_dim: usize, scalar: f64) -> Preset {
    Preset {
        family: PresetFamily::Gemma2,
        vocab_size: GEMMA2_VOCAB,
        num_query_groups: Some(groups),
        kv_channels: Some(head_dim),
        query_pre_attn_scalar: if scalar == head_dim as f64 { None } else { Some(scalar) },
        ..preset
    }
}

const fn llama(preset: Preset, vocab_size: usize, groups: usize, ffn: usize) -> Preset {
    Preset {
        family: PresetFamily::Llama,
        vocab_size,
        num_query_groups: Some(groups),
        ffn_hidden_size: Some(ffn),
        ..preset
    }
}

/// From 3.1 on with a scaling of positions by `factor`.
const fn llama3(preset: Preset, ffn: usize, factor: Option<f64>) -> Preset {
    let llama = Preset { rotary_base: Some(5e5), ..llama(preset, 128_256, 8, ffn) };
    match factor {
        None => llama,
        Some(factor) => Preset {
            rope_scaling: Some(RopeScaling::llama3(factor)),
            max_position_embeddings: Some(131_072),
            ..llama
        },
    }
}

const fn mistral(name: &'static str, vocab_size: usize, base: f64) -> Preset {
    Preset {
        rotary_base: Some(base),
        max_position_embeddings: Some(32_768),
        ..llama(preset(name, 32, 4096, 32, 8192), vocab_size, 8, 14_336)
    }
}

/// With a base of 10^6 and norms with 10^-6.
const fn qwen(preset: Preset, groups: usize, ffn: usize, longest: usize) -> Preset {
    Preset {
        rotary_base: Some(1e6),
        norm_epsilon: Some(1e-6),
        max_position_embeddings: Some(longest),
        ..llama(preset, 151_936, groups, ffn)
    }
}

/// Models from 7B on have a vocabulary that is padded further, those from 14B on norms with 10^-5.
const fn qwen2(preset: Preset, groups: usize, ffn: usize, longest: usize) -> Preset {
    let vocab_size = if preset.hidden_size < 3584 { 151_936 } else { 152_064 };
    let epsilon = if preset.hidden_size < 5120 { 1e-6 } else { 1e-5 };
    Preset {
        add_qkv_bias: true,
        vocab_size,
        norm_epsilon: Some(epsilon),
        ..qwen(preset, groups, ffn, longest)
    }
}

const fn qwen3(preset: Preset, ffn: usize) -> Preset {
    Preset { qk_layernorm: true, kv_channels: Some(128), ..qwen(preset, 8, ffn, 40_960) }
}

const fn smollm2(preset: Preset, groups: usize, ffn: usize, base: f64) -> Preset {
    Preset {
        rotary_base: Some(base),
        max_position_embeddings: Some(8192),
        ..llama(preset, 49_152, groups, ffn)
    }
}

const fn tied(preset: Preset) -> Preset {
    Preset { tie_embeddings: true, ..preset }
}

const fn neox(preset: Preset, vocab_size: usize) -> Preset {
    Preset { family: PresetFamily::GptNeox, vocab_size, ..preset }
}

const fn preset(
    name: &'static str,
    layers: usize,
    hidden: usize,
    heads: usize,
    seq_length: usize,
) -> Preset {
    Preset {
        family: PresetFamily::Gpt2,
        name,
        num_layers: layers,
        hidden_size: hidden,
        num_attention_heads: heads,
        seq_length,
        max_position_embeddings: None,
        vocab_size: GPT2_VOCAB,
        num_query_groups: None,
        kv_channels: None,
        ffn_hidden_size: None,
        query_pre_attn_scalar: None,
        rotary_base: None,
        rope_scaling: None,
        window_size: None,
        norm_epsilon: None,
        activation: None,
        tie_embeddings: false,
        add_qkv_bias: false,
        qk_layernorm: false,
    }
}

impl Preset {
    /// The preset called `name`. Errors, listing all names, if there is none.
    pub fn find(name: &str) -> Result<Preset> {
        PRESETS.iter().copied().find(|preset| preset.name == name).ok_or_else(|| {
            let names: Vec<&str> = PRESETS.iter().map(|preset| preset.name).collect();
            Error::config(
                "preset",
                format!("there is no '{name}'; the presets are {}", names.join(", ")),
            )
        })
    }

    /// The model configuration, in the style of its family.
    ///
    /// ```
    /// use ferrotron_models::presets::Preset;
    /// let config = Preset::find("gpt2-124m")?.config();
    /// assert_eq!((config.num_layers, config.hidden_size), (12, 768));
    /// assert_eq!(config.num_parameters(), 124_439_808);
    /// assert_eq!(Preset::find("gemma2-2b")?.config().num_parameters(), 2_614_341_888);
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn config(&self) -> GptConfig {
        let vocab = self.vocab_size;
        let positions = self.max_position_embeddings.unwrap_or(self.seq_length);
        let (layers, hidden, heads) = (self.num_layers, self.hidden_size, self.num_attention_heads);
        let groups = self.num_query_groups.unwrap_or(heads);
        let family = match self.family {
            PresetFamily::Gpt2 => GptConfig::gpt2(vocab, layers, hidden, heads, positions),
            PresetFamily::Llama => {
                GptConfig::llama(vocab, layers, hidden, heads, groups, positions)
            }
            PresetFamily::Gemma2 => {
                GptConfig::gemma2(vocab, layers, hidden, heads, groups, positions)
            }
            PresetFamily::GptNeox => GptConfig {
                ffn_hidden_size: hidden.saturating_mul(4),
                normalization: Normalization::LayerNorm,
                activation: ActivationKind::GeluErf,
                add_bias: true,
                rotary_percent: 0.25,
                use_parallel_residual: true,
                ..GptConfig::llama(vocab, layers, hidden, heads, groups, positions)
            },
        };
        GptConfig {
            num_query_groups: groups,
            kv_channels: self.kv_channels.unwrap_or(family.kv_channels),
            ffn_hidden_size: self.ffn_hidden_size.unwrap_or(family.ffn_hidden_size),
            query_pre_attn_scalar: self.query_pre_attn_scalar,
            rotary_base: self.rotary_base.unwrap_or(family.rotary_base),
            rope_scaling: self.rope_scaling,
            window_size: self.window_size.or(family.window_size),
            norm_epsilon: self.norm_epsilon.unwrap_or(family.norm_epsilon),
            activation: self.activation.unwrap_or(family.activation),
            tie_embeddings: family.tie_embeddings || self.tie_embeddings,
            add_qkv_bias: self.add_qkv_bias,
            qk_layernorm: self.qk_layernorm,
            ..family
        }
    }
}

#[cfg(test)]
mod tests;
