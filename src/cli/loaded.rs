//! The trained model that `--load` names: of a run folder, a checkpoint or a Hugging Face folder.

use ferrotron::models::bert::Bert;
use ferrotron::models::checkpoint::Checkpoint;
use ferrotron::models::hugging_face::{self, ModelKind};
use ferrotron::models::tokenizer::Tokenizer;
use ferrotron::models::trainer::{Model, ModelChunk};
use ferrotron::nn::Scope;
use ferrotron::parallel::mesh::Mesh;
use ferrotron::{DType, Device, Error, Result};
use std::path::{Path, PathBuf};

use super::architecture::TrainedModel;
use super::args::device::DeviceArgs;
use super::output;
use super::run_folder::newest_run;

/// A trained model with its tokenizer.
pub struct Loaded<M> {
    pub model: M,
    /// The scope in which it was made.
    pub scope: Scope,
    pub tokenizer: Option<Tokenizer>,
    /// The checkpoint of both, unless they come from a Hugging Face folder.
    pub checkpoint: Option<Checkpoint>,
}

impl<M: TrainedModel> Loaded<M> {
    /// Loads a run folder, a checkpoint or a Hugging Face folder; with `averaged` the moving average of a run's weights.
    pub fn open(path: &Path, device: &DeviceArgs, averaged: bool) -> Result<Loaded<M>> {
        let device_handle = device.open()?;
        if hugging_face::is_folder(path) {
            if averaged {
                let message = format!("{} has no moving average: leave it out", path.display());
                return Err(Error::config("--ema", message));
            }
            let dtype = folder_dtype(path, device)?;
            return Ok(Loaded {
                model: M::import(path, &device_handle, dtype)?,
                scope: Scope::new(&device_handle, dtype, 0),
                tokenizer: hugging_face::read_tokenizer(path)?,
                checkpoint: None,
            });
        }
        let checkpoint = Checkpoint::open(path)?;
        let checkpoint = if averaged { checkpoint.averaged()? } else { checkpoint };
        let given = device.given_dtype()?;
        Ok(Loaded {
            model: read(&checkpoint, &device_handle, given)?,
            scope: Scope::new(&device_handle, given.map_or_else(|| checkpoint.dtype(), Ok)?, 0),
            tokenizer: checkpoint.tokenizer().cloned(),
            checkpoint: Some(checkpoint),
        })
    }
}

/// Whether `path` holds a BERT: a checkpoint, or a Hugging Face folder.
pub fn is_bert(path: &Path) -> Result<bool> {
    match hugging_face::is_folder(path) {
        true => Ok(hugging_face::model_kind(path)? == ModelKind::Bert),
        false => Ok(Checkpoint::peek(path)?.model().architecture == Bert::ARCHITECTURE),
    }
}

/// Errors if a tokenizer has token ids that the model has not. More ids of the model are padding.
pub fn check_vocab_size(model: usize, tokenizer: usize) -> Result<()> {
    if tokenizer <= model {
        return Ok(());
    }
    let message = format!(
        "the tokenizer has {tokenizer} token ids, and the model of --load has {model}: give the model's own"
    );
    Err(Error::config("--tokenizer", message))
}

/// The path, or else the newest run.
pub fn named_or_newest(path: Option<&PathBuf>) -> Result<PathBuf> {
    path.cloned().map_or_else(|| newest_run("--load"), Ok)
}

/// The model of `checkpoint` in the dtype that was asked for, or in that of the checkpoint.
fn read<M: Model>(checkpoint: &Checkpoint, device: &Device, dtype: Option<DType>) -> Result<M> {
    let held = checkpoint.dtype()?;
    let dtype = dtype.unwrap_or(held);
    let config = M::config_from(checkpoint)?;
    let whole = ModelChunk::whole(M::num_blocks(&config));
    let kept = checkpoint.kept_in_fp32()?;
    let empty = |dtype| {
        let scope = Scope::new(device, dtype, 0);
        let scope = if dtype == held { scope.with_accumulator_dtype(&kept) } else { scope };
        M::new_chunk(&scope, &Mesh::single(), &config, &whole)
    };
    // f32, bf16 and f16 are converted while they are read.
    let read_as = if (held == DType::F64) == (dtype == DType::F64) { dtype } else { held };
    let model = empty(read_as)?;
    checkpoint.load_params(&model.params())?;
    if read_as == dtype {
        return Ok(model);
    }
    let converted = empty(dtype)?;
    for (to, from) in converted.params().iter().zip(model.params()) {
        to.leaf().set_value(&from.leaf().value()?.cast(dtype)?)?;
    }
    Ok(converted)
}

/// The dtype that was asked for, or the one in which no weight of a Hugging Face folder is rounded.
fn folder_dtype(folder: &Path, device: &DeviceArgs) -> Result<DType> {
    if let Some(dtype) = device.given_dtype()? {
        return Ok(dtype);
    }
    let stored = hugging_face::stored_dtypes(folder)?;
    let dtype = hugging_face::common_dtype(&stored);
    if stored.len() > 1 {
        let names: Vec<String> = stored.iter().map(DType::to_string).collect();
        output::note(&format!(
            "'{}' has weights in {}: read as {dtype}, which holds all of them exactly",
            folder.display(),
            names.join(" and ")
        ));
    }
    Ok(dtype)
}
