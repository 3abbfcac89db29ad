//! Saving.

use ferrotron_nn::{Optimizer, Param};
use ferrotron_tensor::{Error, Place, Result, Tensor};
use serde_json::json;
use std::path::{Path, PathBuf};

use super::folder::{self, Staging};
use super::index::{INDEX, Index, Piece, TensorRecord};
use super::slices::boxes;
use super::{OPTIMIZER, Progress, moment_name};
use crate::gpt::GptConfig;
use crate::tensor_file::{Fault, write_bytes, write_tensors};
use crate::tokenizer::Tokenizer;

/// What goes into a checkpoint.
pub struct Snapshot<'a> {
    /// All parameters of the model.
    pub params: &'a [Param],
    /// The optimizer, without which the checkpoint serves for everything but going on.
    pub optimizer: Option<&'a Optimizer>,
    /// What the model is made of.
    pub config: &'a GptConfig,
    /// How far the run has come.
    pub progress: &'a Progress,
    /// The tokenizer of the data.
    pub tokenizer: Option<&'a Tokenizer>,
    /// What else the run wants to keep: its settings, for example.
    pub run: serde_json::Value,
}

/// Writes a checkpoint of step `snapshot.progress.step` into `dir`; returns its folder.
///
/// It takes the place of one of the same step. If anything fails, what was there before is untouched.
///
/// ```
/// use ferrotron_models::checkpoint::{Checkpoint, Progress, Snapshot, save};
/// use ferrotron_models::gpt::{Gpt, GptConfig};
/// use ferrotron_nn::{Module, Scope};
/// use ferrotron_tensor::{DType, Device};
///
/// let config = GptConfig::gpt2(65, 2, 32, 4, 16);
/// let gpt = Gpt::new(&Scope::new(&Device::cpu(1)?, DType::F32, 1234), &config)?;
/// # let folder = tempfile::tempdir().unwrap();
/// # let runs = folder.path();
/// let folder = save(runs, &Snapshot {
///     params: &gpt.params(),
///     optimizer: None,
///     config: &config,
///     progress: &Progress { step: 100, ..Progress::default() },
///     tokenizer: None,
///     run: serde_json::Value::Null,
/// })?;
/// assert!(folder.ends_with("iter_0000100"));
///
/// let checkpoint = Checkpoint::open(runs)?;
/// let again = Gpt::new(&Scope::new(&Device::cpu(1)?, DType::F32, 0), checkpoint.config())?;
/// checkpoint.load_params(&again.params())?;
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
///
/// # Errors
/// A folder that cannot be written, a full disk.
pub fn save(dir: &Path, snapshot: &Snapshot) -> Result<PathBuf> {
    write(dir, snapshot).map_err(|error| {
        Error::io(
            "checkpoint",
            format!(
                "step {} was not saved: {error}; earlier checkpoints are untouched: free space there or choose another --save",
                snapshot.progress.step
            ),
        )
    })
}

/// Deletes all but the `keep` checkpoints of `dir` that were written last. The one that `latest` names
/// always stays.
///
/// # Errors
/// A checkpoint that cannot be deleted.
pub fn retain(dir: &Path, keep: usize) -> Result<()> {
    let latest = std::fs::read_to_string(dir.join(folder::LATEST)).unwrap_or_default();
    for checkpoint in folder::list(dir).into_iter().skip(keep) {
        if !checkpoint.ends_with(latest.trim()) {
            folder::delete(&checkpoint).map_err(|fault| Error::io("checkpoint", fault))?;
        }
    }
    Ok(())
}

/// A tensor of which `place` is held.
pub(super) struct Held {
    pub name: String,
    pub place: Place,
    pub tensor: Tensor,
}

fn write(dir: &Path, snapshot: &Snapshot) -> std::result::Result<PathBuf, Fault> {
    let staging = Staging::begin(dir, snapshot.progress.step)?;
    let mut index = Index::new();
    write_slices(&staging, &mut index, "model.safetensors", weights(snapshot.params)?)?;
    let mut progress = snapshot.progress.clone();
    if let Some(optimizer) = snapshot.optimizer {
        progress.optimizer_steps = optimizer.steps();
        let moments = moments(optimizer)?;
        write_slices(&staging, &mut index, "optimizer.safetensors", moments)?;
    }
    let mut document = |file: &str, text: String| {
        let record = write_bytes(&staging.folder.join(file), text.as_bytes())?;
        index.files.insert(file.to_string(), record);
        Ok::<_, Fault>(())
    };
    document("config.json", pretty(&json!({"model": snapshot.config, "run": snapshot.run}))?)?;
    document("progress.json", pretty(&progress)?)?;
    if let Some(tokenizer) = snapshot.tokenizer {
        document("tokenizer.json", tokenizer.to_json())?;
    }
    write_bytes(&staging.folder.join(INDEX), pretty(&index)?.as_bytes())?;
    staging.publish()
}

fn pretty(value: &impl serde::Serialize) -> std::result::Result<String, Fault> {
    serde_json::to_string_pretty(value).map_err(|error| error.to_string())
}

fn weights(params: &[Param]) -> std::result::Result<Vec<Held>, Fault> {
    let held = |param: &Param| {
        if param.name().split('.').next() == Some(OPTIMIZER) {
            return Err(format!("'{}' has the name of a moment", param.name()));
        }
        let tensor = param.leaf().value().map_err(|error| error.to_string())?;
        Ok(Held { name: param.name().to_string(), place: param.place().clone(), tensor })
    };
    params.iter().map(held).collect()
}

fn moments(optimizer: &Optimizer) -> std::result::Result<Vec<Held>, Fault> {
    let mut held = Vec::new();
    let visited = optimizer.visit(|name, moment, place, tensor| {
        held.push(Held { name: moment_name(moment, name), place: place.clone(), tensor });
        Ok(())
    });
    visited.map(|()| held).map_err(|error| error.to_string())
}

/// Writes what is held to one file, a tensor for each box of its place, and enters it in the index.
pub(super) fn write_slices(
    staging: &Staging,
    index: &mut Index,
    file: &str,
    held: Vec<Held>,
) -> std::result::Result<(), Fault> {
    let mut tensors = Vec::with_capacity(held.len());
    for Held { name, place, tensor } in held {
        let record = index.tensors.entry(name.clone()).or_insert_with(|| TensorRecord {
            dtype: tensor.dtype().to_string(),
            shape: place.global_dims().to_vec(),
            pieces: Vec::new(),
        });
        let boxes = boxes(&place);
        for (number, (slice, local)) in boxes.iter().enumerate() {
            // One box has the tensor's own name; several are numbered.
            let key = if boxes.len() == 1 { name.clone() } else { format!("{name}#{number}") };
            let mut part = tensor.clone();
            for (d, (&start, &len)) in local.iter().zip(&slice.shape).enumerate() {
                part = part.narrow(d as isize, start, len).map_err(|error| error.to_string())?;
            }
            record.pieces.push(Piece {
                file: file.to_string(),
                key: key.clone(),
                slice: slice.clone(),
            });
            tensors.push((key, part));
        }
    }
    let record = write_tensors(&staging.folder.join(file), Some(("format", "pt")), tensors)?;
    index.files.insert(file.to_string(), record);
    Ok(())
}
