//! A family of models: the names and switches that tell it from others.

use ferrotron_tensor::{Error, Result};
use serde_json::{Map, Value};

use crate::io::hugging_face::mapping::{Form, Mapping};
use crate::model::block::Normalization;
use crate::model::config::{GptConfig, PositionEmbedding};
use crate::model::window_pattern::WindowPattern;

/// A family of models.
pub(in crate::io::hugging_face) struct Family {
    /// `model_type` in `config.json`.
    pub model_type: &'static str,
    /// The class of `transformers` for its language models.
    pub class: &'static str,
    /// The model that `config.json` describes; an error says which of its values is not supported.
    pub read: fn(&Value) -> std::result::Result<GptConfig, String>,
    /// The fields of `config.json` for a model. What the family cannot hold is left out: see [`Family::obstacles`].
    pub write: fn(&GptConfig) -> Map<String, Value>,
    /// The beginning of every name but the head's; files of a model without head may lack it.
    pub prefix: &'static str,
    /// The name of the head's weight, if it is not the token embedding.
    pub head: &'static str,
    /// Our layers outside of the blocks, and theirs.
    pub layers: &'static [(&'static str, &'static str)],
    /// The name of the list of blocks.
    pub blocks: &'static str,
    /// Our layers in a block, and theirs.
    pub block_layers: &'static [(&'static str, Theirs)],
    /// Ends of the names of tensors that are no weights.
    pub buffers: &'static [&'static str],
}

/// The layers there that make one of ours.
pub(in crate::io::hugging_face) enum Theirs {
    /// One.
    Same(&'static str),
    /// One whose weight is (in, out).
    Transposed(&'static str),
    /// One with the rows of queries, keys and values by head.
    ByHead(&'static str),
    /// Queries, keys and values; or gate and up.
    Parts(&'static [&'static str]),
}

impl Family {
    /// This family, if it holds a model of `config`.
    pub fn holding(&'static self, config: &GptConfig) -> Result<&'static Family> {
        self.refuse(&self.obstacles(config))
    }

    pub fn refuse(&'static self, obstacles: &[String]) -> Result<&'static Family> {
        if obstacles.is_empty() {
            return Ok(self);
        }
        let message = format!(
            "this model cannot be a Hugging Face {}, where it would have {}",
            self.model_type,
            obstacles.join(", ")
        );
        Err(Error::config("hugging_face", message))
    }

    /// The fields of `config` that would come back otherwise, with the values that they would have.
    pub fn obstacles(&self, config: &GptConfig) -> Vec<String> {
        let there = match (self.read)(&Value::Object((self.write)(config))) {
            Ok(there) => there,
            Err(reason) => return vec![reason],
        };
        let learned = [config, &there]
            .iter()
            .any(|config| config.position_embedding_type == PositionEmbedding::LearnedAbsolute);
        let fields = |config: &GptConfig| {
            let mut config = config.clone();
            if learned {
                config.rotary_base = 0.0; // means nothing
            }
            // Several switches for the same biases. Norms have one only if they are LayerNorms.
            if config.normalization == Normalization::RmsNorm && config.add_bias {
                config.add_bias = false;
                (config.add_attention_bias, config.add_mlp_bias) = (true, true);
            }
            config.add_qkv_bias &= !config.add_attention_bias;
            normalize_windows(&mut config);
            let own = config.kv_channels as f64;
            config.query_pre_attn_scalar = config.query_pre_attn_scalar.filter(|&x| x != own);
            // Dropout is a matter of training.
            (config.hidden_dropout, config.attention_dropout) = (0.0, 0.0);
            match serde_json::to_value(config) {
                Ok(Value::Object(fields)) => fields,
                _ => Map::new(),
            }
        };
        let there = fields(&there);
        let differs = fields(config).into_iter().filter(|(name, value)| there[name] != *value);
        differs.map(|(name, value)| format!("{name} {} instead of {value}", there[&name])).collect()
    }

    /// The tensors that make the parameter `ours`, of `rows` rows, of a model of `config`.
    pub fn mapping(&self, config: &GptConfig, ours: &str, rows: usize) -> Option<Mapping> {
        if ours == "lm_head.weight" {
            return Some(Mapping::same(self.head.to_string(), rows));
        }
        let (layer, kind) = ours.rsplit_once('.')?;
        let Family { prefix, blocks, .. } = self;
        let Some(rest) = layer.strip_prefix("blocks.") else {
            let (_, theirs) = self.layers.iter().find(|(ours, _)| *ours == layer)?;
            return Some(Mapping::same(format!("{prefix}{theirs}.{kind}"), rows));
        };
        let (block, layer) = rest.split_once('.')?;
        let (_, theirs) = self.block_layers.iter().find(|(ours, _)| *ours == layer)?;
        let name = |theirs: &str| format!("{prefix}{blocks}.{block}.{theirs}.{kind}");
        let one = |theirs: &str, form| Mapping { parts: vec![(name(theirs), rows)], form };
        Some(match theirs {
            Theirs::Same(theirs) => one(theirs, Form::Same),
            Theirs::Transposed(theirs) if kind == "weight" => one(theirs, Form::Transposed),
            Theirs::Transposed(theirs) => one(theirs, Form::Same),
            Theirs::ByHead(theirs) => one(theirs, Form::ByHead(config.num_attention_heads)),
            Theirs::Parts(parts) => {
                let rows = match parts.len() {
                    3 => config.attention().packed_widths().to_vec(),
                    parts => vec![rows / parts; parts],
                };
                let parts = parts.iter().map(|part| name(part)).zip(rows).collect();
                Mapping { parts, form: Form::Same }
            }
        })
    }

    /// The full name of a tensor that is called `key` in a file; `None` for buffers.
    pub fn full_name(&self, key: &str) -> Option<String> {
        if self.buffers.iter().any(|buffer| key.ends_with(buffer)) {
            return None;
        }
        let full = key == self.head || key.starts_with(self.prefix);
        Some(if full { key.to_string() } else { format!("{}{key}", self.prefix) })
    }

    /// The name of the token embedding.
    pub fn embedding(&self) -> String {
        let (_, theirs) = self.layers[0];
        format!("{}{theirs}.weight", self.prefix)
    }
}

/// Describes the blocks with windows in the one way in which a folder is read.
fn normalize_windows(config: &mut GptConfig) {
    let has_window = |block: usize| config.block_attention(block).window.is_some();
    let windows: Vec<bool> = (0..config.num_layers).map(has_window).collect();
    config.window_size = config.window_size.filter(|_| windows.contains(&true));
    let pattern = config.window_size.and_then(|_| WindowPattern::from_blocks(&windows));
    config.window_attn_skip_freq = pattern;
}
