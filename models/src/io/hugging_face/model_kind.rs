//! The kind of model in a folder, by `config.json`.

use ferrotron_tensor::{Error, Result};
use serde_json::Value;
use std::path::Path;

use super::families::{FAMILIES, family};
use super::json::read_json;

/// The kind of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelKind {
    /// A [`Gpt`](crate::model::gpt::Gpt) of one of the families.
    Gpt,
    /// `BertForPreTraining`, `BertForMaskedLM` and their `MegatronBert` twins.
    Bert,
}

/// The prefixes of the names of BERT's classes, and their `model_type`.
const BERTS: [(&str, &str); 2] = [("Bert", "bert"), ("MegatronBert", "megatron-bert")];

/// The kind of the model in `folder`.
///
/// # Errors
/// A folder without a readable `config.json`; another family, with the known ones.
pub fn model_kind(folder: &Path) -> Result<ModelKind> {
    let (path, config) = read_json(folder)?;
    let kind = model_type_of(&config);
    if BERTS.iter().any(|(_, bert)| *bert == kind) {
        return Ok(ModelKind::Bert);
    }
    let refuse =
        |what: String| Error::io("hugging_face", format!("'{}' describes {what}", path.display()));
    family(kind).map(|_| ModelKind::Gpt).map_err(refuse)
}

/// The `model_type` of the model in `folder` or, without one, that of its first class in `architectures`.
///
/// # Errors
/// A folder without a readable `config.json`.
pub fn model_type(folder: &Path) -> Result<String> {
    read_json(folder).map(|(_, config)| model_type_of(&config).to_string())
}

/// Like [`model_type`], of the contents of `config.json`; of an unknown class its name, which may be empty.
pub(super) fn model_type_of(config: &Value) -> &str {
    if let Some(kind) = config["model_type"].as_str() {
        return kind;
    }
    let class = config["architectures"][0].as_str().unwrap_or("");
    // GPT2LMHeadModel, LlamaForCausalLM, BertModel.
    let begins =
        |stem: &str| class.strip_prefix(stem).is_some_and(|rest| rest.starts_with(['F', 'L', 'M']));
    let families = FAMILIES.into_iter().map(|family| {
        let stem = family.class.trim_end_matches("ForCausalLM").trim_end_matches("LMHeadModel");
        (stem, family.model_type)
    });
    families.chain(BERTS).find(|(stem, _)| begins(stem)).map_or(class, |(_, kind)| kind)
}
