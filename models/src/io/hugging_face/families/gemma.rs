//! Gemma 2 (arXiv 2408.00118): Llama with GeGLU, scaled and tied embeddings, norms with weights around 0 before and
//! behind attention and MLP, soft caps of scores and logits, and a window in every other block.

use serde_json::{Map, Value};

use super::family::{Family, Theirs};
use super::llama::{LLAMA, read_gated, write_llama};
use super::windows::{layer_types, read_windows};
use crate::io::hugging_face::json::{activation, number, only, size};
use crate::model::config::{ActivationKind, GptConfig};

pub(super) const GEMMA2: Family = Family {
    model_type: "gemma2",
    class: "Gemma2ForCausalLM",
    read,
    write,
    block_layers: &[
        ("norm_1", Theirs::Same("input_layernorm")),
        ("attn.qkv", Theirs::Parts(&["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"])),
        ("attn.proj", Theirs::Same("self_attn.o_proj")),
        ("post_norm_1", Theirs::Same("post_attention_layernorm")),
        ("norm_2", Theirs::Same("pre_feedforward_layernorm")),
        ("mlp.gate_up", Theirs::Parts(&["mlp.gate_proj", "mlp.up_proj"])),
        ("mlp.proj", Theirs::Same("mlp.down_proj")),
        ("post_norm_2", Theirs::Same("post_feedforward_layernorm")),
    ],
    ..LLAMA
};

/// The width of a head for `transformers` where `config.json` names none.
const HEAD_DIM: usize = 256;
const WINDOW: usize = 4096;

fn read(config: &Value) -> Result<GptConfig, String> {
    only(config, "use_bidirectional_attention", false)?;
    let gated = read_gated(config)?;
    // The older of two names counts only where the newer one is missing.
    let name =
        if config["hidden_activation"].is_string() { "hidden_activation" } else { "hidden_act" };
    if activation(config, name, "gelu_pytorch_tanh")? != ActivationKind::GeluTanh {
        return Err(format!("has {name} {}: only gelu_pytorch_tanh is supported", config[name]));
    }
    let kv_channels = match config.get("head_dim") {
        None => HEAD_DIM,
        Some(_) => gated.kv_channels,
    };
    let window = match config.get("sliding_window") {
        None => Some(WINDOW),
        Some(Value::Null) => None,
        Some(_) => Some(size(config, "sliding_window")?),
    };
    let (window_size, window_attn_skip_freq) =
        read_windows(config, gated.num_layers, window, |block| block % 2 == 0)?;
    let scalar = number(config, "query_pre_attn_scalar", HEAD_DIM as f64)?;
    let softcap = |name: &str, default: f64| match config.get(name) {
        Some(Value::Null) => Ok(None),
        _ => number(config, name, default).map(Some),
    };
    Ok(GptConfig {
        kv_channels,
        activation: ActivationKind::Geglu,
        tie_embeddings: config["tie_word_embeddings"].as_bool().unwrap_or(true),
        add_attention_bias: config["attention_bias"].as_bool().unwrap_or(false),
        window_size,
        window_attn_skip_freq,
        query_pre_attn_scalar: Some(scalar).filter(|&scalar| scalar != kv_channels as f64),
        attn_logit_softcapping: softcap("attn_logit_softcapping", 50.0)?,
        final_logit_softcapping: softcap("final_logit_softcapping", 30.0)?,
        apply_layernorm_1p: true,
        sandwich_norm: true,
        scale_embeddings: true,
        ..gated
    })
}

fn write(config: &GptConfig) -> Map<String, Value> {
    let mut fields = write_llama(config);
    let scalar = config.query_pre_attn_scalar.unwrap_or(config.kv_channels as f64);
    // A whole number in `transformers`.
    let scalar = if scalar.fract() == 0.0 { (scalar as u64).into() } else { scalar.into() };
    fields.remove("hidden_act");
    for (name, value) in [
        ("hidden_activation", "gelu_pytorch_tanh".into()),
        ("attention_bias", (config.add_bias || config.add_attention_bias).into()),
        ("query_pre_attn_scalar", scalar),
        ("sliding_window", config.window_size.into()),
        ("layer_types", layer_types(config)),
        ("attn_logit_softcapping", config.attn_logit_softcapping.into()),
        ("final_logit_softcapping", config.final_logit_softcapping.into()),
        ("pad_token_id", Value::Null),
    ] {
        fields.insert(name.into(), value);
    }
    fields
}
