//! From Hugging Face.

use ferrotron_nn::{Module, Scope};
use ferrotron_tensor::{DType, Device, Error, Result, Tensor};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::{HEAD, Orientation, PREFIX, read_config, their_name};
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
    read_config(folder)?;
    let read = || {
        let files = open_files(folder)?;
        let mut dtypes = Vec::new();
        for (file, key) in stored_weights(&files).into_values() {
            let (dtype, _) = describe(&files[file], &key)?;
            if !dtypes.contains(&dtype) {
                dtypes.push(dtype);
            }
        }
        Ok(dtypes)
    };
    read().map_err(|fault: Fault| Error::io("hugging_face", fault))
}

/// The narrowest dtype that holds every number of all `dtypes` exactly: for two that differ f32, unless one is f64.
pub fn common_dtype(dtypes: &[DType]) -> DType {
    match dtypes {
        [one] => *one,
        several if several.contains(&DType::F64) => DType::F64,
        _ => DType::F32,
    }
}

/// Imports the GPT-2 in `folder`, one file or several, with weights of the given dtype. They are the same bits where
/// they are stored in it, else rounded to nearest. [`stored_dtypes`] and [`common_dtype`] say in which dtype nothing is
/// lost.
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
/// shape; a head of its own.
pub fn import(folder: &Path, device: &Device, dtype: DType) -> Result<Gpt> {
    // Every weight is read, so the seed decides nothing.
    let gpt = Gpt::new(&Scope::new(device, dtype, 0), &read_config(folder)?)?;
    fill(folder, &gpt).map_err(|fault| Error::io("hugging_face", fault))?;
    Ok(gpt)
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

/// A tensor's file, by its number, and its name there.
pub(super) type Stored = (usize, String);

/// The weight files of `folder` with their headers, closed: a folder may have more files than a process may open.
pub(super) fn open_files(folder: &Path) -> std::result::Result<Vec<TensorFile>, Fault> {
    let open = |path: &PathBuf| {
        let mut file = TensorFile::open(path)?;
        file.close();
        Ok(file)
    };
    weight_files(folder)?.iter().map(open).collect()
}

/// The weights of `files` by their names without the prefix; masks are none.
fn stored_weights(files: &[TensorFile]) -> BTreeMap<String, Stored> {
    let mut stored = BTreeMap::new();
    for (file, opened) in files.iter().enumerate() {
        for key in opened.names() {
            let name = key.strip_prefix(PREFIX).unwrap_or(&key).to_string();
            if !name.ends_with(".attn.bias") && !name.ends_with(".attn.masked_bias") {
                stored.insert(name, (file, key));
            }
        }
    }
    stored
}

/// Dtype and dims of a weight.
pub(super) fn describe<'a>(
    file: &'a TensorFile,
    key: &str,
) -> std::result::Result<(DType, &'a [usize]), Fault> {
    let (dtype, dims) = file.describe(key)?;
    match dtype {
        DType::F64 | DType::F32 | DType::BF16 | DType::F16 => Ok((dtype, dims)),
        _ => Err(format!(
            "'{key}' in '{}' has dtype {dtype}: weights must be f64, f32, bf16 or f16",
            file.path().display()
        )),
    }
}

fn fill(folder: &Path, gpt: &Gpt) -> std::result::Result<(), Fault> {
    let mut files = open_files(folder)?;
    let mut stored = stored_weights(&files);
    let head = stored.remove(HEAD);
    let embedding = stored.get("wte.weight").cloned();
    let mut last = 0; // the one file that may be open
    for param in gpt.params() {
        let (name, orientation) =
            their_name(param.name()).ok_or_else(|| format!("GPT-2 has no '{}'", param.name()))?;
        let (file, key) = stored
            .remove(&name)
            .ok_or_else(|| format!("'{}' has no tensor '{name}'", folder.display()))?;
        let dims = |dims: &[usize]| match orientation {
            Orientation::Same => dims.to_vec(),
            Orientation::Transposed => dims.iter().rev().copied().collect(),
        };
        let wanted: Vec<usize> = dims(param.leaf().dims());
        let found = describe(&files[file], &key)?.1;
        if found != wanted {
            let path = folder.display();
            return Err(format!(
                "'{key}' in '{path}' is {found:?}, but config.json makes it {wanted:?}"
            ));
        }
        if last != file {
            files[last].close();
            last = file;
        }
        let value = read(&mut files[file], &key, param.leaf().device())?;
        let write = |target: &mut Tensor| {
            let value = value.cast(target.dtype())?;
            match orientation {
                Orientation::Same => target.copy_from(&value),
                Orientation::Transposed => target.copy_from(&value.transpose(0, 1)?),
            }
        };
        param.leaf().write_value(write).map_err(|error| error.to_string())?;
    }
    if let Some(name) = stored.keys().next() {
        return Err(format!("'{}' has a tensor '{name}' that GPT-2 has not", folder.display()));
    }
    if let (Some((file, key)), Some((wte_file, wte))) = (head, embedding) {
        let device = gpt.params()[0].leaf().device().clone();
        let head = read(&mut files[file], &key, &device)?;
        let wte = read(&mut files[wte_file], &wte, &device)?;
        let dtype = common_dtype(&[head.dtype(), wte.dtype()]);
        let same = || Ok(head.cast(dtype)?.bytes()? == wte.cast(dtype)?.bytes()?);
        let same_bytes = same().map_err(|error: Error| error.to_string())?;
        if head.dims() != wte.dims() || !same_bytes {
            return Err(format!(
                "'{HEAD}' in '{}' differs from the token embedding: a head of its own is not supported here",
                folder.display()
            ));
        }
    }
    Ok(())
}

/// Reads a tensor as it is stored.
pub(super) fn read(
    file: &mut TensorFile,
    key: &str,
    device: &Device,
) -> std::result::Result<Tensor, Fault> {
    let (dtype, dims) = file.describe(key)?;
    let mut tensor = Tensor::empty(device, dtype, dims).map_err(|error| error.to_string())?;
    let read = tensor.write_bytes(|bytes| Ok(file.read(key, 0, bytes)));
    read.map_err(|error| error.to_string())??;
    Ok(tensor)
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
