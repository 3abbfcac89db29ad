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
const OTHERS: [(&str, &str); 10] = [
    ("bloom", "ALiBi in the configuration of a GPT"),
    ("falcon", "one norm for attention and MLP"),
    ("gemma", "GeGLU without norms behind attention and MLP in a configuration of transformers"),
    ("gemma3_text", "two rotary bases"),
    ("gptj", "one norm for attention and MLP, and rotations of neighbouring elements"),
    ("mixtral", "experts"),
    ("olmo2", "norms behind attention and MLP, before the addition"),
    ("opt", "positions that begin at 2"),
    ("phi3", "scaling of rotary frequencies by pair"),
    ("qwen3_moe", "experts"),
];

/// The family called `model_type`; an error lists the known ones.
pub(super) fn family(model_type: &str) -> std::result::Result<&'static Family, String> {
    let found = FAMILIES.into_iter().find(|family| family.model_type == model_type);
    found.ok_or_else(|| {
        let needs = OTHERS.iter().find(|(name, _)| *name == model_type);
        let needs = needs.map_or(String::new(), |(_, switch)| format!(", which needs {switch}"));
        let known = FAMILIES.map(|family| family.model_type).join(", ");
        format!(
            "describes model_type '{model_type}'{needs}: supported are {known}, bert, megatron-bert"
        )
    })
}

/// The first family that holds a model of `config`, or else an error that names the differences of the nearest one.
pub(super) fn family_of(config: &GptConfig) -> Result<&'static Family> {
    let tried = FAMILIES.map(|family| (family, family.obstacles(config)));
    let nearest = tried.into_iter().min_by_key(|(_, obstacles)| obstacles.len());
    let (family, obstacles) = nearest.expect("there are families");
    family.refuse(&obstacles)
}
