//! Qwen 2 and 2.5 (arXiv 2407.10671): Llama with biases of queries, keys and values; and Qwen 3 (arXiv 2505.09388):
//! Llama with norms of queries and keys.

use serde_json::{Map, Value, json};

use super::family::Family;
use super::llama::{LLAMA, read_llama, write_llama};
use crate::io::hugging_face::json::{only, size};
use crate::model::config::GptConfig;

pub(super) const QWEN2: Family = Family {
    model_type: "qwen2",
    class: "Qwen2ForCausalLM",
    read: read_qwen2,
    write: write_qwen,
    ..LLAMA
};

pub(super) const QWEN3: Family = Family {
    model_type: "qwen3",
    class: "Qwen3ForCausalLM",
    read: read_qwen3,
    write: write_qwen,
    ..LLAMA
};

fn read_qwen2(config: &Value) -> Result<GptConfig, String> {
    let llama = read_llama(config)?;
    let window_size = window(config, llama.num_layers)?;
    Ok(GptConfig { add_qkv_bias: true, window_size, ..llama })
}

fn read_qwen3(config: &Value) -> Result<GptConfig, String> {
    only(config, "attention_bias", false)?;
    let llama = read_llama(config)?;
    let window_size = window(config, llama.num_layers)?;
    let kv_channels = match &config["head_dim"] {
        Value::Null => 128,
        _ => llama.kv_channels,
    };
    Ok(GptConfig { qk_layernorm: true, window_size, kv_channels, ..llama })
}

/// The window of all blocks. Blocks from `max_window_layers` on have one if `use_sliding_window`.
fn window(config: &Value, layers: usize) -> Result<Option<usize>, String> {
    if !config["use_sliding_window"].as_bool().unwrap_or(false) {
        return Ok(None);
    }
    let with = match &config["layer_types"] {
        Value::Array(types) => types.iter().filter(|kind| *kind == "sliding_attention").count(),
        _ => layers.saturating_sub(size(config, "max_window_layers")?),
    };
    match with {
        0 => Ok(None),
        _ if with == layers => size(config, "sliding_window").map(Some),
        _ => Err(format!(
            "has a sliding window in {with} of {layers} blocks: only all or none is supported"
        )),
    }
}

fn write_qwen(config: &GptConfig) -> Map<String, Value> {
    let mut fields = write_llama(config);
    let Value::Object(windows) = json!({
        "use_sliding_window": config.window_size.is_some(),
        "sliding_window": config.window_size,
        "max_window_layers": if config.window_size.is_some() { 0 } else { config.num_layers },
    }) else {
        return fields;
    };
    fields.extend(windows);
    fields
}
