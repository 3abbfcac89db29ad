//! Saving.

use ferrotron_nn::{AxisSet, Optimizer, Param};
use ferrotron_parallel::collective::Group;
use ferrotron_tensor::{Error, Result, ShardSpec, Tensor};
use serde_json::json;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::folder::{self, Staging};
use super::index::{INDEX, Index, SliceRecord, TensorRecord};
use super::slices::boxes;
use super::{CONFIG, OPTIMIZER, PROGRESS, SavedModel, TOKENIZER, TrainState, moment_name};
use crate::io::tensor_file::{Fault, write_bytes, write_tensors};
use crate::io::tokenizer::Tokenizer;

/// A tensor, and the shard `place` that this rank holds.
pub struct LocalShard {
    /// The global name.
    pub name: String,
    /// Its part of the global tensor.
    pub place: ShardSpec,
    /// Its value.
    pub tensor: Tensor,
}

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

/// The state of an optimizer.
pub struct Moments {
    /// Its tensors, under the names that they have in a checkpoint.
    pub shards: Vec<LocalShard>,
    /// Steps taken.
    pub steps: u64,
}

impl LocalShard {
    /// The values of parameters.
    ///
    /// Errors if one has the name of a moment.
    pub fn params(params: &[Param]) -> Result<Vec<LocalShard>> {
        let held = |param: &Param| {
            let (name, place) = (param.name().to_string(), param.shard_spec().clone());
            Ok(LocalShard { name, place, tensor: param.leaf().value()? })
        };
        params.iter().map(held).collect()
    }
}

impl Moments {
    /// The state of `optimizer` that this rank writes. `written` decides, from the axes along which all ranks have the
    /// same, and the shard.
    pub fn from_optimizer(
        optimizer: &Optimizer,
        written: impl FnMut(AxisSet, &ShardSpec) -> bool,
    ) -> Result<Moments> {
        let mut held = Vec::new();
        optimizer.visit_where(written, |name, moment, place, tensor| {
            held.push(LocalShard { name: moment_name(moment, name), place: place.clone(), tensor });
            Ok(())
        })?;
        Ok(Moments { shards: held, steps: optimizer.steps() })
    }
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
    let step = snapshot.progress.step;
    let refused = |fault: Fault| {
        Error::io(
            "checkpoint",
            format!(
                "step {step} was not saved: {fault}; earlier checkpoints are untouched: free space there or choose another --save"
            ),
        )
    };
    let stray = snapshot.weights.iter().find(|held| held.name.split('.').next() == Some(OPTIMIZER));
    if let Some(stray) = stray {
        return Err(refused(format!("'{}' has the name of a moment", stray.name)));
    }
    let first = world.rank() == 0;
    // Here and below, an error ends this rank, and with it the others' barriers.
    let staging = if first { Some(Staging::begin(dir, step).map_err(refused)?) } else { None };
    world.barrier().wait()?;
    let folder = folder::staging(dir, step);
    let Snapshot { weights, moments, model, progress, tokenizer, run } = snapshot;
    let mut progress = progress.clone();
    progress.optimizer_steps = moments.as_ref().map_or(progress.optimizer_steps, |m| m.steps);
    let written = write_held(&folder, world, weights, moments.map(|moments| moments.shards));
    // A fault waits until no rank writes any more: then the first rank can delete the folder.
    world.barrier().wait()?;
    let mut index = written.map_err(refused)?;
    // One place in the program, since ranks compare where their calls come from.
    let all_done = || world.barrier().wait();
    if let Some(staging) = staging {
        let part = |rank| Index::take_part(&folder.join(part_name(rank)));
        let parts = match (1..world.size()).map(part).collect::<std::result::Result<Vec<_>, _>>() {
            Ok(parts) => parts,
            Err(fault) => {
                drop(staging);
                // The rank that did not write its part knows why; its reason ends this barrier.
                all_done()?;
                return Err(refused(fault));
            }
        };
        let documents = || {
            let mut document = |file: &str, text: String| {
                let record = write_bytes(&folder.join(file), text.as_bytes())?;
                index.files.insert(file.to_string(), record);
                Ok::<_, Fault>(())
            };
            document(
                CONFIG,
                pretty(
                    &json!({"architecture": model.architecture, "model": model.config, "run": run}),
                )?,
            )?;
            document(PROGRESS, pretty(&progress)?)?;
            if let Some(tokenizer) = tokenizer {
                document(TOKENIZER, tokenizer.to_json())?;
            }
            // What could not be loaded must not take the place of what can.
            parts.into_iter().try_for_each(|part| index.join(part))?;
            index.check()?;
            write_bytes(&folder.join(INDEX), pretty(&index)?.as_bytes())?;
            staging.publish()
        };
        let published: std::result::Result<PathBuf, Fault> = documents();
        published.map_err(refused)?;
    }
    all_done()?;
    Ok(folder::published(dir, step))
}

/// Writes this rank's files and returns what is in them; ranks other than the first also leave that beside
/// them, for the first.
fn write_held(
    folder: &Path,
    world: &Group,
    weights: Vec<LocalShard>,
    moments: Option<Vec<LocalShard>>,
) -> std::result::Result<Index, Fault> {
    let mut index = Index::new();
    for (name, held) in [("model", Some(weights)), ("optimizer", moments)] {
        if let Some(held) = held {
            write_slices(folder, &mut index, &file_name(name, world), held)?;
        }
    }
    if world.rank() > 0 {
        let part = pretty(&index)?;
        write_bytes(&folder.join(part_name(world.rank())), part.as_bytes())?;
    }
    Ok(index)
}

/// One ordinary file where there is one rank; else numbered as Hugging Face numbers shards.
fn file_name(name: &str, world: &Group) -> String {
    match (world.rank() + 1, world.size()) {
        (_, 1) => format!("{name}.safetensors"),
        (rank, ranks) => format!("{name}-{rank:05}-of-{ranks:05}.safetensors"),
    }
}

/// The list of a rank's files, which the first rank puts into the index.
fn part_name(rank: usize) -> String {
    format!("index-{rank:05}.json")
}

fn pretty(value: &impl serde::Serialize) -> std::result::Result<String, Fault> {
    serde_json::to_string_pretty(value).map_err(|error| error.to_string())
}

/// Writes what is held to one file, a tensor for each box of its place, and enters it in the index. No file
/// is written if nothing is held.
pub(super) fn write_slices(
    folder: &Path,
    index: &mut Index,
    file: &str,
    held: Vec<LocalShard>,
) -> std::result::Result<(), Fault> {
    if held.is_empty() {
        return Ok(());
    }
    let mut tensors = Vec::with_capacity(held.len());
    let mut parts: HashMap<String, usize> = HashMap::new();
    for LocalShard { name, place, tensor } in held {
        let record = index.tensors.entry(name.clone()).or_insert_with(|| TensorRecord {
            dtype: tensor.dtype().to_string(),
            shape: place.global_dims().to_vec(),
            pieces: Vec::new(),
        });
        for (slice, local) in boxes(&place) {
            // A whole tensor has its own name; the parts of one are numbered.
            let number = parts.entry(name.clone()).or_default();
            let key = match slice.shape == record.shape {
                true => name.clone(),
                false => format!("{name}#{number}"),
            };
            *number += 1;
            let mut part = tensor.clone();
            for (d, (&start, &len)) in local.iter().zip(&slice.shape).enumerate() {
                part = part.narrow(d as isize, start, len).map_err(|error| error.to_string())?;
            }
            record.pieces.push(SliceRecord { file: file.to_string(), key: key.clone(), slice });
            tensors.push((key, part));
        }
    }
    let record = write_tensors(&folder.join(file), Some(("format", "pt")), tensors)?;
    index.files.insert(file.to_string(), record);
    Ok(())
}
