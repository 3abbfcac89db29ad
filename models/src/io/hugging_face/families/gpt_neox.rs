//! GPT-NeoX (arXiv 2204.06745) and Pythia (arXiv 2304.01373).
//!
//! The rows of queries, keys and values follow one another within each head. Attention and MLP read the same input,
//! each through its own norm.

use serde_json::{Map, Value, json};

use super::family::{Family, Theirs};
use super::rope::{read_rope, write_rope};
use crate::io::hugging_face::json::{activation, activation_name, number, object, only, size};
use crate::model::block::Normalization;
use crate::model::config::GptConfig;

pub(super) const GPT_NEOX: Family = Family {
    model_type: "gpt_neox",
    class: "GPTNeoXForCausalLM",
    read,
    write,
    prefix: "gpt_neox.",
    head: "embed_out.weight",
    layers: &[("wte", "embed_in"), ("norm_f", "final_layer_norm")],
    blocks: "layers",
    block_layers: &[
        ("norm_1", Theirs::Same("input_layernorm")),
        ("attn.qkv", Theirs::ByHead("attention.query_key_value")),
        ("attn.proj", Theirs::Same("attention.dense")),
        ("norm_2", Theirs::Same("post_attention_layernorm")),
        ("mlp.fc", Theirs::Same("mlp.dense_h_to_4h")),
        ("mlp.proj", Theirs::Same("mlp.dense_4h_to_h")),
    ],
    buffers: &[".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"],
};

fn read(config: &Value) -> Result<GptConfig, String> {
    only(config, "attention_bias", true)?;
    let heads = size(config, "num_attention_heads")?;
    let rope = read_rope(config, "rotary_emb_base", "rotary_pct", 0.25)?;
    let neox = GptConfig::llama(
        size(config, "vocab_size")?,
        size(config, "num_hidden_layers")?,
        size(config, "hidden_size")?,
        heads,
        heads,
        size(config, "max_position_embeddings")?,
    );
    Ok(GptConfig {
        ffn_hidden_size: size(config, "intermediate_size")?,
        normalization: Normalization::LayerNorm,
        norm_epsilon: number(config, "layer_norm_eps", 1e-5)?,
        init_method_std: number(config, "initializer_range", 0.02)?,
        activation: activation(config, "hidden_act", "gelu")?,
        add_bias: true,
        tie_embeddings: config["tie_word_embeddings"].as_bool().unwrap_or(false),
        use_parallel_residual: config["use_parallel_residual"].as_bool().unwrap_or(true),
        rotary_base: rope.base,
        rotary_percent: rope.percent,
        rope_scaling: rope.scaling,
        ..neox
    })
}

fn write(config: &GptConfig) -> Map<String, Value> {
    let mut fields = object(json!({
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "intermediate_size": config.ffn_hidden_size,
        "hidden_act": activation_name(config.activation),
        "max_position_embeddings": config.max_position_embeddings,
        "initializer_range": config.init_method_std,
        "layer_norm_eps": config.norm_epsilon,
        "use_parallel_residual": config.use_parallel_residual,
        "attention_bias": true,
        "tie_word_embeddings": config.tie_embeddings,
        "rotary_pct": config.rotary_percent,
        "hidden_dropout": config.hidden_dropout,
        "attention_dropout": config.attention_dropout,
        "bos_token_id": null,
        "eos_token_id": null,
    }));
    write_rope(config, "rotary_emb_base", &mut fields);
    fields
}
