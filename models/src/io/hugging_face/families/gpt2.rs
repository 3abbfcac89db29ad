//! GPT-2 (Radford et al., 2019).
//!
//! Linear layers keep their weights as (in, out); queries, keys and values follow one another along the outputs, as
//! here. Names begin with `transformer.` in what `transformers` writes and do not in the Hub's `gpt2`.

use serde_json::{Map, Value, json};

use super::family::{Family, Theirs};
use crate::io::hugging_face::json::{activation, activation_name, number, object, only, size};
use crate::io::tokenizer::Tokenizer;
use crate::model::config::GptConfig;

pub(super) const GPT2: Family = Family {
    model_type: "gpt2",
    class: "GPT2LMHeadModel",
    read,
    write,
    prefix: "transformer.",
    head: "lm_head.weight",
    layers: &[("wte", "wte"), ("wpe", "wpe"), ("norm_f", "ln_f")],
    blocks: "h",
    block_layers: &[
        ("norm_1", Theirs::Same("ln_1")),
        ("attn.qkv", Theirs::Transposed("attn.c_attn")),
        ("attn.proj", Theirs::Transposed("attn.c_proj")),
        ("norm_2", Theirs::Same("ln_2")),
        ("mlp.fc", Theirs::Transposed("mlp.c_fc")),
        ("mlp.proj", Theirs::Transposed("mlp.c_proj")),
    ],
    // Causal masks of old files.
    buffers: &[".attn.bias", ".attn.masked_bias"],
};

fn read(config: &Value) -> Result<GptConfig, String> {
    only(config, "scale_attn_weights", true)?;
    only(config, "scale_attn_by_inverse_layer_idx", false)?;
    only(config, "add_cross_attention", false)?;
    let gpt2 = GptConfig::gpt2(
        size(config, "vocab_size")?,
        size(config, "n_layer")?,
        size(config, "n_embd")?,
        size(config, "n_head")?,
        size(config, "n_positions")?,
    );
    Ok(GptConfig {
        ffn_hidden_size: match &config["n_inner"] {
            Value::Null => gpt2.ffn_hidden_size,
            _ => size(config, "n_inner")?,
        },
        norm_epsilon: number(config, "layer_norm_epsilon", 1e-5)?,
        init_method_std: number(config, "initializer_range", 0.02)?,
        activation: activation(config, "activation_function", "gelu_new")?,
        tie_embeddings: config["tie_word_embeddings"].as_bool().unwrap_or(true),
        ..gpt2
    })
}

fn write(config: &GptConfig) -> Map<String, Value> {
    let default = config.ffn_hidden_size == 4 * config.hidden_size;
    // GPT-2's own token if this is its vocabulary; else none, where the library would assume GPT-2's.
    let end_of_text = (config.vocab_size == Tokenizer::Gpt2.vocab_size())
        .then(|| Tokenizer::Gpt2.end_of_text())
        .flatten();
    object(json!({
        "vocab_size": config.vocab_size,
        "n_positions": config.max_position_embeddings,
        "n_embd": config.hidden_size,
        "n_layer": config.num_layers,
        "n_head": config.num_attention_heads,
        "n_inner": (!default).then_some(config.ffn_hidden_size),
        "activation_function": activation_name(config.activation),
        "layer_norm_epsilon": config.norm_epsilon,
        "initializer_range": config.init_method_std,
        "embd_pdrop": config.hidden_dropout,
        "resid_pdrop": config.hidden_dropout,
        "attn_pdrop": config.attention_dropout,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
    }))
}
