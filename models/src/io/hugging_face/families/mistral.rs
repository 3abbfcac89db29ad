//! Mistral (arXiv 2310.06825): Llama with a sliding window.

use serde_json::{Map, Value};

use super::family::Family;
use super::llama::{LLAMA, read_llama, write_llama};
use crate::io::hugging_face::json::size;
use crate::model::config::GptConfig;

pub(super) const MISTRAL: Family =
    Family { model_type: "mistral", class: "MistralForCausalLM", read, write, ..LLAMA };

/// The window where `config.json` does not name one, as in the first release.
const WINDOW: usize = 4096;

fn read(config: &Value) -> Result<GptConfig, String> {
    let window_size = match config.get("sliding_window") {
        None => Some(WINDOW),
        Some(Value::Null) => None,
        Some(_) => Some(size(config, "sliding_window")?),
    };
    Ok(GptConfig { window_size, ..read_llama(config)? })
}

fn write(config: &GptConfig) -> Map<String, Value> {
    let mut fields = write_llama(config);
    fields.insert("sliding_window".into(), config.window_size.into());
    fields
}
