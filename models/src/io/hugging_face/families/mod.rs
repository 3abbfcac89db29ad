//! The families of language models that [`Gpt`](crate::model::gpt::Gpt) holds: for each its names in `config.json` and
//! among the weights.

mod family;
mod gemma;
mod gpt2;
mod gpt_neox;
mod llama;
mod mistral;
mod qwen;
mod rope;
mod windows;

use ferrotron_tensor::Result;

use crate::model::config::GptConfig;

pub(super) use family::Family;

/// Every family, in the order in which an export tries them.
pub(super) const FAMILIES: [&Family; 7] = [
    &gpt2::GPT2,
    &llama::LLAMA,
    &mistral::MISTRAL,
    &qwen::QWEN2,
    &qwen::QWEN3,
    &gemma::GEMMA2,
    &gpt_neox::GPT_NEOX,
];

/// Known families that are not supported, and the switch that each would need.
pub(super) const OTHERS: &[(&str, &str)] = &[
    ("arcee", "relu^2 in the MLP"),
    ("bamba", "state-space layers"),
    ("bitnet", "weights of three values, and norms inside attention and MLP"),
    ("bloom", "ALiBi, and a norm behind the embeddings"),
    ("codegen", "a parallel residual with one norm, and rotations of neighbouring elements"),
    (
        "cohere",
        "a parallel residual with one LayerNorm without bias, rotations of neighbouring elements, and a logit scale",
    ),
    (
        "cohere2",
        "a parallel residual with one LayerNorm without bias, and rotary positions in some blocks only",
    ),
    ("dbrx", "a mixture of experts, and a clamp of queries, keys and values"),
    ("deepseek_v2", "multi-head latent attention, and a mixture of experts"),
    ("deepseek_v3", "multi-head latent attention, and a mixture of experts"),
    ("ernie4_5", "rotations of neighbouring elements"),
    (
        "falcon",
        "a parallel residual with one norm, multi-query attention with heads packed by group, or ALiBi",
    ),
    ("falcon_h1", "state-space layers"),
    ("falcon_mamba", "state-space layers"),
    ("gemma", "GeGLU and norms with 1 + weight, without norms behind attention and MLP"),
    ("gemma3", "images, and two rotary bases"),
    ("gemma3_text", "two rotary bases, one for blocks with a window"),
    ("glm", "a rotation of the first half of a head by neighbouring elements"),
    ("glm4", "norms behind attention and MLP, and rotations of neighbouring elements"),
    ("gpt_bigcode", "multi-query attention in GPT-2's layout"),
    (
        "gpt_neo",
        "windows in every other block without a scale of the scores, and no bias of queries, keys and values",
    ),
    ("gpt_neox_japanese", "a bias of attention in the last block only"),
    ("gpt_oss", "attention sinks, and a mixture of experts"),
    ("gptj", "a parallel residual with one norm, and rotations of neighbouring elements"),
    ("granite", "multipliers of embeddings, residuals, scores and logits"),
    (
        "granitemoe",
        "multipliers of embeddings, residuals, scores and logits, and a mixture of experts",
    ),
    ("helium", "rotations of neighbouring elements"),
    ("jamba", "state-space layers, and a mixture of experts"),
    ("jetmoe", "a mixture of experts, of attention too"),
    ("llama4", "images, a mixture of experts, and rotary positions in some blocks only"),
    ("llama4_text", "a mixture of experts, and rotary positions in some blocks only"),
    ("mamba", "state-space layers"),
    ("mamba2", "state-space layers"),
    ("mixtral", "a mixture of experts"),
    ("mpt", "ALiBi, and LayerNorm without bias in a layout of its own"),
    (
        "nemotron",
        "relu^2 in the MLP, and LayerNorm with 1 + weight and rotations of a part of a head",
    ),
    (
        "olmo",
        "a LayerNorm without weight and bias, and perhaps a clamp of queries, keys and values",
    ),
    (
        "olmo2",
        "norms behind attention and MLP alone, and norms of all queries and of all keys together",
    ),
    (
        "olmo3",
        "norms behind attention and MLP alone, and norms of all queries and of all keys together",
    ),
    ("olmoe", "a mixture of experts, and norms of all queries and of all keys together"),
    ("openai-gpt", "norms behind the residual additions"),
    ("opt", "learned positions that begin at 2, and relu"),
    ("persimmon", "relu^2 in the MLP, and a LayerNorm of queries and keys"),
    ("phi", "a parallel residual with one norm, and a bias of the head"),
    (
        "phi3",
        "queries, keys and values, and gate and up, in one tensor each, and a scaling of rotary frequencies by pair",
    ),
    ("phimoe", "a mixture of experts"),
    ("qwen2_moe", "a mixture of experts"),
    ("qwen3_moe", "a mixture of experts"),
    ("qwen3_next", "gated linear attention, and a mixture of experts"),
    ("recurrent_gemma", "recurrent layers"),
    ("rwkv", "recurrent layers"),
    ("smollm3", "rotary positions in some blocks only"),
    (
        "stablelm",
        "LayerNorm in a Llama, a partial rotation, and perhaps a parallel residual with one norm",
    ),
    ("starcoder2", "LayerNorm, biases and a plain GELU in a Llama with grouped queries"),
    ("t5", "an encoder and a decoder, and relative positions"),
    ("xglm", "sinusoidal positions"),
    ("zamba2", "state-space layers"),
];

/// The family called `model_type`; an error lists the known ones.
pub(super) fn family(model_type: &str) -> std::result::Result<&'static Family, String> {
    let found = FAMILIES.into_iter().find(|family| family.model_type == model_type);
    found.ok_or_else(|| {
        let needs = OTHERS.iter().find(|(name, _)| *name == model_type);
        let needs = needs.map_or(String::new(), |(_, switch)| format!(", which needs {switch}"));
        let known = FAMILIES.map(|family| family.model_type).join(", ");
        format!("model_type '{model_type}'{needs}: supported are {known}, bert, megatron-bert")
    })
}

/// The first family that holds a model of `config`, or else an error that names the differences of the nearest one.
pub(super) fn family_of(config: &GptConfig) -> Result<&'static Family> {
    let tried = FAMILIES.map(|family| (family, family.obstacles(config)));
    let nearest = tried.into_iter().min_by_key(|(_, obstacles)| obstacles.len());
    let (family, obstacles) = nearest.expect("there are families");
    family.refuse(&obstacles)
}
