//! Qwen 2 and 2.5 (arXiv 2407.10671): Llama with biases of queries, keys and values; and Qwen 3 (arXiv 2505.09388):
//! Llama with norms of queries and keys.

use serde_json::{Map, Value};

use super::family::Family;
use super::llama::{LLAMA, read_llama, write_llama};
use super::windows::{layer_types, read_windows};
use crate::io::hugging_face::json::size;
use crate::model::config::GptConfig;

pub(super) const QWEN2: Family = Family {
    model_type: "qwen2",
    class: "Qwen2ForCausalLM",
    read: read_qwen2,
    write: write_qwen2,
    ..LLAMA
};

pub(super) const QWEN3: Family = Family {
    model_type: "qwen3",
    class: "Qwen3ForCausalLM",
    read: read_qwen3,
    write: write_qwen3,
    ..LLAMA
};

fn read_qwen2(config: &Value) -> Result<GptConfig, String> {
    let llama = with_windows(config, read_llama(config)?)?;
    Ok(GptConfig { add_qkv_bias: true, ..llama })
}

fn read_qwen3(config: &Value) -> Result<GptConfig, String> {
    let llama = with_windows(config, read_llama(config)?)?;
    let kv_channels = match &config["head_dim"] {
        Value::Null => 128,
        _ => llama.kv_channels,
    };
    let add_attention_bias = config["attention_bias"].as_bool().unwrap_or(false);
    Ok(GptConfig { qk_layernorm: true, kv_channels, add_attention_bias, ..llama })
}

/// Adds the windows. Blocks from `max_window_layers` on have one if `use_sliding_window`, unless `layer_types` lists
/// others.
fn with_windows(config: &Value, llama: GptConfig) -> Result<GptConfig, String> {
    let (window, first) = match config["use_sliding_window"].as_bool().unwrap_or(false) {
        true if config["layer_types"].is_array() => (Some(size(config, "sliding_window")?), 0),
        true => (Some(size(config, "sliding_window")?), size(config, "max_window_layers")?),
        false => (None, 0),
    };
    let (window_size, window_attn_skip_freq) =
        read_windows(config, llama.num_layers, window, |block| block >= first)?;
    Ok(GptConfig { window_size, window_attn_skip_freq, ..llama })
}

fn write_qwen2(config: &GptConfig) -> Map<String, Value> {
    let has_window = |&block: &usize| config.block_attention(block).window.is_some();
    let first = (0..config.num_layers).find(has_window).unwrap_or(config.num_layers);
    let mut fields = write_llama(config);
    for (name, value) in [
        ("use_sliding_window", config.window_size.is_some().into()),
        ("sliding_window", config.window_size.into()),
        ("max_window_layers", first.into()),
        ("layer_types", layer_types(config)),
    ] {
        fields.insert(name.into(), value);
    }
    fields
}

fn write_qwen3(config: &GptConfig) -> Map<String, Value> {
    let mut fields = write_qwen2(config);
    fields.insert("attention_bias".into(), (config.add_bias || config.add_attention_bias).into());
    fields
}
