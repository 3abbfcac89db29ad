//! Saving: all ranks write their files, then the first one publishes the checkpoint.

use ferrotron_parallel::collective::Group;
use ferrotron_tensor::{Error, Result};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use super::folder::{self, Staging};
use super::pending_save::{Documents, PendingSave, Writes, refused};
use super::rank_files::RankFiles;
use super::shards::{LocalShard, Moments};
use super::snapshot_buffers::SnapshotBuffers;
use super::{CONFIG, OPTIMIZER, PROGRESS, SAVED, SavedModel, TOKENIZER, TrainState};
use crate::io::checked_file::Fault;
use crate::io::tokenizer::Tokenizer;

/// One rank's part of a checkpoint. All ranks together put in every element of every tensor once.
pub struct Snapshot<'a> {
    /// Weights.
    pub weights: Vec<LocalShard>,
    /// The optimizer's state. Without it the checkpoint serves for everything but resuming.
    pub moments: Option<Moments>,
    /// The model.
    pub model: SavedModel,
    /// The progress of the run.
    pub progress: &'a TrainState,
    /// The tokenizer of the data.
    pub tokenizer: Option<&'a Tokenizer>,
    /// Anything else that the run keeps: its settings, for example.
    pub run: serde_json::Value,
}

/// Writes a checkpoint of step `snapshot.progress.step` into `dir`; returns its folder. All ranks of `world`
/// call this, each with what it holds, on one file system.
///
/// One job at a time saves into `dir`, and removes what killed ones left: a [`RunLock`](crate::training::run_lock::RunLock) held
/// on `dir` keeps others out.
///
/// It takes the place of one of the same step. If anything fails, what was there before is untouched.
///
/// Each rank writes its own files. The first one then puts the lists of what is in them together, checks that
/// every element of every tensor is there once, and publishes the folder.
///
/// ```
/// use ferrotron_models::checkpoint::{Checkpoint, LocalShard, SavedModel, Snapshot, TrainState, save};
/// use ferrotron_models::gpt::{Gpt, GptConfig};
/// use ferrotron_nn::{Module, Scope};
/// use ferrotron_parallel::collective::Group;
/// use ferrotron_tensor::{DType, Device};
///
/// let config = GptConfig::gpt2(65, 2, 32, 4, 16);
/// let gpt = Gpt::new(&Scope::new(&Device::cpu(1)?, DType::F32, 1234), &config)?;
/// # let folder = tempfile::tempdir().unwrap();
/// # let runs = folder.path();
/// let folder = save(runs, &Group::single(), Snapshot {
///     weights: LocalShard::params(&gpt.params())?,
///     moments: None,
///     model: SavedModel::new("gpt", &config)?,
///     progress: &TrainState { step: 100, ..TrainState::default() },
///     tokenizer: None,
///     run: serde_json::Value::Null,
/// })?;
/// assert!(folder.ends_with("iter_0000100"));
///
/// let checkpoint = Checkpoint::open(runs)?;
/// let config = checkpoint.config_as("gpt")?;
/// let again = Gpt::new(&Scope::new(&Device::cpu(1)?, DType::F32, 0), &config)?;
/// checkpoint.load_params(&again.params())?;
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
///
/// With several ranks, each gives its shard. Here each of two ranks has two rows of a matrix:
///
/// ```
/// use ferrotron_models::checkpoint::{Checkpoint, LocalShard, SavedModel, Snapshot, TrainState, save};
/// use ferrotron_nn::{WeightDecay, Init, Scope};
/// use ferrotron_parallel::collective::{WorldConfig, run_threads};
/// use ferrotron_tensor::{DType, Device, ShardSpec, Tensor};
///
/// # let folder = tempfile::tempdir().unwrap();
/// # let runs = folder.path();
/// let saved = run_threads(2, &WorldConfig::default(), |world| {
///     let group = world.group("world", &[0, 1])?;
///     let rows = Tensor::full(&Device::cpu(1)?, DType::F32, &[2, 3], group.rank() as f64)?;
///     let place = ShardSpec::new(&[4, 3], &[&[(2 * group.rank(), 2)], &[(0, 3)]])?;
///     save(runs, &group, Snapshot {
///         weights: vec![LocalShard { name: "w".into(), place, tensor: rows }],
///         moments: None,
///         model: SavedModel::new("matrix", &[4, 3])?,
///         progress: &TrainState { step: 1, ..TrainState::default() },
///         tokenizer: None,
///         run: serde_json::Value::Null,
///     })
/// });
/// saved.into_iter().collect::<ferrotron_tensor::Result<Vec<_>>>()?;
///
/// // Loading may use shards of columns instead.
/// let column = ShardSpec::new(&[4, 3], &[&[(0, 4)], &[(1, 1)]])?;
/// let scope = Scope::new(&Device::cpu(1)?, DType::F32, 0);
/// let param = scope.param_at("w", column, Init::Zeros, WeightDecay::On);
/// Checkpoint::open(runs)?.load_params(std::slice::from_ref(&param))?;
/// assert_eq!(param.leaf().value()?.to_vec::<f32>()?, [0.0, 0.0, 1.0, 1.0]);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
///
/// # Errors
/// A folder that cannot be written, a full disk, a tensor with an element that no rank or two ranks hold. The rank
/// concerned says so. The others learn of it when it ends: every rank must then give up, since collectives do not
/// outlive an error.
pub fn save(dir: &Path, world: &Group, snapshot: Snapshot) -> Result<PathBuf> {
    begin(dir, world, snapshot, None)?.wait()
}

/// Like [`save`], but returns as soon as the tensors are copied into `buffers`; a thread writes the copies. See
/// [`PendingSave`] for the rest. All ranks of `world` call this.
///
/// ```
/// use ferrotron_models::checkpoint::{
///     LocalShard, SavedModel, Snapshot, TrainState, allocate_buffers, save_async,
/// };
/// use ferrotron_models::gpt::{Gpt, GptConfig};
/// use ferrotron_nn::{Module, Scope};
/// use ferrotron_parallel::collective::Group;
/// use ferrotron_tensor::{DType, Device};
///
/// let config = GptConfig::gpt2(65, 2, 32, 4, 16);
/// let gpt = Gpt::new(&Scope::new(&Device::cpu(1)?, DType::F32, 1234), &config)?;
/// let buffers = allocate_buffers(LocalShard::params(&gpt.params())?, None)?;
/// # let folder = tempfile::tempdir().unwrap();
/// # let runs = folder.path();
/// let pending = save_async(runs, &Group::single(), Snapshot {
///     weights: LocalShard::params(&gpt.params())?,
///     moments: None,
///     model: SavedModel::new("gpt", &config)?,
///     progress: &TrainState { step: 100, ..TrainState::default() },
///     tokenizer: None,
///     run: serde_json::Value::Null,
/// }, &buffers)?;
/// // ... training steps ...
/// assert!(pending.wait()?.ends_with("iter_0000100"));
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
///
/// # Errors
/// A folder that cannot be made; `buffers` that are made for other tensors, or that an earlier save still uses.
pub fn save_async(
    dir: &Path,
    world: &Group,
    snapshot: Snapshot,
    buffers: &SnapshotBuffers,
) -> Result<PendingSave> {
    if buffers.is_in_use() {
        let message = "the checkpoint before this one is still being written: wait for it first";
        return Err(Error::config("checkpoint", message));
    }
    begin(dir, world, snapshot, Some(buffers))
}

/// Allocates the buffers of [`save_async`] for what this rank writes.
pub fn allocate_buffers(
    weights: Vec<LocalShard>,
    moments: Option<Moments>,
) -> Result<SnapshotBuffers> {
    let moments = moments.map(|moments| moments.shards);
    let files = RankFiles::of_rank(&Group::single(), weights, moments)?;
    SnapshotBuffers::for_tensors(files.live())
}

/// Makes the folder and begins to write, in this thread or in one of its own.
fn begin(
    dir: &Path,
    world: &Group,
    snapshot: Snapshot,
    buffers: Option<&SnapshotBuffers>,
) -> Result<PendingSave> {
    let step = snapshot.progress.step;
    let refused = |fault: Fault| refused(step, &fault);
    let stray = snapshot.weights.iter().find(|held| held.name.split('.').next() == Some(OPTIMIZER));
    if let Some(stray) = stray {
        return Err(refused(format!("'{}' has the name of a moment", stray.name)));
    }
    // Here and below, an error ends this rank, and with it the others' calls.
    let first = world.rank() == 0;
    let staging = if first { Some(Staging::begin(dir, step).map_err(refused)?) } else { None };
    world.barrier().wait()?;
    let documents = if first { documents(&snapshot).map_err(refused)? } else { Vec::new() };
    let Snapshot { weights, moments, .. } = snapshot;
    let files = RankFiles::of_rank(world, weights, moments.map(|moments| moments.shards))?;
    // What a GPU holds is read by the thread that gives it work.
    let on_gpu = files.live().iter().any(|tensor| tensor.device().is_gpu());
    let (files, writes) = match buffers {
        Some(buffers) => (files.copied(buffers)?, Writes::InBackground),
        None if on_gpu || world.size() == 1 => (files, Writes::Here),
        None => (files, Writes::InThread),
    };
    let folder = folder::staging(dir, step);
    PendingSave::start((dir, step), world, (staging, documents), writes, move |cancelled| {
        files.write(&folder, cancelled)
    })
}

/// The documents beside the tensors.
fn documents(snapshot: &Snapshot) -> std::result::Result<Documents, Fault> {
    let Snapshot { model, progress, tokenizer, run, moments, .. } = snapshot;
    let mut progress = (*progress).clone();
    progress.optimizer_steps = moments.as_ref().map_or(progress.optimizer_steps, |m| m.steps);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let config = json!({
        "architecture": model.architecture,
        "model": model.config,
        "run": run,
        SAVED: now.as_secs_f64(),
    });
    let pretty = |value: &serde_json::Value| {
        serde_json::to_string_pretty(value).map_err(|error| error.to_string())
    };
    let progress = serde_json::to_string_pretty(&progress).map_err(|error| error.to_string())?;
    let mut documents = vec![(CONFIG, pretty(&config)?), (PROGRESS, progress)];
    documents.extend(tokenizer.map(|tokenizer| (TOKENIZER, tokenizer.to_json())));
    Ok(documents)
}
