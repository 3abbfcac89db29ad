//! From Hugging Face.

use ferrotron_nn::{Module, Scope};
use ferrotron_tensor::{DType, Device, Error, Result};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::config::{read_config, read_family};
use super::families::Family;
use super::source::Source;
use crate::io::tensor_file::{Fault, TensorFile};
use crate::io::tokenizer::Tokenizer;
use crate::model::gpt::Gpt;

/// Whether `path` looks like a Hugging Face folder: it has the `config.json` of some model and is no
/// checkpoint.
pub fn is_folder(path: &Path) -> bool {
    path.join("config.json").exists() && !path.join("index.json").exists()
}

/// The dtypes of the weights in `folder`, each once, the first stored first.
///
/// # Errors
/// Errors of [`read_config`]; malformed or missing files; a weight that is no floating-point number.
pub fn stored_dtypes(folder: &Path) -> Result<Vec<DType>> {
    let (family, _) = read_family(folder)?;
    source(folder, family).and_then(|source| source.dtypes()).map_err(failed)
}

/// Imports the language model in `folder`, one file or several, with weights of the given dtype. They are the same
/// bits where they are stored in it, else rounded to nearest. [`stored_dtypes`] and [`common_dtype`] say in which dtype
/// nothing is lost.
///
/// ```no_run
/// use ferrotron_models::hugging_face;
/// use ferrotron_tensor::Device;
/// # let folder = std::path::Path::new("models/gpt2");
/// let dtype = hugging_face::common_dtype(&hugging_face::stored_dtypes(folder)?);
/// let gpt = hugging_face::import(folder, &Device::cpu(2)?, dtype)?;
/// println!("{} parameters", gpt.config().num_parameters());
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
///
/// # Errors
/// Errors of [`read_config`]; malformed or missing files; tensors that are missing, unknown or of another
/// shape; a head that differs from the token embedding where both are tied.
pub fn import(folder: &Path, device: &Device, dtype: DType) -> Result<Gpt> {
    let (family, config) = read_family(folder)?;
    // Every weight is read, so the seed decides nothing.
    let gpt = Gpt::new(&Scope::new(device, dtype, 0), &config)?;
    let fill = || {
        let mut source = source(folder, family)?;
        if config.tie_embeddings {
            source.check_copy(family.head, &family.embedding(), device)?;
        }
        source.fill(&gpt.params(), |ours, rows| family.mapping(&config, ours, rows))
    };
    fill().map_err(failed)?;
    Ok(gpt)
}

/// The weights of a model of `family` in `folder`.
fn source<'a>(folder: &'a Path, family: &Family) -> std::result::Result<Source<'a>, Fault> {
    Ok(Source::new(folder, open_files(folder)?, |key| family.full_name(key)))
}

pub(super) fn failed(fault: Fault) -> Error {
    Error::io("hugging_face", fault)
}

/// The tokenizer of `folder`: its `tokenizer.json`, or GPT-2's if the vocabulary has that size.
///
/// # Errors
/// Errors of [`read_config`] and [`Tokenizer::from_file`].
pub fn read_tokenizer(folder: &Path) -> Result<Option<Tokenizer>> {
    let file = folder.join("tokenizer.json");
    if file.exists() {
        return Tokenizer::from_file(&file).map(Some);
    }
    let vocab_size = read_config(folder)?.vocab_size;
    Ok((vocab_size == Tokenizer::Gpt2.vocab_size()).then_some(Tokenizer::Gpt2))
}

/// The weight files of `folder` with their headers, closed: a folder may have more files than a process may open.
pub(super) fn open_files(folder: &Path) -> std::result::Result<Vec<TensorFile>, Fault> {
    let open = |path: &PathBuf| {
        let mut file = TensorFile::open(path)?;
        file.close();
        Ok(file)
    };
    weight_files(folder)?.iter().map(open).collect()
}

/// `model.safetensors`, or the files that `model.safetensors.index.json` lists.
fn weight_files(folder: &Path) -> std::result::Result<Vec<PathBuf>, Fault> {
    let (single, index) =
        (folder.join("model.safetensors"), folder.join("model.safetensors.index.json"));
    if single.exists() {
        return Ok(vec![single]);
    }
    if !index.exists() {
        let bin = folder.join("pytorch_model.bin").exists();
        let hint =
            if bin { ": only pytorch_model.bin; save it with safe_serialization=True" } else { "" };
        return Err(format!("'{}' has no model.safetensors{hint}", folder.display()));
    }
    let damaged = |what: String| format!("'{}' is damaged: {what}", index.display());
    let text = std::fs::read(&index).map_err(|error| damaged(error.to_string()))?;
    let index: serde_json::Value =
        serde_json::from_slice(&text).map_err(|error| damaged(error.to_string()))?;
    let map =
        index["weight_map"].as_object().ok_or_else(|| damaged("it has no weight_map".into()))?;
    let names: BTreeSet<&str> = map.values().filter_map(|file| file.as_str()).collect();
    Ok(names.into_iter().map(|name| folder.join(name)).collect())
}
