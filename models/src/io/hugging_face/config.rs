//! `config.json`, both ways.

use ferrotron_tensor::{DType, Error, Result};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

use crate::io::tokenizer::Tokenizer;
use crate::model::block::Normalization;
use crate::model::config::{ActivationKind, GptConfig, PositionEmbedding};

/// Their names of our nonlinearities; the first of each is written.
pub(super) const ACTIVATIONS: [(&str, ActivationKind); 4] = [
    ("gelu_new", ActivationKind::GeluTanh),
    ("gelu_pytorch_tanh", ActivationKind::GeluTanh),
    ("gelu", ActivationKind::GeluErf),
    ("relu", ActivationKind::Relu),
];

/// The configuration of the GPT-2 in `folder`. Dropout is a matter of training and stays 0.
///
/// # Errors
/// A folder without a readable `config.json`; a model other than GPT-2 or a variant that is not
/// supported, by name.
pub fn read_config(folder: &Path) -> Result<GptConfig> {
    let (path, config) = read_json(folder)?;
    let refuse = |what: String| Error::io("hugging_face", format!("'{}' {what}", path.display()));
    parse(&config).map_err(|what| refuse(what.to_string())).and_then(|config| {
        config.validate()?;
        Ok(config)
    })
}

/// The path and contents of `config.json` in `folder`.
pub(super) fn read_json(folder: &Path) -> Result<(PathBuf, Value)> {
    let path = folder.join("config.json");
    let refuse = |what: String| Error::io("hugging_face", format!("'{}' {what}", path.display()));
    let text = std::fs::read(&path).map_err(|error| refuse(format!("cannot be read: {error}")))?;
    let config =
        serde_json::from_slice(&text).map_err(|error| refuse(format!("is damaged: {error}")))?;
    Ok((path, config))
}

/// A whole number of `config.json`.
pub(super) fn size(config: &Value, name: &str) -> std::result::Result<usize, String> {
    let value = config[name].as_u64().and_then(|size| usize::try_from(size).ok());
    value.ok_or_else(|| format!("has {name} {}: it must be a whole number", config[name]))
}

/// A number of `config.json`, or `default` if it is not there.
pub(super) fn number(config: &Value, name: &str, default: f64) -> std::result::Result<f64, String> {
    match &config[name] {
        Value::Null => Ok(default),
        value => value.as_f64().ok_or_else(|| format!("has {name} {value}: it must be a number")),
    }
}

/// The name of a dtype in `config.json`.
pub(super) fn dtype_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "float64",
        DType::F16 => "float16",
        DType::BF16 => "bfloat16",
        _ => "float32",
    }
}

fn parse(config: &Value) -> std::result::Result<GptConfig, String> {
    if config.get("model").is_some() && config.get("model_type").is_none() {
        return Err("belongs to a Ferrotron checkpoint, which is opened with --load".into());
    }
    let kind = config["model_type"].as_str().unwrap_or("");
    if kind != "gpt2" {
        return Err(format!("describes model_type '{kind}': only gpt2 is supported"));
    }
    let activation = config["activation_function"].as_str().unwrap_or("gelu_new");
    let Some((_, activation)) = ACTIVATIONS.iter().find(|(name, _)| *name == activation) else {
        let known = ACTIVATIONS.map(|(name, _)| name).join(", ");
        return Err(format!("has activation_function '{activation}': supported are {known}"));
    };
    for (name, only) in [
        ("scale_attn_weights", true),
        ("scale_attn_by_inverse_layer_idx", false),
        ("add_cross_attention", false),
        ("tie_word_embeddings", true),
    ] {
        if config[name].as_bool().unwrap_or(only) != only {
            return Err(format!("has {name} {}: only {only} is supported", config[name]));
        }
    }
    let gpt2 = GptConfig::gpt2(
        size(config, "vocab_size")?,
        size(config, "n_layer")?,
        size(config, "n_embd")?,
        size(config, "n_head")?,
        size(config, "n_positions")?,
    );
    Ok(GptConfig {
        ffn_hidden_size: if config["n_inner"].is_null() {
            gpt2.ffn_hidden_size
        } else {
            size(config, "n_inner")?
        },
        norm_epsilon: number(config, "layer_norm_epsilon", 1e-5)?,
        init_method_std: number(config, "initializer_range", 0.02)?,
        activation: *activation,
        ..gpt2
    })
}

/// The contents of `config.json`.
///
/// Errors, naming all that is in the way, if GPT-2 there cannot be this model.
pub(super) fn write_config(config: &GptConfig, dtype: DType) -> Result<Value> {
    let activation = ACTIVATIONS.iter().find(|(_, ours)| *ours == config.activation);
    let obstacles: Vec<&str> = [
        (config.position_embedding_type != PositionEmbedding::LearnedAbsolute, "rotary positions"),
        (config.normalization != Normalization::LayerNorm, "RMSNorm"),
        (activation.is_none(), "SwiGLU"),
        (config.num_query_groups != config.num_attention_heads, "grouped-query attention"),
        (
            config.kv_channels * config.num_attention_heads != config.hidden_size,
            "heads of another width",
        ),
        (!config.add_bias, "layers without biases"),
        (config.qk_layernorm, "norms of queries and keys"),
        (config.window_size.is_some(), "sliding window"),
        (config.attn_logit_softcapping.is_some(), "soft cap of scores"),
        (!config.tie_embeddings, "untied head"),
    ]
    .into_iter()
    .filter_map(|(in_the_way, what)| in_the_way.then_some(what))
    .collect();
    let (true, Some((activation, _))) = (obstacles.is_empty(), activation) else {
        return Err(Error::config(
            "hugging_face",
            format!(
                "this model cannot be a Hugging Face GPT-2, which has no {}",
                obstacles.join(", no ")
            ),
        ));
    };
    let default = config.ffn_hidden_size == 4 * config.hidden_size;
    // GPT-2's own token if this is its vocabulary; else none, where the library would assume GPT-2's.
    let end_of_text = (config.vocab_size == Tokenizer::Gpt2.vocab_size())
        .then(|| Tokenizer::Gpt2.end_of_text())
        .flatten();
    Ok(json!({
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_positions": config.max_position_embeddings,
        "n_embd": config.hidden_size,
        "n_layer": config.num_layers,
        "n_head": config.num_attention_heads,
        "n_inner": (!default).then_some(config.ffn_hidden_size),
        "activation_function": activation,
        "layer_norm_epsilon": config.norm_epsilon,
        "initializer_range": config.init_method_std,
        "embd_pdrop": config.hidden_dropout,
        "resid_pdrop": config.hidden_dropout,
        "attn_pdrop": config.attention_dropout,
        "tie_word_embeddings": true,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "dtype": dtype_name(dtype),
    }))
}
