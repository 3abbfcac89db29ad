//! The options of `train` that decide the shape of a model in a Hugging Face folder, by name.

use ferrotron::models::bert::{BertConfig, NormPlacement};
use ferrotron::models::gpt::{GptConfig, Normalization, PositionEmbedding};
use serde_json::{Value, json};

use super::args::model::ActivationArg;

/// Longest training sequences that a folder proposes, whatever its model can take.
const LONGEST_PROPOSED: usize = 2048;

/// The options of a GPT.
pub fn gpt(config: &GptConfig) -> Value {
    let learned = config.position_embedding_type == PositionEmbedding::LearnedAbsolute;
    let rms = config.normalization == Normalization::RmsNorm;
    let mut options = json!({
        "architecture": "gpt2",
        "num-layers": config.num_layers,
        "hidden-size": config.hidden_size,
        "num-attention-heads": config.num_attention_heads,
        "num-query-groups": config.num_query_groups,
        "kv-channels": config.kv_channels,
        "ffn-hidden-size": config.ffn_hidden_size,
        "max-position-embeddings": config.max_position_embeddings,
        "seq-length": config.max_position_embeddings.min(LONGEST_PROPOSED),
        "position-embedding-type": if learned { "learned-absolute" } else { "rope" },
        "rotary-base": config.rotary_base,
        "rotary-percent": config.rotary_percent,
        "use-rope-scaling": config.rope_scaling.is_some(),
        "use-parallel-residual": config.use_parallel_residual,
        "qk-layernorm": config.qk_layernorm,
        "add-qkv-bias": config.add_qkv_bias,
        "add-attention-bias": config.add_attention_bias,
        "add-mlp-bias": config.add_mlp_bias,
        "apply-layernorm-1p": config.apply_layernorm_1p,
        "sandwich-norm": config.sandwich_norm,
        "scale-embeddings": config.scale_embeddings,
        "normalization": if rms { "RMSNorm" } else { "LayerNorm" },
        "norm-epsilon": config.norm_epsilon,
        "init-method-std": config.init_method_std,
        "activation": ActivationArg::name_of(config.activation),
        "disable-bias-linear": !config.add_bias,
        "disable-bias-norm": !rms && !config.norm_bias(),
        "untie-embeddings-and-output-weights": !config.tie_embeddings,
    });
    let (scaling, pattern) = (config.rope_scaling, config.window_attn_skip_freq.as_ref());
    for (name, value) in [
        ("rope-scaling-factor", scaling.map(|scaling| scaling.factor.into())),
        ("rope-scaling-low-freq-factor", scaling.map(|scaling| scaling.low_freq_factor.into())),
        ("rope-scaling-high-freq-factor", scaling.map(|scaling| scaling.high_freq_factor.into())),
        (
            "rope-scaling-original-length",
            scaling.map(|scaling| scaling.original_max_position_embeddings.into()),
        ),
        ("window-size", config.window_size.map(Value::from)),
        ("window-attn-skip-freq", pattern.map(|pattern| pattern.to_string().into())),
        ("query-pre-attn-scalar", config.query_pre_attn_scalar.map(Value::from)),
        ("attn-logit-softcapping", config.attn_logit_softcapping.map(Value::from)),
        ("final-logit-softcapping", config.final_logit_softcapping.map(Value::from)),
    ] {
        if let Some(value) = value {
            options[name] = value;
        }
    }
    options
}

/// The options of a BERT.
pub fn bert(config: &BertConfig) -> Value {
    let placement = match config.norm_placement {
        NormPlacement::Pre => "pre",
        NormPlacement::Post => "post",
    };
    let mut options = json!({
        "architecture": "bert",
        "num-layers": config.num_layers,
        "hidden-size": config.hidden_size,
        "num-attention-heads": config.num_attention_heads,
        "ffn-hidden-size": config.ffn_hidden_size,
        "max-position-embeddings": config.max_position_embeddings,
        "seq-length": config.max_position_embeddings,
        "norm-epsilon": config.norm_epsilon,
        "norm-placement": placement,
        "bert-no-binary-head": !config.binary_head,
        "init-method-std": config.init_method_std,
        "activation": ActivationArg::name_of(config.activation),
    });
    if config.num_choices.is_some() {
        options["task"] = "race".into();
    }
    options
}
