//! The export of models to folders of Hugging Face.

use ferrotron_nn::{Module, Param};
use ferrotron_tensor::{Error, Result, Tensor};
use serde_json::Value;
use std::collections::VecDeque;
use std::fs;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use super::config::write_config;
use super::families::{Family, family, family_of};
use super::mapping::Mapping;
use crate::io::checked_file::{ChecksumWriter, Fault, cannot, replace, write_bytes};
use crate::io::tensor_file::{FileTensor, put_tensor, write_tensor_file};
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
    export_from(gpt, None, folder, &mut |param| param.leaf().value())
}

/// Like [`export`], as the family whose `model_type` is given.
///
/// # Errors
/// Errors of [`export`]; a family that is not supported or does not hold this model.
pub fn export_as(gpt: &Gpt, model_type: &str, folder: &Path) -> Result<()> {
    export_from(gpt, Some(model_type), folder, &mut |param| param.leaf().value())
}

/// Returns the value of a parameter.
pub type ReadParam<'a> = dyn FnMut(&Param) -> Result<Tensor> + 'a;

/// Like [`export`] or, with a `model_type`, [`export_as`], of a model whose parameters need not be in memory: `gpt` may be on
/// a fake [`Device`](ferrotron_tensor::Device). `read` is asked for one parameter after another, whole and in its dtype, in the
/// order of the file. At most four of them are held at a time.
///
/// # Errors
/// Errors of [`export_as`] and of `read`.
pub fn export_from(
    gpt: &Gpt,
    model_type: Option<&str>,
    folder: &Path,
    read: &mut ReadParam,
) -> Result<()> {
    let (params, config) = (gpt.params(), gpt.config());
    let family = match model_type {
        Some(model_type) => family_by_name(model_type)?.holding(config)?,
        None => family_of(config)?,
    };
    let mapped = params.iter().map(|param| {
        let rows = param.shard_spec().global_dims()[0];
        let mapping = family.mapping(config, param.name(), rows).ok_or_else(|| {
            let message = format!("{} has no '{}'", family.model_type, param.name());
            Error::config("hugging_face", message)
        })?;
        Ok((param, mapping))
    });
    let mapped = mapped.collect::<Result<Vec<_>>>()?;
    let config = write_config(family, config, params[0].compute_dtype());
    write_folder(folder, &config, &mapped, read)
}

fn family_by_name(model_type: &str) -> Result<&'static Family> {
    let refuse = |reason: String| Error::config("hugging_face", reason);
    if ["bert", "megatron-bert"].contains(&model_type) {
        return Err(refuse(format!(
            "this model cannot be a Hugging Face {model_type}: it is a GPT"
        )));
    }
    family(model_type).map_err(|reason| refuse(format!("cannot export {reason}")))
}

/// Parameters that are held: a file has the parts of one apart from one another, behind parts of up to three others (norms of
/// queries and keys, the output of attention).
const HELD: usize = 4;

/// Writes a model of `config` and the parameters `mapped`, which `read` returns.
///
/// # Errors
/// A folder that cannot be written or is a checkpoint; errors of `read`.
pub(super) fn write_folder(
    folder: &Path,
    config: &Value,
    mapped: &[(&Param, Mapping)],
    read: &mut ReadParam,
) -> Result<()> {
    if folder.join("index.json").exists() || folder.join("latest").exists() {
        return Err(Error::config(
            "hugging_face",
            format!("'{}' holds checkpoints: give another folder", folder.display()),
        ));
    }
    let mut tensors: Vec<(FileTensor, [usize; 2])> = Vec::new();
    for (number, (param, mapping)) in mapped.iter().enumerate() {
        let (dims, dtype) = (param.shard_spec().global_dims(), param.leaf().dtype());
        for (part, (name, rows)) in mapping.parts.iter().enumerate() {
            let dims = mapping.dims(*rows, dims);
            tensors.push((FileTensor { name: name.clone(), dtype, dims }, [number, part]));
        }
    }
    tensors.sort_by(|(a, _), (b, _)| a.file_order(b));
    let (contents, places): (Vec<FileTensor>, Vec<[usize; 2]>) = tensors.into_iter().unzip();
    let mut held: VecDeque<(usize, Tensor)> = VecDeque::new();
    let mut part = |[number, part]: [usize; 2]| {
        let (param, mapping) = &mapped[number];
        if !held.iter().any(|(other, _)| *other == number) {
            held.truncate(HELD - 1);
            held.push_front((number, read(param)?));
        }
        let value = held.iter().find(|(other, _)| *other == number);
        value.map(|(_, value)| mapping.part(value, part)).transpose()
    };
    let mut failed = None;
    let mut put = |number: usize, writer: &mut ChecksumWriter| match part(places[number]) {
        Ok(tensor) => tensor.map_or(Ok(()), |tensor| put_tensor(&tensor, writer)),
        Err(error) => {
            let line = error.to_string();
            failed = Some(error);
            Err(std::io::Error::other(line))
        }
    };
    let mut write = || {
        fs::create_dir_all(folder).map_err(|error| cannot("create", folder, &error))?;
        let (format, never) = (Some(("format", "pt")), AtomicBool::new(false));
        replace(folder, "model.safetensors", |path| {
            write_tensor_file(path, format, &contents, &never, &mut put)
        })?;
        replace(folder, "config.json", |path| write_bytes(path, format!("{config:#}\n").as_bytes()))
    };
    let written = write().map_err(|fault: Fault| Error::io("hugging_face", fault));
    failed.map_or(written, Err)
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
