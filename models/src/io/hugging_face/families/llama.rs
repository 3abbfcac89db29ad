//! Llama 1 to 3.2, SmolLM, and everything that its relatives share with it.

use serde_json::{Map, Value, json};

use super::family::{Family, Theirs};
use super::rope::{read_rope, write_rope};
use crate::io::hugging_face::json::{number, object, size};
use crate::model::config::GptConfig;

pub(super) const LLAMA: Family = Family {
    model_type: "llama",
    class: "LlamaForCausalLM",
    read,
    write,
    prefix: "model.",
    head: "lm_head.weight",
    layers: &[("wte", "embed_tokens"), ("norm_f", "norm")],
    blocks: "layers",
    block_layers: &[
        ("norm_1", Theirs::Same("input_layernorm")),
        ("attn.qkv", Theirs::Parts(&["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"])),
        ("attn.q_norm", Theirs::Same("self_attn.q_norm")),
        ("attn.k_norm", Theirs::Same("self_attn.k_norm")),
        ("attn.proj", Theirs::Same("self_attn.o_proj")),
        ("norm_2", Theirs::Same("post_attention_layernorm")),
        ("mlp.gate_up", Theirs::Parts(&["mlp.gate_proj", "mlp.up_proj"])),
        ("mlp.proj", Theirs::Same("mlp.down_proj")),
    ],
    buffers: &[".rotary_emb.inv_freq"],
};

fn read(config: &Value) -> Result<GptConfig, String> {
    let switch = |name: &str| config[name].as_bool().unwrap_or(false);
    Ok(GptConfig {
        add_attention_bias: switch("attention_bias"),
        add_mlp_bias: switch("mlp_bias"),
        ..read_llama(config)?
    })
}

/// The fields that all relatives of Llama with SwiGLU have.
pub(super) fn read_llama(config: &Value) -> Result<GptConfig, String> {
    let act = config["hidden_act"].as_str().unwrap_or("silu");
    if act != "silu" {
        return Err(format!("has hidden_act '{act}': only silu is supported"));
    }
    read_gated(config)
}

/// The fields that all relatives of Llama have, whatever their activation.
pub(super) fn read_gated(config: &Value) -> Result<GptConfig, String> {
    let [hidden, heads] = [size(config, "hidden_size")?, size(config, "num_attention_heads")?];
    let or = |name, default| match &config[name] {
        Value::Null => Ok(default),
        _ => size(config, name),
    };
    let rope = read_rope(config, "rope_theta", "partial_rotary_factor", 1.0)?;
    let llama = GptConfig::llama(
        size(config, "vocab_size")?,
        size(config, "num_hidden_layers")?,
        hidden,
        heads,
        or("num_key_value_heads", heads)?,
        size(config, "max_position_embeddings")?,
    );
    Ok(GptConfig {
        ffn_hidden_size: size(config, "intermediate_size")?,
        kv_channels: or("head_dim", hidden / heads.max(1))?,
        norm_epsilon: number(config, "rms_norm_eps", 1e-6)?,
        init_method_std: number(config, "initializer_range", 0.02)?,
        tie_embeddings: config["tie_word_embeddings"].as_bool().unwrap_or(false),
        rotary_base: rope.base,
        rotary_percent: rope.percent,
        rope_scaling: rope.scaling,
        ..llama
    })
}

fn write(config: &GptConfig) -> Map<String, Value> {
    let mut fields = write_llama(config);
    let attention_bias = config.add_bias || config.add_attention_bias;
    fields.insert("attention_bias".into(), attention_bias.into());
    fields.insert("mlp_bias".into(), (config.add_bias || config.add_mlp_bias).into());
    fields
}

/// The inverse of [`read_llama`] and [`read_gated`].
pub(super) fn write_llama(config: &GptConfig) -> Map<String, Value> {
    let mut fields = object(json!({
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_query_groups,
        "head_dim": config.kv_channels,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "initializer_range": config.init_method_std,
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_dropout": config.attention_dropout,
        "bos_token_id": null,
        "eos_token_id": null,
    }));
    write_rope(config, "rope_theta", &mut fields);
    fields
}
