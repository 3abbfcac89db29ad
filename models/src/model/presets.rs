//! Published model sizes by name.
//!
//! GPT-2: Radford et al. (2019). Megatron 2019: arXiv 1909.08053, table 1. PTD-P: arXiv 2104.04473, table 1. Their
//! vocabulary is the tokenizer's 50257; padding depends on the layout, not on the model. Gemma 2: arXiv 2408.00118,
//! tables 1 and 2, whose feed-forward width counts gate and up.

use crate::model::config::GptConfig;
use ferrotron_tensor::{Error, Result};

/// The family of a preset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PresetFamily {
    /// [`GptConfig::gpt2`].
    Gpt2,
    /// [`GptConfig::gemma2`].
    Gemma2,
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
    /// Number of token ids.
    pub vocab_size: usize,
    /// Number of key and value heads, if it is not that of heads.
    pub num_query_groups: Option<usize>,
    /// Width of a head, if it is not hidden / heads.
    pub kv_channels: Option<usize>,
    /// Width inside the MLP, if it is not 4 hidden.
    pub ffn_hidden_size: Option<usize>,
    /// Attention scores are divided by the root of this number, if it is not the width of a head.
    pub query_pre_attn_scalar: Option<f64>,
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
        vocab_size: GPT2_VOCAB,
        num_query_groups: None,
        kv_channels: None,
        ffn_hidden_size: None,
        query_pre_attn_scalar: None,
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
        let (vocab, positions) = (self.vocab_size, self.seq_length);
        let (layers, hidden, heads) = (self.num_layers, self.hidden_size, self.num_attention_heads);
        let groups = self.num_query_groups.unwrap_or(heads);
        let family = match self.family {
            PresetFamily::Gpt2 => GptConfig::gpt2(vocab, layers, hidden, heads, positions),
            PresetFamily::Gemma2 => {
                GptConfig::gemma2(vocab, layers, hidden, heads, groups, positions)
            }
        };
        GptConfig {
            kv_channels: self.kv_channels.unwrap_or(family.kv_channels),
            ffn_hidden_size: self.ffn_hidden_size.unwrap_or(family.ffn_hidden_size),
            query_pre_attn_scalar: self.query_pre_attn_scalar,
            ..family
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_published() {
        // Billions of parameters as rounded in the papers; for PTD-P equation (2) of arXiv 2104.04473, whose tables
        // use a vocabulary of 51200.
        let published = [
            ("gpt2-124m", 0.124),
            ("gpt2-350m", 0.355),
            ("gpt2-774m", 0.774),
            ("gpt2-1.5b", 1.558),
            ("megatron-1.2b", 1.2),
            ("megatron-2.5b", 2.5),
            ("megatron-4.2b", 4.2),
            ("megatron-8.3b", 8.3),
            ("ptd-1.7b", 1.7),
            ("ptd-3.6b", 3.6),
            ("ptd-7.5b", 7.5),
            ("ptd-18.4b", 18.4),
            ("ptd-39.1b", 39.1),
            ("ptd-76.1b", 76.1),
            ("ptd-145.6b", 145.6),
            ("ptd-310.1b", 310.1),
            ("ptd-529.6b", 529.6),
            ("ptd-1t", 1008.0),
            ("gemma2-2b", 2.614),
            ("gemma2-9b", 9.242),
            ("gemma2-27b", 27.227),
        ];
        assert_eq!(published.len(), PRESETS.len());
        for (preset, (name, billions)) in PRESETS.iter().zip(published) {
            let config = preset.config();
            config.validate().unwrap();
            assert_eq!(preset.name, name);
            let count = config.num_parameters() as f64 / 1e9;
            assert!(
                (count / billions - 1.0).abs() < 0.03,
                "{name}: {count} billion, published {billions}"
            );
        }
        assert_eq!(Preset::find("gpt2-124m").unwrap().config().num_parameters(), 124_439_808);
    }

    #[test]
    fn an_unknown_name_lists_the_known_ones() {
        let error = Preset::find("gpt3").unwrap_err().to_string();
        assert!(
            error.starts_with("preset: there is no 'gpt3'; the presets are gpt2-124m, "),
            "{error}"
        );
    }
}
