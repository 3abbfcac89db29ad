//! Loading.

use ferrotron_nn::{EMA, MASTER, Param, ParamPatterns};
use ferrotron_parallel::collective::Group;
use ferrotron_parallel::long_work::run_long;
use ferrotron_tensor::{DType, Error, Result, ShardSpec};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use super::folder;
use super::index::{INDEX, Index, TensorRecord};
use super::reader::CheckpointReader;
use super::{CONFIG, PROGRESS, SavedModel, TOKENIZER, TrainState, is_moment, moment_name};
use crate::io::checked_file::{Fault, cannot};
use crate::io::tokenizer::Tokenizer;

/// A finished checkpoint whose files are all there.
#[derive(Debug)]
pub struct Checkpoint {
    pub(super) folder: PathBuf,
    pub(super) index: Index,
    pub(super) model: SavedModel,
    run: serde_json::Value,
    pub(super) progress: TrainState,
    tokenizer: Option<Tokenizer>,
    /// Whether checksums have been compared.
    pub(super) verified: AtomicBool,
    /// Bytes of the files of tensors that were read for a training state.
    pub(super) bytes_read: AtomicU64,
    /// Whether models get the moving average of the weights.
    averaged: bool,
}

/// `config.json`.
#[derive(Deserialize)]
struct Config {
    #[serde(flatten)]
    model: SavedModel,
    run: serde_json::Value,
}

impl Checkpoint {
    /// Opens a checkpoint's folder, or the latest of a run's folder; reads all of it once, to compare
    /// checksums.
    ///
    /// # Errors
    /// A path that is neither; a damaged checkpoint, with what is wrong and the newest other one beside it whose
    /// headers and lengths are right.
    pub fn open(path: &Path) -> Result<Checkpoint> {
        let checkpoint = Self::peek(path)?;
        checkpoint.verify(&Group::single())?;
        Ok(checkpoint)
    }

    /// Opens a checkpoint like [`Checkpoint::open`], but reads only names and shapes of the tensors. Ranks that load it
    /// together [verify](Checkpoint::verify) it together.
    pub fn peek(path: &Path) -> Result<Checkpoint> {
        let refuse = |message: String| Err(Error::io("checkpoint", message));
        if !path.exists() {
            return refuse(format!("there is no '{}'", path.display()));
        }
        let folder = match resolve(path) {
            Ok(Some(folder)) => folder,
            Ok(None) => {
                return refuse(format!(
                    "'{}' is not a checkpoint: it holds neither index.json nor latest (give the --save folder of a run, or an iter_ folder in it)",
                    path.display()
                ));
            }
            Err(fault) => return refuse(format!("{fault}{}", offer(path, None))),
        };
        Self::read(&folder).map_err(|fault| damaged(&folder, fault))
    }

    /// Compares checksums, unless that is done. All ranks of `world` call this: each reads some of the files, however long
    /// that takes, and none returns before all have found theirs undamaged. A
    /// [trainer](crate::trainer::Trainer::load) compares them while it loads.
    ///
    /// # Errors
    /// A damaged file, with the newest other checkpoint beside this one; another rank's error.
    pub fn verify(&self, world: &Group) -> Result<()> {
        if !self.verified.load(Relaxed) {
            let share = (world.rank(), world.size());
            run_long(world, |cancelled| {
                let verified = self.index.verify_share(&self.folder, share, cancelled);
                verified.map_err(|fault| damaged(&self.folder, fault))
            })?;
            self.verified.store(true, Relaxed);
        }
        Ok(())
    }

    fn read(folder: &Path) -> std::result::Result<Checkpoint, Fault> {
        let mut index = Index::read(folder)?;
        index.verify_headers(folder)?;
        let config: Config = document(folder, &index, CONFIG)?;
        let tokenizer = match index.files.get(TOKENIZER) {
            Some(record) => {
                let path = folder.join(TOKENIZER);
                record.verify(&path)?;
                Some(Tokenizer::from_file(&path).map_err(|error| error.to_string())?)
            }
            None => None,
        };
        Ok(Checkpoint {
            folder: folder.to_path_buf(),
            model: config.model,
            run: config.run,
            progress: document(folder, &index, PROGRESS)?,
            index,
            tokenizer,
            verified: AtomicBool::new(false),
            bytes_read: AtomicU64::new(0),
            averaged: false,
        })
    }

    /// Bytes of the files of tensors that this process has read to [load](crate::trainer::Trainer::load) trainers from
    /// this value. All ranks together read each file once.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Relaxed)
    }

    /// Its folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The model: its architecture and configuration.
    pub fn model(&self) -> &SavedModel {
        &self.model
    }

    /// The configuration of a model of `architecture`.
    ///
    /// # Errors
    /// The errors of [`SavedModel::config_as`].
    pub fn config_as<C: DeserializeOwned>(&self, architecture: &str) -> Result<C> {
        let wrong =
            |error: Error| Error::config("checkpoint", format!("{self}: {}", error.context()));
        self.model.config_as(architecture).map_err(wrong)
    }

    /// The value of [`Snapshot::run`](super::Snapshot::run).
    pub fn run(&self) -> &serde_json::Value {
        &self.run
    }

    /// The progress of the run.
    pub fn progress(&self) -> &TrainState {
        &self.progress
    }

    /// The tokenizer, if there is one.
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        self.tokenizer.as_ref()
    }

    /// Whether it holds an optimizer's moments.
    pub fn has_optimizer(&self) -> bool {
        self.index.tensors.keys().any(|name| is_moment(name))
    }

    /// The checkpoint with the moving average of the weights in their place, for models that are loaded from it. An
    /// optimizer still gets its own state.
    ///
    /// Errors if the run kept no average.
    pub fn averaged(self) -> Result<Checkpoint> {
        let prefix = moment_name(EMA, "");
        if self.index.tensors.keys().any(|name| name.starts_with(&prefix)) {
            return Ok(Checkpoint { averaged: true, ..self });
        }
        let message = format!(
            "{self} has no moving average of the weights: leave out --ema, or train with --ema-decay"
        );
        Err(Error::config("checkpoint", message))
    }

    /// The dtype of the weights, without those that were [kept in f32](Checkpoint::kept_in_fp32).
    ///
    /// # Errors
    /// A checkpoint without weights.
    pub fn dtype(&self) -> Result<DType> {
        match self.index.dtype() {
            Some(dtype) => dtype.parse(),
            None => Err(Error::io("checkpoint", format!("{self} has no weights"))),
        }
    }

    /// The names of the f32 weights of a checkpoint whose other weights have 16 bits.
    ///
    /// # Errors
    /// The errors of [`Checkpoint::dtype`].
    pub fn kept_in_fp32(&self) -> Result<ParamPatterns> {
        let all = self.dtype()?;
        let is_kept = |dtype: DType| dtype != all && dtype == all.accumulator();
        let kept = self.index.weights().filter(|(_, weight)| weight.dtype().is_ok_and(is_kept));
        ParamPatterns::new(kept.map(|(name, _)| name.as_str()))
    }

    /// Errors as [`SavedModel::check`], unless a model of `config` has these weights.
    pub fn check_config<C: Serialize + DeserializeOwned>(
        &self,
        architecture: &str,
        config: &C,
        ignored: &[&str],
    ) -> Result<()> {
        let checked = self.model.check(architecture, config, ignored);
        checked.map_err(|error| {
            let message = format!("{self} is a checkpoint of another shape: {}", error.context());
            Error::config("checkpoint", message)
        })
    }

    /// Fills the parameters of a whole model.
    ///
    /// # Errors
    /// A parameter that the checkpoint lacks or has with other dims or another dtype; a weight in the
    /// checkpoint that is none of these parameters. The model is then unchanged.
    pub fn load_params(&self, params: &[Param]) -> Result<()> {
        let names: Vec<&str> = params.iter().map(Param::name).collect();
        self.load_params_of_part(params, &names)
    }

    /// Errors, naming it, if a weight of the checkpoint is none of `names`, those of a whole model.
    pub(crate) fn check_names<'a>(&self, names: impl Iterator<Item = &'a str>) -> Result<()> {
        let known: BTreeSet<&str> = names.collect();
        let weights = self.index.tensors.keys().filter(|name| !is_moment(name));
        match weights.into_iter().find(|name| !known.contains(name.as_str())) {
            Some(stray) => Err(self.another(format!("it has '{stray}', which the model has not"))),
            None => Ok(()),
        }
    }

    /// Fills the parameters of a part of a model, such as a pipeline stage. `whole` has the names of all parameters of the
    /// model: [`parameter_names`](crate::trainer::parameter_names).
    ///
    /// # Errors
    /// The error of [`Checkpoint::load_params`] for a weight in the checkpoint that is none of `whole`.
    pub fn load_params_of_part(&self, params: &[Param], whole: &[impl AsRef<str>]) -> Result<()> {
        self.check_names(whole.iter().map(AsRef::as_ref))?;
        let find =
            |param: &Param| self.find_param(param.name(), param.shard_spec(), param.leaf().dtype());
        params.iter().try_for_each(|param| find(param).map(|_| ()))?;
        let mut reader = CheckpointReader::new(&self.folder);
        for param in params {
            let record = find(param)?;
            param.leaf().write_value(|tensor| reader.read(record, param.shard_spec(), tensor))?;
        }
        Ok(())
    }

    /// The record of a parameter's value.
    pub(super) fn find_param(
        &self,
        name: &str,
        place: &ShardSpec,
        dtype: DType,
    ) -> Result<&TensorRecord> {
        let average = moment_name(EMA, name);
        // A frozen parameter is its own average.
        match self.averaged && self.index.tensors.contains_key(&average) {
            true => self.find(&average, place, dtype),
            false => self.find_weight(name, place, dtype),
        }
    }

    /// The record of a weight: where more than 16 bits are wanted, of the master weight if there is one.
    pub(super) fn find_weight(
        &self,
        name: &str,
        place: &ShardSpec,
        dtype: DType,
    ) -> Result<&TensorRecord> {
        let master = moment_name(MASTER, name);
        let wide = matches!(dtype, DType::F32 | DType::F64);
        let name = if wide && self.index.tensors.contains_key(&master) { &master } else { name };
        self.find(name, place, dtype)
    }

    /// The record of a tensor with these global dims, in a stored dtype from which `dtype` can be read. f32, bf16 and
    /// f16 are rounded or widened to one another.
    pub(super) fn find(
        &self,
        name: &str,
        place: &ShardSpec,
        dtype: DType,
    ) -> Result<&TensorRecord> {
        let Some(record) = self.index.tensors.get(name) else {
            let names =
                self.index.tensors.keys().filter(|other| is_moment(other) == is_moment(name));
            return Err(self.another(format!(
                "it has no '{name}', but {} others such as '{}'",
                names.clone().count(),
                names.max().map_or("", String::as_str)
            )));
        };
        if record.shape != place.global_dims() {
            return Err(self.another(format!(
                "'{name}' is {:?} there, {:?} here",
                record.shape,
                place.global_dims()
            )));
        }
        if (record.dtype()? == DType::F64) != (dtype == DType::F64) {
            return Err(Error::dtype(
                "checkpoint",
                format!(
                    "'{name}' is {} in {self}, {dtype} in the model: load it with --dtype {}",
                    record.dtype, record.dtype
                ),
            ));
        }
        Ok(record)
    }

    fn another(&self, what: String) -> Error {
        Error::shape("checkpoint", format!("{self} is a checkpoint of another shape: {what}"))
    }
}

impl std::fmt::Display for Checkpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "'{}'", self.folder.display())
    }
}

/// Reads one of the small files beside the tensors; all ranks need them.
pub(super) fn document<T: DeserializeOwned>(
    folder: &Path,
    index: &Index,
    file: &str,
) -> std::result::Result<T, Fault> {
    let path = folder.join(file);
    let record = index.files.get(file).ok_or_else(|| {
        format!("'{}' is damaged: it does not list '{file}'", folder.join(INDEX).display())
    })?;
    record.verify(&path)?;
    let text = std::fs::read(&path).map_err(|error| cannot("read", &path, &error))?;
    serde_json::from_slice(&text)
        .map_err(|error| format!("'{}' is damaged: {error}", path.display()))
}

pub(super) fn damaged(folder: &Path, fault: Fault) -> Error {
    let beside = folder.parent().filter(|parent| !parent.as_os_str().is_empty());
    let offer = offer(beside.unwrap_or(Path::new(".")), Some(folder));
    Error::io("checkpoint", format!("{fault}{offer}"))
}

/// The checkpoint that a path stands for, or `None` if it is neither a checkpoint nor a run's folder.
fn resolve(path: &Path) -> std::result::Result<Option<PathBuf>, Fault> {
    let named = path.file_name().and_then(|name| name.to_str()).is_some_and(folder::is_name);
    if path.join(INDEX).exists() || (named && path.is_dir()) {
        return Ok(Some(path.to_path_buf()));
    }
    let latest = path.join(folder::LATEST);
    if !latest.exists() {
        let lost = !folder::list(path).is_empty();
        return if lost { Err(format!("'{}' is missing", latest.display())) } else { Ok(None) };
    }
    let name = std::fs::read_to_string(&latest).map_err(|error| cannot("read", &latest, &error))?;
    if !folder::is_name(name.trim()) {
        return Err(format!("'{}' does not name a checkpoint", latest.display()));
    }
    Ok(Some(folder::find(path, name.trim())))
}

/// Another checkpoint to load instead, for the end of an error message. Of that one, headers and lengths are looked at:
/// comparing the checksums of large checkpoints would hold the error back for minutes.
fn offer(dir: &Path, damaged: Option<&Path>) -> String {
    let other = folder::list(dir)
        .into_iter()
        .find(|folder| Some(folder.as_path()) != damaged && Checkpoint::read(folder).is_ok());
    match other {
        Some(folder) => format!(
            "; the newest other one is --load {} (its checksums have not been compared)",
            folder.display()
        ),
        None => format!("; there is no other one in '{}'", dir.display()),
    }
}
