//! The trained model that `--load` names: of a run folder, a checkpoint or a Hugging Face folder.

use ferrotron::models::bert::Bert;
use ferrotron::models::checkpoint::Checkpoint;
use ferrotron::models::hugging_face::{self, ModelKind};
use ferrotron::models::tokenizer::Tokenizer;
use ferrotron::models::trainer::{Model, ModelChunk, parameter_names};
use ferrotron::nn::{Axis, Scope};
use ferrotron::parallel::mesh::Mesh;
use ferrotron::{DType, Device, Error, Result};
use std::path::{Path, PathBuf};

use super::architecture::TrainedModel;
use super::args::device::DeviceArgs;
use super::job::ModelRank;
use super::output;
use super::run_folder::newest_run;

/// Token ids that padding adds to a vocabulary, at most.
const MOST_PADDING: usize = 1024;

/// A trained model, or this rank's chunk of it, with its tokenizer.
pub struct Loaded<M: TrainedModel> {
    pub model: M,
    /// The configuration of the whole model.
    pub config: M::Config,
    /// The scope in which it was made.
    pub scope: Scope,
    pub tokenizer: Option<Tokenizer>,
    /// The checkpoint of both, unless they come from a Hugging Face folder.
    pub checkpoint: Option<Checkpoint>,
}

impl<M: TrainedModel> Loaded<M> {
    /// Loads a run folder, a checkpoint or a Hugging Face folder, with `averaged` the moving average of a run's weights:
    /// this rank's chunk of the model.
    pub fn open_on(
        path: &Path,
        device: &DeviceArgs,
        averaged: bool,
        place: &ModelRank,
    ) -> Result<Loaded<M>> {
        if hugging_face::is_folder(path) {
            refuse_average(path, averaged)?;
            let config = M::folder_config(path)?;
            let scope = Scope::new(&place.device, folder_dtype(path, device, place)?, 0);
            let model = chunk::<M>(&scope, &place.mesh, &config)?;
            M::folder_weights(path, &config)?.fill(&model.params())?;
            let tokenizer = folder_tokenizer::<M>(path, &config, place)?;
            return Ok(Loaded { model, config, scope, tokenizer, checkpoint: None });
        }
        let checkpoint = Checkpoint::open(path)?;
        let checkpoint = if averaged { checkpoint.averaged()? } else { checkpoint };
        let given = device.given_dtype()?;
        let config = M::config_from(&checkpoint)?;
        Ok(Loaded {
            model: read(&checkpoint, place, &config, given)?,
            config,
            scope: Scope::new(&place.device, given.map_or_else(|| checkpoint.dtype(), Ok)?, 0),
            tokenizer: checkpoint.tokenizer().cloned(),
            checkpoint: Some(checkpoint),
        })
    }
}

/// The tokenizer of a Hugging Face folder with a model of `config`; warns if it lacks many of the model's token ids.
pub(super) fn folder_tokenizer<M: TrainedModel>(
    folder: &Path,
    config: &M::Config,
    place: &ModelRank,
) -> Result<Option<Tokenizer>> {
    let tokenizer = hugging_face::read_tokenizer(folder)?;
    if let Some(tokenizer) = &tokenizer {
        let model = M::sizes(config).vocab_size;
        unused_ids(model, tokenizer.vocab_size()).iter().for_each(|line| place.warn(line));
    }
    Ok(tokenizer)
}

/// Errors if the moving average of a Hugging Face folder is asked for.
pub(super) fn refuse_average(folder: &Path, averaged: bool) -> Result<()> {
    if !averaged {
        return Ok(());
    }
    let message = format!("{} has no moving average: leave it out", folder.display());
    Err(Error::config("--ema", message))
}

/// Describes the chunk of the model that this rank of `mesh` has.
pub(super) fn chunk<M: Model>(scope: &Scope, mesh: &Mesh, config: &M::Config) -> Result<M> {
    let stages = mesh.axis(Axis::Pipeline);
    let chunks = ModelChunk::chunks(M::num_blocks(config), stages.rank(), stages.size(), 1)?;
    M::new_chunk(scope, mesh, config, &chunks[0])
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

/// The warning for a tokenizer that has fewer token ids than a model, by more than padding makes.
pub fn unused_ids(model: usize, tokenizer: usize) -> Option<String> {
    (model > tokenizer + MOST_PADDING).then(|| {
        format!(
            "warning: the tokenizer has {tokenizer} token ids, and the model has {model}: is it the model's own?"
        )
    })
}

/// The path, or else the newest run.
pub fn named_or_newest(path: Option<&PathBuf>) -> Result<PathBuf> {
    path.cloned().map_or_else(|| newest_run("--load"), Ok)
}

/// This rank's chunk of the model of `checkpoint`, in the dtype that was asked for or in that of the checkpoint.
fn read<M: Model>(
    checkpoint: &Checkpoint,
    place: &ModelRank,
    config: &M::Config,
    dtype: Option<DType>,
) -> Result<M> {
    let (scope, of_result) = scopes(checkpoint, &place.device, dtype)?;
    let model = chunk::<M>(&scope, &place.mesh, config)?;
    let names = parameter_names::<M>(config, scope.dtype())?;
    checkpoint.load_params_of_part(&model.params(), &names)?;
    let Some(of_result) = of_result else { return Ok(model) };
    let converted = chunk::<M>(&of_result, &place.mesh, config)?;
    for (to, from) in converted.params().iter().zip(model.params()) {
        to.leaf().set_value(&from.leaf().value()?.cast(of_result.dtype())?)?;
    }
    Ok(converted)
}

/// The scope of a model into which the weights of `checkpoint` are read, and that of the model in the dtype that was asked
/// for if they must be converted afterwards.
pub(super) fn scopes(
    checkpoint: &Checkpoint,
    device: &Device,
    dtype: Option<DType>,
) -> Result<(Scope, Option<Scope>)> {
    let held = checkpoint.dtype()?;
    let dtype = dtype.unwrap_or(held);
    let kept = checkpoint.kept_in_fp32()?;
    let scope = |dtype| {
        let scope = Scope::new(device, dtype, 0);
        if dtype == held { scope.with_accumulator_dtype(&kept) } else { scope }
    };
    // f32, bf16 and f16 are converted while they are read.
    match (held == DType::F64) == (dtype == DType::F64) {
        true => Ok((scope(dtype), None)),
        false => Ok((scope(held), Some(scope(dtype)))),
    }
}

/// The dtype that was asked for, or the one in which no weight of a Hugging Face folder is rounded.
pub(super) fn folder_dtype(folder: &Path, device: &DeviceArgs, place: &ModelRank) -> Result<DType> {
    if let Some(dtype) = device.given_dtype()? {
        return Ok(dtype);
    }
    let stored = hugging_face::stored_dtypes(folder)?;
    let dtype = hugging_face::common_dtype(&stored);
    if stored.len() > 1 && place.mesh.rank() == 0 {
        let names: Vec<String> = stored.iter().map(DType::to_string).collect();
        output::note(&format!(
            "'{}' has weights in {}: read as {dtype}, which holds all of them exactly",
            folder.display(),
            names.join(" and ")
        ));
    }
    Ok(dtype)
}
