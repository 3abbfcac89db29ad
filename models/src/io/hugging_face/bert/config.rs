//! `config.json` of a BERT, both ways.

use ferrotron_tensor::{DType, Error, Result};
use serde_json::{Value, json};
use std::path::Path;

use crate::io::data::tasks::NUM_CHOICES;
use crate::io::hugging_face::json::{
    activation, activation_name, dtype_name, number, only, read_json, size,
};
use crate::io::hugging_face::model_kind::model_type_of;
use crate::model::bert::{BertConfig, NormPlacement};

/// Values of `model_type`, and where the norms are then.
const KINDS: [(&str, NormPlacement); 2] =
    [("bert", NormPlacement::Post), ("megatron-bert", NormPlacement::Pre)];

/// The `model_type` of a BERT.
pub(super) fn model_type(placement: NormPlacement) -> &'static str {
    match placement {
        NormPlacement::Post => "bert",
        NormPlacement::Pre => "megatron-bert",
    }
}

/// The configuration of the BERT in `folder`.
pub(super) fn parse(folder: &Path, binary_head: bool) -> Result<BertConfig> {
    let (path, config) = read_json(folder)?;
    let refuse = |what: String| Error::io("hugging_face", format!("'{}' {what}", path.display()));
    let config = from_json(&config, binary_head).map_err(refuse)?;
    config.validate()?;
    Ok(config)
}

fn from_json(config: &Value, binary_head: bool) -> std::result::Result<BertConfig, String> {
    let kind = model_type_of(config);
    let Some((_, placement)) = KINDS.iter().find(|(name, _)| *name == kind) else {
        return Err(format!("describes model_type '{kind}': a BERT has bert or megatron-bert"));
    };
    only(config, "is_decoder", false)?;
    only(config, "add_cross_attention", false)?;
    only(config, "tie_word_embeddings", true)?;
    let positions = config["position_embedding_type"].as_str().unwrap_or("absolute");
    if positions != "absolute" {
        return Err(format!(
            "has position_embedding_type '{positions}': only absolute is supported"
        ));
    }
    let bert = BertConfig::new(
        *placement,
        size(config, "vocab_size")?,
        size(config, "num_hidden_layers")?,
        size(config, "hidden_size")?,
        size(config, "num_attention_heads")?,
        size(config, "max_position_embeddings")?,
    );
    let class = config["architectures"][0].as_str().unwrap_or_default();
    let bert = BertConfig {
        ffn_hidden_size: size(config, "intermediate_size")?,
        num_token_types: size(config, "type_vocab_size")?,
        norm_epsilon: number(config, "layer_norm_eps", 1e-12)?,
        init_method_std: number(config, "initializer_range", 0.02)?,
        activation: activation(config, "hidden_act", "gelu")?,
        binary_head,
        ..bert
    };
    match class.ends_with("ForMultipleChoice") {
        // No configuration there tells the number.
        true => Ok(bert.with_choices(NUM_CHOICES)),
        false => Ok(bert),
    }
}

/// The contents of `config.json`.
pub(super) fn write_config(config: &BertConfig, dtype: DType) -> Value {
    let class = match config.norm_placement {
        NormPlacement::Post => "Bert",
        NormPlacement::Pre => "MegatronBert",
    };
    let head = match (config.num_choices, config.binary_head) {
        (Some(_), _) => "ForMultipleChoice",
        (None, true) => "ForPreTraining",
        (None, false) => "ForMaskedLM",
    };
    json!({
        "architectures": [format!("{class}{head}")],
        "model_type": model_type(config.norm_placement),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "intermediate_size": config.ffn_hidden_size,
        "max_position_embeddings": config.max_position_embeddings,
        "type_vocab_size": config.num_token_types,
        "hidden_act": activation_name(config.activation),
        "layer_norm_eps": config.norm_epsilon,
        "initializer_range": config.init_method_std,
        "hidden_dropout_prob": config.hidden_dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "is_decoder": false,
        "tie_word_embeddings": true,
        "dtype": dtype_name(dtype),
    })
}
