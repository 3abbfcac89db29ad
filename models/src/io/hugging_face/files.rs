//! The files of a Hugging Face folder: weights in one file or several, and their types.

use ferrotron_parallel::agreement::digest;
use ferrotron_tensor::{DType, Device, Error, Result, Tensor};
use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::io::checked_file::{Fault, cannot};
use crate::io::tensor_file::TensorFile;

/// Whether `path` looks like a Hugging Face folder: it has the `config.json` of some model and is no
/// checkpoint.
pub fn is_folder(path: &Path) -> bool {
    path.join("config.json").exists() && !path.join("index.json").exists()
}

/// The narrowest dtype that holds every number of all `dtypes` exactly: for two that differ f32, unless one is f64.
pub fn common_dtype(dtypes: &[DType]) -> DType {
    match dtypes {
        [first, rest @ ..] if rest.iter().all(|dtype| dtype == first) => *first,
        several if several.contains(&DType::F64) => DType::F64,
        _ => DType::F32,
    }
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

/// A text by which two copies of the weights in `folder` are compared without reading all of them: their files' number
/// and bytes, and a digest of names, headers and blocks in between.
///
/// # Errors
/// A folder without weights; a file that cannot be read.
pub fn weights_identity(folder: &Path) -> Result<String> {
    let io = |fault: Fault| Error::io("hugging_face", fault);
    let (mut total, mut seen) = (0, Vec::new());
    let files = weight_files(folder).map_err(io)?;
    for path in &files {
        seen.extend(path.file_name().unwrap_or_default().as_encoded_bytes());
        let read = sample(path, &mut seen);
        total += read.map_err(|error| io(cannot("read", path, &error)))?;
    }
    Ok(format!("{total} bytes in {} files, {}", files.len(), digest(&seen)))
}

/// The longest header of a safetensors file.
const LONGEST_HEADER: u64 = 100 << 20;

/// Blocks of a file that are compared, beside its header, and the bytes of each.
const BLOCKS: u64 = 32;
const BLOCK: u64 = 4096;

/// Appends the header of a safetensors file, whose length its first 8 bytes tell, and blocks at equal distances; returns
/// the length of the file.
fn sample(path: &Path, seen: &mut Vec<u8>) -> std::io::Result<u64> {
    let file = File::open(path)?;
    let length = file.metadata()?.len();
    let mut take = |start: u64, count: u64| {
        let mut bytes = vec![0; count.min(length.saturating_sub(start)) as usize];
        file.read_exact_at(&mut bytes, start)?;
        seen.extend(&bytes);
        Ok::<_, std::io::Error>(bytes)
    };
    let header: [u8; 8] = take(0, 8)?.try_into().unwrap_or_default();
    take(8, u64::from_le_bytes(header).min(LONGEST_HEADER))?;
    for block in 0..BLOCKS {
        take(length / BLOCKS * block, BLOCK)?;
    }
    Ok(length)
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
