//! To Hugging Face.

use ferrotron_nn::Module;
use ferrotron_tensor::{Error, Result, Tensor};
use serde_json::Value;
use std::fs;
use std::path::Path;

use super::config::write_config;
use super::{Orientation, PREFIX, their_name};
use crate::io::tensor_file::{Fault, cannot, replace, write_bytes, write_tensors};
use crate::io::tokenizer::Tokenizer;
use crate::model::gpt::Gpt;

/// Writes `gpt` into `folder`, as `GPT2LMHeadModel.save_pretrained` would, so that
/// `from_pretrained(folder)` loads the same numbers.
///
/// ```
/// use ferrotron_models::gpt::{Gpt, GptConfig};
/// use ferrotron_models::hugging_face;
/// use ferrotron_nn::Scope;
/// use ferrotron_tensor::{DType, Device};
/// # let dir = tempfile::tempdir().unwrap();
/// # let folder = dir.path().join("export");
/// let scope = Scope::new(&Device::cpu(1)?, DType::F32, 1234);
/// let gpt = Gpt::new(&scope, &GptConfig::gpt2(65, 2, 32, 4, 16))?;
/// hugging_face::export(&gpt, &folder)?;
/// assert_eq!(hugging_face::read_config(&folder)?, *gpt.config());
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
///
/// # Errors
/// A model that GPT-2 there cannot be (rotary positions, RMSNorm, SwiGLU, grouped queries, no biases, an
/// untied head); a folder that cannot be written or is a checkpoint.
pub fn export(gpt: &Gpt, folder: &Path) -> Result<()> {
    let params = gpt.params();
    let dtype = params[0].compute_dtype();
    let config = write_config(gpt.config(), dtype)?;
    let mut tensors = Vec::new();
    for param in &params {
        let Some((name, orientation)) = their_name(param.name()) else {
            return Err(Error::config("hugging_face", format!("GPT-2 has no '{}'", param.name())));
        };
        let value = param.leaf().value()?;
        let value = match orientation {
            Orientation::Same => value,
            Orientation::Transposed => value.transpose(0, 1)?,
        };
        tensors.push((format!("{PREFIX}{name}"), value));
    }
    write_folder(folder, &config, tensors)
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
