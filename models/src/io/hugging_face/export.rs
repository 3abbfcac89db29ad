//! The export of models to folders of Hugging Face.

use ferrotron_nn::Module;
use ferrotron_tensor::{Error, Result, Tensor};
use serde_json::Value;
use std::fs;
use std::path::Path;

use super::config::write_config;
use super::families::{Family, family, family_of};
use crate::io::checked_file::{Fault, cannot, replace, write_bytes};
use crate::io::tensor_file::write_tensors;
use crate::io::tokenizer::Tokenizer;
use crate::model::gpt::Gpt;

/// Writes `gpt` into `folder`, as the `save_pretrained` of the first family that holds it would: GPT-2, Llama, Mistral,
/// Qwen 2, Qwen 3, Gemma 2 or GPT-NeoX. `AutoModelForCausalLM.from_pretrained(folder)` loads the same numbers.
///
/// ```
/// use ferrotron_models::gpt::{Gpt, GptConfig};
/// use ferrotron_models::hugging_face;
/// use ferrotron_nn::Scope;
/// use ferrotron_tensor::{DType, Device};
/// # let dir = tempfile::tempdir().unwrap();
/// # let folder = dir.path().join("export");
/// let scope = Scope::new(&Device::cpu(1)?, DType::F32, 1234);
/// let gpt = Gpt::new(&scope, &GptConfig::llama(65, 2, 32, 4, 2, 16))?;
/// hugging_face::export(&gpt, &folder)?;
/// assert_eq!(hugging_face::model_type(&folder)?, "llama");
/// assert_eq!(hugging_face::read_config(&folder)?, *gpt.config());
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
///
/// # Errors
/// A model that no family holds, naming what differs in the nearest; a folder that cannot be written or is a
/// checkpoint.
pub fn export(gpt: &Gpt, folder: &Path) -> Result<()> {
    write(gpt, family_of(gpt.config())?, folder)
}

/// Like [`export`], as the family whose `model_type` is given.
///
/// # Errors
/// Errors of [`export`]; a family that is not supported or does not hold this model.
pub fn export_as(gpt: &Gpt, model_type: &str, folder: &Path) -> Result<()> {
    let refuse = |reason: String| Error::config("hugging_face", reason);
    if ["bert", "megatron-bert"].contains(&model_type) {
        return Err(refuse(format!(
            "this model cannot be a Hugging Face {model_type}: it is a GPT"
        )));
    }
    let family = family(model_type).map_err(|reason| refuse(format!("cannot export {reason}")))?;
    write(gpt, family.holding(gpt.config())?, folder)
}

fn write(gpt: &Gpt, family: &Family, folder: &Path) -> Result<()> {
    let (params, config) = (gpt.params(), gpt.config());
    let mut tensors = Vec::new();
    for param in &params {
        let value = param.leaf().value()?;
        let Some(mapping) = family.mapping(config, param.name(), value.dims()[0]) else {
            let message = format!("{} has no '{}'", family.model_type, param.name());
            return Err(Error::config("hugging_face", message));
        };
        tensors.extend(mapping.split(&value)?);
    }
    write_folder(folder, &write_config(family, config, params[0].compute_dtype()), tensors)
}

/// Writes a model of `config` and `tensors`.
///
/// # Errors
/// A folder that cannot be written or is a checkpoint.
pub(super) fn write_folder(
    folder: &Path,
    config: &Value,
    tensors: Vec<(String, Tensor)>,
) -> Result<()> {
    if folder.join("index.json").exists() || folder.join("latest").exists() {
        return Err(Error::config(
            "hugging_face",
            format!("'{}' holds checkpoints: give another folder", folder.display()),
        ));
    }
    let write = || {
        fs::create_dir_all(folder).map_err(|error| cannot("create", folder, &error))?;
        replace(folder, "model.safetensors", |path| {
            write_tensors(path, Some(("format", "pt")), tensors)
        })?;
        replace(folder, "config.json", |path| write_bytes(path, format!("{config:#}\n").as_bytes()))
    };
    write().map_err(|fault: Fault| Error::io("hugging_face", fault))
}

/// Puts the `tokenizer.json` of a Hugging Face tokenizer into an exported `folder`. The other
/// tokenizers exist only here: for them nothing is written.
///
/// # Errors
/// A folder that cannot be written.
pub fn export_tokenizer(tokenizer: &Tokenizer, folder: &Path) -> Result<()> {
    let Tokenizer::HuggingFace(file) = tokenizer else { return Ok(()) };
    replace(folder, "tokenizer.json", |path| write_bytes(path, file.json().as_bytes()))
        .map_err(|fault| Error::io("hugging_face", fault))
}
